"""`hpcstage clean`: removes what killed runs left on this node, and drains their output files. No logic."""

from __future__ import annotations

import os
from typing import Any

import click

from hpcstage.cli.options import common_options


@click.command("clean", short_help="Remove what killed runs left on this node, and drain their output files.")
@click.option("--drain", is_flag=True, help="Copy the output files of killed runs to the directories of their --out.")
@click.option("--local-dir", "local_dir", metavar="DIR|$VAR|ram|auto", help="The node-local directory of these runs.")
@common_options
def clean(drain: bool, verbose: bool, quiet: bool, **given: Any) -> int:  # noqa: ANN401  click hands over what was typed
    """Remove what runs that were killed left on the local disk of this node.

    Output files that are not in the directory of --out yet are never deleted: they are named, and with --drain copied.
    A file there that has been changed since the run saw it is not replaced: the run's lies beside it as NAME.RUN-ID.

    \b
    hpcstage clean
    hpcstage clean --drain

    Exit code 0: nothing is left; 74: output files are left; 2: bad usage; 125: no local directory can be used.
    """
    from hpcstage import inherited
    from hpcstage.config import load
    from hpcstage.wrapper import cleaning

    config = load(given, os.environ, inherited.directory())
    return cleaning.clean(config, verbose - quiet, drains=drain)
