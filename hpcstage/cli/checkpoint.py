"""`hpcstage checkpoint`: lists, verifies and restores the checkpoints of a DIR of --checkpoint. No logic."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hpcstage.cli.command import CommandGroup
from hpcstage.cli.options import Decorated

if TYPE_CHECKING:
    from hpcstage.wrapper.checkpointcommand import FoundCheckpoints

_DAMAGED = 1


def _place_options(command: Decorated) -> Decorated:
    command = click.option(
        "--local-dir", "local_dir", metavar="DIR|$VAR|ram|auto", help="The node-local directory of these runs."
    )(command)
    command = click.option("--config", metavar="FILE", help="Read settings from this YAML file (HPCSTAGE_CONFIG).")(
        command
    )
    return click.argument("directory", metavar="DIR")(command)


@click.group("checkpoint", cls=CommandGroup, short_help="List, verify or restore checkpoints of --checkpoint DIR.")
def checkpoint() -> None:
    """List, verify or restore the checkpoints of a DIR of `hpcstage run --checkpoint DIR`.

    DIR holds plain files, which any machine sees. On a node on which a run was killed its generations are found, too.
    """


@checkpoint.command("ls")
@_place_options
def ls(directory: str, **given: Any) -> int:  # noqa: ANN401  click hands over what was typed
    """List what is in DIR and on the local disk of this machine."""
    from hpcstage.wrapper import checkpointcommand

    for line in checkpointcommand.ls(_found(directory, given)):
        click.echo(line)
    return 0


@checkpoint.command("verify")
@_place_options
def verify(directory: str, **given: Any) -> int:  # noqa: ANN401  click hands over what was typed
    """Read everything and compare it with its checksums.

    Exit code 0: all is whole; 1: something is damaged, or nothing can be verified; 2: bad usage.
    """
    from hpcstage.wrapper import checkpointcommand

    lines, is_whole = checkpointcommand.verify(_found(directory, given))
    for line in lines:
        click.echo(line)
    return 0 if is_whole else _DAMAGED


@checkpoint.command("restore")
@_place_options
@click.argument("to", metavar="TO")
@click.option("--generation", "number", type=int, metavar="N", help="One of the generations on this machine.")
def restore(directory: str, to: str, number: int | None, **given: Any) -> int:  # noqa: ANN401  click hands over what was typed
    """Put the newest state into the directory TO, verified. Files there that are not older stay."""
    from hpcstage import inherited
    from hpcstage.wrapper import checkpointcommand

    click.echo(checkpointcommand.restore_to(_found(directory, given), inherited.directory() / to, number))
    return 0


def _found(directory: str, given: dict[str, Any]) -> FoundCheckpoints:
    from hpcstage import inherited
    from hpcstage.config import load
    from hpcstage.wrapper.checkpointcommand import FoundCheckpoints

    cwd = Path(inherited.directory())
    return FoundCheckpoints.look(directory, load(given, os.environ, cwd), cwd)
