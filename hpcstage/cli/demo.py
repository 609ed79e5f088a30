"""`hpcstage demo`."""

from __future__ import annotations

import click

from hpcstage.cli.command import Command


@click.command("demo", cls=Command, short_help="Show what staging does, on this machine, in under two minutes.")
@click.option(
    "--files", type=click.IntRange(min=20), default=500, show_default=True, help="Files in the dataset, 100 kB each."
)
def demo(files: int) -> int:
    """Train a small network from emulated slow storage in the modes direct, upfront and runtime.

    Needs PyTorch; uses FUSE where it is there. Checks that the weights are identical and shows the three reports
    side by side.
    """
    from hpcstage.demo import demo as run_demo

    return run_demo(click.echo, files)
