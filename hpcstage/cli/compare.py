"""`hpcstage compare`: the figures of several runs side by side. No logic."""

from __future__ import annotations

import json
import os
from pathlib import Path

import click

from hpcstage.cli.command import Command

COLUMNS, COLUMNS_EACH = 40, 22
"""The width of the table; narrower terminals break its lines."""


@click.command("compare", cls=Command, short_help="Show runs side by side.")
@click.argument("runs", nargs=-1, required=True, metavar="RUN RUN...", type=click.Path(path_type=Path))
@click.option("--html", metavar="FILE", type=click.Path(path_type=Path), help="Write a page to FILE.")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON object.")
def compare(runs: tuple[Path, ...], html: Path | None, as_json: bool) -> int:
    """Show the figures of runs side by side, with their ratios to the first.

    A RUN is a run directory, its run.json, a run's id or a job's.

    \b
    hpcstage compare 4711 4712
    hpcstage compare 4711 4712 4713 --html compared.html

    Lines that begin with ! say in what the runs are unlike: their commands, nodes, datasets, settings, ends. Exit code
    0: shown; 1: no such run; 2: bad usage.
    """
    from hpcstage import inherited
    from hpcstage.errors import UsageError
    from hpcstage.record import files
    from hpcstage.record.runs import named_run
    from hpcstage.report import comparison

    if len(runs) < 2:
        raise UsageError("one run is named", "name two or more: hpcstage compare RUN RUN (`hpcstage list` has them)")
    cwd = inherited.directory()
    found = comparison.compare([files.load_run(named_run(run, os.environ, cwd)) for run in runs])
    if html is not None:
        from hpcstage.report.html.page import render_comparison
        from hpcstage.writing import replace_text

        replace_text(html, render_comparison(found), 0o644)
    if as_json:
        click.echo(json.dumps(found.to_json(), indent=1))
    elif html is None:
        from hpcstage.report.canvas import Canvas

        click.echo(comparison.text(found, Canvas.of_stdout(least=COLUMNS + COLUMNS_EACH * len(runs))), color=True)
    return 0
