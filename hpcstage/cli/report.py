"""`hpcstage report`: finds the record, prints it. No logic."""

from __future__ import annotations

import json
import os
from pathlib import Path

import click

from hpcstage.cli.command import Command


@click.command("report", cls=Command, short_help="Show what a run did.")
@click.argument("run", required=False, type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print the record as JSON.")
@click.option("--nodes", is_flag=True, help="Print one line for each node of the job, failed and slow ones first.")
@click.option("--follow", is_flag=True, help="Show how a run goes until it ends, then its report.")
@click.option("--html", type=click.Path(path_type=Path), metavar="FILE", help="Write the report as a web page.")
@click.option(
    "--prom",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="Write the figures for the textfile collector of Prometheus's node exporter.",
)
@click.option("--no-color", is_flag=True, help="No colour, not even on a terminal.")
def report(
    run: Path | None,
    as_json: bool,
    nodes: bool,
    follow: bool,
    html: Path | None,
    prom: Path | None,
    no_color: bool,
) -> int:
    """Show the report of RUN: a run directory, its run.json, a run's id or a job's; without it that of the last run.

    \b
    hpcstage report
    hpcstage report 4711                                             the last run of job 4711
    hpcstage report hpcstage-runs/20261121-031422-1f3a5b7c --json
    hpcstage report --nodes
    hpcstage report 4711 --follow                                    from the login node, too; Ctrl-C ends only this
    hpcstage report --prom /var/lib/node_exporter/hpcstage.prom
    hpcstage report 4711 --html report.html                          one file, which needs no network

    `hpcstage explain` explains every word and figure. Exit code 0: shown; 1: no such run; 2: bad usage.
    """
    from hpcstage import inherited
    from hpcstage.record import files, runs
    from hpcstage.report.canvas import Canvas
    from hpcstage.report.terminal.page import render

    cwd = inherited.directory()
    path = runs.named_run(run, os.environ, cwd) if run else runs.last_run(os.environ, cwd)
    if follow:
        from hpcstage.report import follow as following

        following.follow(path, following.Screen())
    if prom is not None:
        from hpcstage.report.prom import text
        from hpcstage.writing import replace_text

        replace_text(prom, text(files.load_run(path)), 0o644)
        return 0
    if as_json:
        click.echo(json.dumps(files.load_run(path).to_json(), indent=1))
        return 0
    if html is not None:
        from hpcstage.report.html.page import write_page

        write_page(files.load_run(path), cwd / html)
        click.echo(f"written: {html}")
        return 0
    record, canvas = files.load_run(path), Canvas.of_stdout(no_color=no_color)
    click.echo(render(record, canvas, every_node=nodes), color=True)
    return 0
