"""`hpcstage prune`: removes the directories of runs that ended long ago. No logic."""

from __future__ import annotations

import os

import click

from hpcstage.cli.command import Command


@click.command("prune", cls=Command, short_help="Remove the reports of old runs.")
@click.option("--older", metavar="AGE", required=True, help="Of runs last written to longer ago: 30d, 12h.")
@click.option("--dry-run", is_flag=True, help="Say what would be removed, remove nothing.")
def prune(older: str, dry_run: bool) -> int:
    """Remove the run directories and the lines in the index of runs that ended long ago.

    \b
    hpcstage prune --older 30d --dry-run
    hpcstage prune --older 30d

    Left are runs that may still run, directories of others, those that hold anything that hpcstage did not write, and
    runs of which files may be on their nodes yet. Datasets, outputs and checkpoints are never touched. It may be ended
    at any time and started again. Exit code 0: done; 2: bad usage.
    """
    from hpcstage import inherited
    from hpcstage.errors import UsageError
    from hpcstage.record.prune import prune as pruned
    from hpcstage.report.figures import clean
    from hpcstage.units import format_number, format_size, parse_duration

    try:
        older_s = parse_duration(older)
    except ValueError as error:
        raise UsageError(f"--older: {error}", "for example --older 30d") from None
    freed_bytes = count = 0
    for done in pruned(os.environ, inherited.directory(), older_s, removes=not dry_run):
        if done.left:
            click.echo(clean(f"left {done.run.line.run_dir}: {done.left}"))
            continue
        count, freed_bytes = count + 1, freed_bytes + done.freed_bytes
        if dry_run:
            click.echo(clean(f"would remove {done.run.line.run_dir} ({format_size(done.freed_bytes)})"))
    said = f"{format_number(count, 'run')}, {format_size(freed_bytes)}"
    click.echo(f"would remove {said}" if dry_run else f"removed {said}")
    return 0
