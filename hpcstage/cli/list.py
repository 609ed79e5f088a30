"""`hpcstage list`: the runs that are known, newest first. No logic."""

from __future__ import annotations

import json
import os
from itertools import islice

import click

from hpcstage.cli.command import Command

SHOWN = 20


@click.command("list", cls=Command, short_help="List your runs, newest first.")
@click.option("-n", "number", metavar="N", type=click.IntRange(min=1), default=SHOWN, show_default=True, help="Show N.")
@click.option("--all", "every", is_flag=True, help="Show all that are known.")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON array.")
def list_runs(number: int, every: bool, as_json: bool) -> int:
    """List your runs, newest first: id, job, command, mode, nodes, total time (of the command, and of the
    staging before it), the time that the program waited for data, exit code, state, start.

    \b
    hpcstage list
    hpcstage list --all --json

    They are those that the index in your home knows (the last 1,000), and those that lie in ./hpcstage-runs. `running?`
    means that a run goes on on another host, or was killed a moment ago. Exit code 0.
    """
    from hpcstage import inherited
    from hpcstage.record import runs
    from hpcstage.report.terminal.runs import listed

    lines = runs.known(os.environ, inherited.directory())
    shown = [runs.now(line) for line in islice(lines, None if every else number)]
    if as_json:
        click.echo(json.dumps([run.to_json() for run in shown], indent=1))
    elif shown:
        click.echo(listed(shown))
        if len(shown) < len(lines):
            click.echo(f"{len(lines) - len(shown)} more: hpcstage list --all")
    else:
        click.echo("no runs yet: neither the index nor ./hpcstage-runs has any")
    return 0
