"""Makes the text and the JSON that `hpcstage plan` prints.

This module owns the wording and layout. It computes nothing: all numbers are the plan's.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

from rich.table import Table

from hpcstage.plan.budget import NO_LIMIT
from hpcstage.plan.dataset.roots import printable
from hpcstage.plan.placement.nodesplan import NodesPlan
from hpcstage.plan.types import Forecast, Rates, Workload
from hpcstage.preview.plan import Plan, path_json, rows, summary
from hpcstage.report.canvas import WIDE, Canvas, Fact, facts, grid
from hpcstage.units import format_duration, format_number, format_rate, format_size

DEFAULT_LIMIT = 20


def text(plan: Plan, limit: int | None = None, width: int = WIDE) -> str:
    """Returns the whole page, with at most `limit` rows of each table.

    None: a few rows. Sentences are wrapped at `width`; tables are not, as paths must stay whole.
    """
    rows_shown, canvas = DEFAULT_LIMIT if limit is None else limit, Canvas(width)
    parts = [canvas.lines(facts(_head(plan))), list(_table(plan, rows_shown))]
    if plan.nodes is not None:
        parts.append(canvas.lines(facts(_nodes(plan.nodes))))
    if plan.forecast is not None:
        parts.append(Canvas(WIDE).lines(_forecast(plan.forecast)))
    parts.append(canvas.lines(facts(_tail(plan))))
    return "\n\n".join("\n".join(part) for part in parts if part) + "\n"


def to_json(plan: Plan, limit: int | None = None) -> dict[str, Any]:
    """Returns the plan without its arrays, and with the first `limit` files of the order if a limit is given."""
    data = summary(plan)
    if limit is not None:
        data["entries"] = [
            {**row._asdict(), **path_json(plan.manifest.source_path(row.file_id))} for row in islice(rows(plan), limit)
        ]
    return data


# ---- what is there


def _head(plan: Plan) -> Iterator[Fact]:
    for index, dataset in enumerate(plan.manifest.datasets):
        ids = plan.manifest.ids_of(index)
        size = sum(plan.manifest.sizes[ids.start : ids.stop])
        yield "dataset", f"{printable(dataset.root)}: {format_number(len(ids), 'file')}, {format_size(size)}"
    if len(plan.manifest.datasets) > 1:
        yield "total", f"{format_number(len(plan.manifest), 'file')}, {format_size(plan.manifest.total_bytes)}"
    operations = f"{plan.scan.stats:,} stats, {format_number(plan.scan.listings, 'listing')}"
    yield "scan", f"{format_duration(plan.scan.seconds)} ({operations})"
    yield from _skipped(plan)
    yield "order", _order(plan)
    if plan.found.about and plan.order.provenance != "manifest":
        yield "", plan.found.about
    yield "local", plan.local
    yield "budget", _budget(plan)


def _skipped(plan: Plan) -> Iterator[Fact]:
    if left_out := plan.scan.skipped_counts:
        reasons = ", ".join(f"{count:,} {why}" for why, count in sorted(left_out.items(), key=lambda i: -i[1]))
        yield "left out", f"{reasons}; for example {printable(plan.scan.skipped[0][0])}"


def _order(plan: Plan) -> str:
    found = plan.order.provenance
    if found == "manifest":
        why = plan.found.about or "no list was given"
        return f"by path ({why}); files that the program asks for earlier are fetched first"
    listed, missing = len(plan.order.ids), len(plan.manifest) - len(plan.order.ids)
    line = f"{found}, {format_number(listed, 'file')}"
    if missing:
        line += f", then {missing:,} that it does not name"
    return line + (f"; {plan.found.unknown:,} of its paths are not in the datasets" if plan.found.unknown else "")


def _budget(plan: Plan) -> str:
    if plan.budget is None or plan.fit is None:
        return "unknown"
    inodes = f", {plan.budget.inodes:,} inodes" if plan.budget.inodes < NO_LIMIT else ""
    limits = f"{format_size(plan.budget.size_bytes)}{inodes} ({plan.budget.why})"
    needed = f"{format_size(plan.fit.needed_bytes)} and {plan.fit.needed_inodes:,} inodes are needed"
    if plan.fit.fits:
        return f"{limits}; {needed}: all fits"
    fitting = f"the first {format_number(plan.fit.files, 'file')} of the order fit ({plan.fit.share:.1%} of the bytes)"
    return f"{limits}; {needed}: {fitting}, the rest is read from the source"


# ---- the listings: lines and not a drawn table, as they may have millions of rows


def _table(plan: Plan, limit: int) -> Iterator[str]:
    if limit > 0:
        yield f"{'position':>9} {'size':>9} {'cumulative':>11}  path"
        for row in islice(rows(plan), limit):
            sizes = f"{format_size(row.size_bytes):>9} {format_size(row.cumulative_bytes):>11}"
            left = "" if row.staged else "  (does not fit)"
            yield f"{row.position:>9,} {sizes}  {_path(plan, row.file_id)}{left}"
        if (rest := len(plan.manifest) - limit) > 0:
            yield f"{'':9} ... and {rest:,} more (--limit N shows more)"


def _path(plan: Plan, file_id: int) -> str:
    one = len(plan.manifest.datasets) == 1
    return printable(plan.manifest.path(file_id) if one else plan.manifest.source_path(file_id))


# ---- the nodes, and the forecast


def _nodes(plan: NodesPlan) -> Iterator[Fact]:
    yield "nodes", f"{plan.nodes:,}; placement {plan.kind}: {plan.why}"
    if plan.room_bytes is None or plan.room_inodes is None:
        yield "", "what a node has room for is unknown here: taken as enough"
    else:
        inodes = f" and {plan.room_inodes:,} files" if plan.room_inodes < NO_LIMIT // 2 else ""
        yield "", f"assuming that every node has the room that was found here: {format_size(plan.room_bytes)}{inodes}"
    fetched, kept = f"about {format_size(plan.fetched_bytes)}", format_size(plan.kept_bytes)
    if plan.kind == "private":
        yield "", f"each node fetches what its own processes read, and then the rest: up to {kept}"
    else:
        often = "per epoch" if plan.kind == "partition" else "once"
        others = f"gets {format_size(plan.peers_bytes)} from others, {often}"
        yield "", f"each node fetches {fetched} from the source, keeps {kept} and {others}"
    if plan.unplaced_bytes:
        left = format_size(plan.unplaced_bytes)
        yield "", f"without room on any node: about {left}, read from the source every time"


def _forecast(forecast: Forecast) -> Table:
    cells = []
    for name, mode in forecast.modes.items():
        times = (mode.total_s, mode.first_epoch_s, mode.later_epoch_s)
        cells.append((name, *map(format_duration, times), mode.formula))
    return grid("lrrrl", cells, ("forecast", "total", "1st epoch", "later", "how"))


def _tail(plan: Plan) -> Iterator[Fact]:
    if plan.workload is not None:
        yield from _program(plan.workload)
    yield from _rates(plan.rates)
    if plan.forecast is not None:
        for item in plan.forecast.assumptions:
            yield "assumed", item
    if plan.nodes is not None:
        yield "forecast", "none: it is made for one node"
    if plan.missing:
        yield "missing", f"{', '.join(plan.missing)}: no earlier run's record tells them, so there is no forecast"
    for note in plan.notes:
        yield "note", note


def _program(workload: Workload) -> Iterator[Fact]:
    values = {
        "epochs": workload.epochs and (f"{workload.epochs:,} epochs" if workload.epochs > 1 else "1 epoch"),
        "epoch_compute_s": workload.epoch_compute_s is not None
        and f"compute {format_duration(workload.epoch_compute_s)} per epoch",
        "readers": workload.readers is not None and f"{workload.readers} readers ahead",
        "startup_s": workload.startup_s is not None and f"startup {format_duration(workload.startup_s)}",
    }
    known = [f"{value} ({workload.sources[name]})" for name, value in values.items() if value]
    if known:
        yield "program", ", ".join(known)


def _rates(rates: Rates) -> Iterator[Fact]:
    names = ("source", "source_bytes_per_s"), ("reader", "reader_bytes_per_s"), ("disk", "local_bytes_per_s")
    for name, key in names:
        if (bytes_per_s := getattr(rates, key)) is not None:
            yield name, f"{format_rate(bytes_per_s)} ({rates.sources[key]})"
