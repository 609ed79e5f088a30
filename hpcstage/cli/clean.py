"""`hpcstage clean`: removes what killed runs left on this node, and drains their files. No logic."""

from __future__ import annotations

import os
from typing import Any

import click

from hpcstage.cli.command import Command
from hpcstage.cli.options import common_options


@click.command("clean", cls=Command, short_help="Remove what killed runs left on this node, and drain their files.")
@click.option(
    "--drain", is_flag=True, help="Copy what killed runs left to the directories of their --out and --checkpoint."
)
@click.option(
    "--forget",
    "forgotten",
    metavar="RUN-ID",
    multiple=True,
    help="Delete the output files and checkpoints that this killed run left. Repeatable.",
)
@click.option("--local-dir", "local_dir", metavar="DIR|$VAR|ram|auto", help="The node-local directory of these runs.")
@common_options
def clean(drain: bool, forgotten: tuple[str, ...], verbose: bool, quiet: bool, **given: Any) -> int:  # noqa: ANN401  click hands over what was typed
    """Remove what runs that were killed left on the local disk of this node.

    Output files and checkpoints that are not in their directory yet are deleted with --forget only: they are named,
    and with --drain copied. A file there that has been changed since the run saw it is not replaced: the run's lies
    beside it as NAME.RUN-ID.

    \b
    hpcstage clean
    hpcstage clean --drain
    hpcstage clean --forget 20261123-101500-a1b2c3

    Exit code 0: nothing is left; 74: output files are left, of runs that are over; 2: bad usage, or no such run;
    125: no local directory can be used. It may be ended at any time and started again.
    """
    from hpcstage import inherited
    from hpcstage.config import load
    from hpcstage.wrapper import leftovers

    config = load(given, os.environ, inherited.directory())
    return leftovers.clean(config, verbose - quiet, drains=drain, forgotten=forgotten)
