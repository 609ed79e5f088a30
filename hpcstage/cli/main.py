"""The command group: finds the command, turns errors into one line and an exit code. No logic.

Commands are imported when they are used: `run` must reach the user's command within a quarter of a second.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence

import click

from hpcstage import __version__, stderr
from hpcstage.errors import HpcstageError

COMMANDS = {
    "run": "hpcstage.cli.run:run",
    "plan": "hpcstage.cli.plan:plan",
    "report": "hpcstage.cli.report:report",
    "clean": "hpcstage.cli.clean:clean",
    "checkpoint": "hpcstage.cli.checkpoint:checkpoint",
    "config": "hpcstage.cli.config:config",
    "demo": "hpcstage.cli.demo:demo",
    "install-hook": "hpcstage.cli.hook:install_hook",
}
INTERRUPTED = 130


class LazyGroup(click.Group):
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


@click.group(cls=LazyGroup, invoke_without_command=True, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, "-V", "--version", prog_name="hpcstage")
@click.pass_context
def cli(context: click.Context) -> None:
    """Make the disk inside each compute node work for your training job.

    Put `hpcstage run --data DATASET --` in front of the command that trains.
    """
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


def run(arguments: Sequence[str]) -> int:
    """Runs the command line; returns the exit code."""
    try:
        result = cli.main(args=list(arguments), prog_name="hpcstage", standalone_mode=False)
    except click.exceptions.Exit as error:
        return error.exit_code
    except click.exceptions.Abort:
        return INTERRUPTED
    except KeyboardInterrupt:
        return INTERRUPTED
    except click.ClickException as error:
        return _say(error.format_message(), error.exit_code)
    except HpcstageError as error:
        return _say(error.line(), error.exit_code)
    except BrokenPipeError:
        _drop_output()
        return 1
    except OSError as error:
        _drop_output()
        what = "cannot write to standard output" if error.filename is None else f"cannot use {error.filename}"
        return _say(f"{what}: {error.strerror}", 1)
    return result if isinstance(result, int) else 0


def _drop_output() -> None:
    """Makes what is still to be written to standard output go nowhere; it would fail once more at the end."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


def _say(message: str, code: int) -> int:
    stderr.say(message)
    return code
