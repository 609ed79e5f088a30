"""`hpcstage run`: the options, then the wrapper."""

from __future__ import annotations

import os
import shutil
from typing import Any

import click

from hpcstage.cli.command import RunCommand
from hpcstage.cli.options import complete_path, dataset_options, run_options


@click.command(
    "run",
    cls=RunCommand,
    context_settings={"allow_interspersed_args": False},
    short_help="Run a command with its datasets staged to the node-local disk.",
)
@dataset_options
@run_options
@click.argument(
    "command", nargs=-1, type=click.UNPROCESSED, shell_complete=complete_path, metavar="-- COMMAND [ARGUMENT]..."
)
def run(command: tuple[str, ...], verbose: bool, quiet: bool, **given: Any) -> int:  # noqa: ANN401  click hands over what was typed
    """Run COMMAND, and copy its datasets to the node-local disk meanwhile, in the order in which COMMAND reads them.

    \b
    hpcstage run --data /lustre/imagenet/train -- python train.py --data /lustre/imagenet/train
    hpcstage run --data @list.txt --mode upfront -- python train.py
    hpcstage run --data /lustre/imagenet --out results/r7 -- python train.py --output-dir {out}
    hpcstage run --checkpoint ckpt/r7 -- python train.py --save-dir {checkpoint}

    With --join there is no COMMAND: it is that of the training.

    Exits with the command's exit code, or with 74 in place of 0 where files could not be copied to the directory of
    --out or --checkpoint. With HPCSTAGE_DISABLE=1 it only executes the command.
    """
    from hpcstage.errors import UsageError
    from hpcstage.wrapper.passthrough import directories_without_us, passes_through, replace_with

    if passes_through(os.environ):
        if not command:
            raise UsageError("there is no command, and hpcstage is switched off", "unset HPCSTAGE_DISABLE")
        return replace_with(command, directories_without_us(given, os.environ))
    if "HPCSTAGE_NODE_DIR" in os.environ:
        from hpcstage.wrapper import passthrough

        passthrough.forget(os.environ)
    from hpcstage import inherited
    from hpcstage.config import load
    from hpcstage.wrapper.run import run as launch

    config = load(given, os.environ, inherited.directory())
    if not command and config.join is None:
        raise UsageError("no command is given", "write it behind `--`: hpcstage run ... -- python train.py")
    if "--" in command and shutil.which(command[0]) is None:
        fix = "repeat --data for each path, or put quotes around a pattern: --data '*.tar'"
        raise UsageError(f"{command[0]!r} in front of `--` belongs to no option", fix)
    if command and config.join is not None:
        raise UsageError("--join starts the command of the training", "leave `-- COMMAND` out")
    return launch(command, config, verbose - quiet)
