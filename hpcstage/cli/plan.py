"""`hpcstage plan`: the options, then the plan of a run to come."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

import click

from hpcstage import inherited, stderr
from hpcstage.cli.command import Command
from hpcstage.cli.options import dataset_options, figure_options, figures
from hpcstage.errors import UsageError

if TYPE_CHECKING:
    from hpcstage.preview.plan import Plan


@click.command(
    "plan", cls=Command, short_help="Show what would be copied in which order, whether it fits and what it gains."
)
@dataset_options
@figure_options
@click.option("--limit", type=click.IntRange(min=0), help="Rows of the table (default 20; with --json: none).")
@click.option("--json", "as_json", is_flag=True, help="Print the plan as JSON; its files only with --limit.")
def plan(limit: int | None, as_json: bool, **given: Any) -> int:  # noqa: ANN401
    """Show what a run would copy, in which order, whether it fits, and what each mode would take.

    \b
    hpcstage plan --data /lustre/imagenet/train --epochs 90 --epoch-compute 20m --source-rate 2GB --local-rate 3GB
    hpcstage plan --data /lustre/imagenet/train --order trace        as the last run read
    hpcstage plan --data /lustre/imagenet/train --nodes 64 --placement partition

    With --nodes N (or in a job of several nodes) it also shows what each node fetches from the source, keeps and gets
    from others. In a job (in salloc's shell, too) the N nodes are like those of the job; without a scheduler they are
    virtual nodes, which divide this machine.

    For one node it forecasts what each mode would take. Figures that you do not tell come from the record of the last
    run on the same datasets; where one is missing there, too, it is named, and no forecast is made.
    """
    _print(_coming(given), limit, as_json=as_json)
    return 0


def _coming(given: dict[str, Any]) -> Plan:
    from hpcstage.config import load
    from hpcstage.preview.pipeline import PlanInputs, find
    from hpcstage.preview.plan import ForecastInputs, foresee
    from hpcstage.protocol.shim import WorkProgress
    from hpcstage.report.progress import ProgressLine

    config = load(given, os.environ, inherited.directory())
    for warning in config.warnings:
        stderr.say(f"warning: {warning}")
    several = ForecastInputs.of_config(config, os.environ, figures(given))
    inputs = PlanInputs.of_config(config, os.environ, inherited.directory(), several.disk.device)
    with ProgressLine(quiet=bool(given.get("quiet"))) as line:

        def on_found(files: int, size_bytes: int) -> None:
            line.show("scanning", WorkProgress(files, size_bytes))

        found = find(inputs, on_found)
    if not len(found.scan.manifest):
        if why := found.scan.unanswered:
            raise UsageError(f"the datasets could not be scanned: {why}", "look at the file system, and try again")
        raise UsageError("the datasets hold no file", "check --data")
    return foresee(inputs, several, found)


def _print(found: Plan, limit: int | None, *, as_json: bool) -> None:
    import json

    from hpcstage.report import planpage
    from hpcstage.report.canvas import terminal_width

    if as_json:
        page = json.dumps(planpage.to_json(found, limit), indent=1) + "\n"
    else:
        page = planpage.text(found, limit, terminal_width())
    # Help texts and paths may hold what the terminal's encoding has not.
    sys.stdout.buffer.write(page.encode(sys.stdout.encoding or "utf-8", "backslashreplace"))
    sys.stdout.flush()
