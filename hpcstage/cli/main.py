"""The command group: finds the command, turns errors into one line and an exit code. No logic.

Commands are imported when they are used: `run` must reach the user's command within a quarter of a second.
"""

from __future__ import annotations

import importlib
import io
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from hpcstage import __version__, extras, stderr
from hpcstage.cli.command import CommandGroup
from hpcstage.errors import HpcstageError

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

COMMANDS = {
    "run": "hpcstage.cli.run:run",
    "plan": "hpcstage.cli.plan:plan",
    "doctor": "hpcstage.cli.doctor:doctor",
    "report": "hpcstage.cli.report:report",
    "list": "hpcstage.cli.list:list_runs",
    "compare": "hpcstage.cli.compare:compare",
    "prune": "hpcstage.cli.prune:prune",
    "script": "hpcstage.cli.script:script",
    "explain": "hpcstage.cli.explain:explain",
    "clean": "hpcstage.cli.clean:clean",
    "checkpoint": "hpcstage.cli.checkpoint:checkpoint",
    "config": "hpcstage.cli.config:config",
    "demo": "hpcstage.cli.demo:demo",
    "install-hook": "hpcstage.cli.hook:install_hook",
}
INTERRUPTED = 130
_STDOUT = 1


class LazyGroup(CommandGroup):
    """A group that knows its commands by name and imports only the one that is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Returns all commands, in the order in which a user meets them."""
        del ctx
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Imports one command."""
        del ctx
        if cmd_name not in COMMANDS:
            return None
        module, _, attribute = COMMANDS[cmd_name].partition(":")
        command = getattr(importlib.import_module(module), attribute)
        return command if isinstance(command, click.Command) else None

    def invoke(self, ctx: click.Context) -> object:
        """Runs the command. click would end this process without a word wherever a pipe is broken, and not only that
        of standard output."""
        try:
            return super().invoke(ctx)
        except OSError as error:
            raise CallFailed(error) from error


class CallFailed(Exception):
    """A system call of a command failed, with an error that the command did not expect."""

    def __init__(self, error: OSError) -> None:
        super().__init__(str(error))
        self.error = error


class StandardOutput(io.FileIO):
    """Standard output. It remembers why it took nothing: an error does not say to which file it belongs."""

    def __init__(self) -> None:
        super().__init__(_STDOUT, "wb", closefd=False)
        self.refusal: OSError | None = None

    def write(self, data: ReadableBuffer, /) -> int:
        """Writes data, like the file; notes the error of a write that fails."""
        try:
            return super().write(data)
        except OSError as error:
            self.refusal = error
            raise

    def drop(self) -> None:
        """Makes what is still to be written go nowhere; it would fail once more at the end of the process."""
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self.fileno())
        os.close(nowhere)


@click.group(cls=LazyGroup, invoke_without_command=True, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, "-V", "--version", prog_name="hpcstage")
@click.pass_context
def cli(context: click.Context) -> None:
    """Make the disk inside each compute node work for your training job.

    Put `hpcstage run --data DATASET --` in front of the command that trains.

    \b
    Completions (bash; also zsh, fish):  eval "$(_HPCSTAGE_COMPLETE=bash_source hpcstage)"
    Man pages, from a clone:             scripts/man.py ~/.local/share/man/man1
    """
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


def run(arguments: Sequence[str]) -> int:
    """Runs the command line; returns the exit code."""
    output = _take_output()
    try:
        result = cli.main(args=list(arguments), prog_name="hpcstage", standalone_mode=False)
    except click.exceptions.Exit as error:
        return error.exit_code
    except click.exceptions.Abort:
        return INTERRUPTED
    except KeyboardInterrupt:
        return INTERRUPTED
    except click.NoSuchOption as error:
        return _say(f"no such option {error.option_name!r} (see hpcstage --help)", error.exit_code)
    except click.ClickException as error:
        return _say(error.format_message(), error.exit_code)
    except HpcstageError as error:
        return _say(error.line(), error.exit_code)
    except ModuleNotFoundError as error:
        if (found := extras.of_import(error)) is None:
            raise
        return _say(found.line(), found.exit_code)
    except CallFailed as failed:
        return _say_why(failed.error, output)
    except OSError as error:
        return _say_why(error, output)
    return result if isinstance(result, int) else 0


def _take_output() -> StandardOutput:
    """Puts an StandardOutput in the place of standard output."""
    output, before = StandardOutput(), sys.stdout
    sys.stdout = io.TextIOWrapper(
        io.BufferedWriter(output), before.encoding, before.errors, line_buffering=output.isatty()
    )
    return output


def _say_why(error: OSError, output: StandardOutput) -> int:
    """Says in a line which system call failed; nothing where standard output is a pipe that its reader closed."""
    if output.refusal is None:
        what = "a system call failed" if error.filename is None else f"cannot use {error.filename}"
        return _say(f"{what}: {error.strerror or error}", 1)
    output.drop()
    if isinstance(output.refusal, BrokenPipeError):
        return 1
    return _say(f"cannot write to standard output: {output.refusal.strerror}", 1)


def _say(message: str, code: int) -> int:
    stderr.say(message)
    return code
