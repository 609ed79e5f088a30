"""Makes the text and the JSON that `hpcstage plan` prints.

This module owns the wording and layout. It computes nothing: all numbers are the plan's.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

from hpcstage.plan.budget import NO_LIMIT
from hpcstage.plan.dataset.roots import printable
from hpcstage.plan.types import Kept, Rates, Workload
from hpcstage.preview.planfile import Plan, path_json, summary
from hpcstage.preview.rows import Row, rows
from hpcstage.report.plan import nodes, readings
from hpcstage.units import format_duration, format_rate, format_size

DEFAULT_LIMIT = 20
DEFAULT_NODES = 8
_MODES = ("direct", "upfront", "runtime", "auto")
UNKNOWN = "?"


def text(plan: Plan, limit: int | None = None) -> str:
    """Returns the whole page, with at most `limit` rows of each table.

    None: a few rows, and a few epochs of a named sampler.
    """
    rows_shown = DEFAULT_LIMIT if limit is None else limit
    parts = [list(_head(plan)), list(_table(plan, rows_shown))]
    if plan.readings is not None:
        epochs = readings.DEFAULT_EPOCHS if limit is None else plan.readings.asked.epochs
        parts.extend(readings.text(plan, plan.readings, rows_shown, epochs))
    if plan.nodes is not None:
        parts.extend(nodes.text(plan.nodes, DEFAULT_NODES if limit is None else limit))
    parts += [list(_forecast(plan)), list(_tail(plan))]
    return "\n\n".join("\n".join(part) for part in parts if part) + "\n"


def to_json(plan: Plan, limit: int | None = None) -> dict[str, Any]:
    """Returns the plan without its arrays, and with the first `limit` files of the order if a limit is given."""
    data = summary(plan)
    if limit is not None:
        data["entries"] = [_row_json(plan, row) for row in islice(rows(plan), limit)]
    if plan.readings is not None:
        data["readings"] = readings.to_json(plan, plan.readings, limit)
    return data


def _row_json(plan: Plan, row: Row) -> dict[str, Any]:
    return {
        "position": row.position,
        **path_json(plan.manifest.source_path(row.file_id)),
        "size_bytes": row.size_bytes,
        "cumulative_bytes": row.cumulative_bytes,
        "expected_s": row.expected_s,
        "staged": row.staged,
    }


# ---- what is there


def _head(plan: Plan) -> Iterator[str]:
    for index, dataset in enumerate(plan.manifest.datasets):
        ids = plan.manifest.ids_of(index)
        size = sum(plan.manifest.sizes[ids.start : ids.stop])
        yield _line("dataset", f"{printable(dataset.root)}: {_files(len(ids))}, {format_size(size)}")
    if len(plan.manifest.datasets) > 1:
        yield _line("total", f"{_files(len(plan.manifest))}, {format_size(plan.manifest.total_bytes)}")
    if plan.scan is not None:
        listings = f"{plan.scan.listings:,} listing{'s' * (plan.scan.listings != 1)}"
        operations = f"{plan.scan.stats:,} stats, {listings}"
        yield _line("scan", f"{format_duration(plan.scan.seconds)} ({operations})")
        yield from _skipped(plan)
    yield _line("order", _order(plan))
    if plan.about and plan.order.provenance != "manifest":
        yield _line("", plan.about)
    if plan.kept is not None:
        yield _line("", _kept(plan.kept))
    if plan.local is not None:
        yield _line("local", plan.local)
    yield _line("budget", _budget(plan))


def _line(name: str, value: str) -> str:
    return f"{name:<9}{value}"


def _files(count: int) -> str:
    return f"{count:,} file" + ("" if count == 1 else "s")


def _skipped(plan: Plan) -> Iterator[str]:
    if plan.scan is None or not plan.scan.counts:
        return
    reasons = ", ".join(f"{count:,} {why}" for why, count in sorted(plan.scan.counts.items(), key=lambda i: -i[1]))
    example = f"; for example {printable(plan.scan.skipped[0][0])}" if plan.scan.skipped else ""
    yield _line("left out", reasons + example)


def _order(plan: Plan) -> str:
    found = plan.order.provenance
    if found == "manifest":
        why = plan.about or "no list was given"
        return f"by path ({why}); files that the program asks for earlier are fetched first"
    listed, missing = len(plan.order.ids), len(plan.manifest) - len(plan.order.ids)
    line = f"{found}, {_files(listed)}"
    if missing:
        line += f", then {missing:,} that it does not name"
    return line + (f"; {plan.unknown:,} of its paths are not in the datasets" if plan.unknown else "")


def _kept(kept: Kept) -> str:
    order = f"an announced order ({kept.provenance})" if kept.provenance else "an announced order"
    return f"{order} was kept by {kept.share:.0%} in the last run, {kept.run_id}"


def _budget(plan: Plan) -> str:
    if plan.budget is None or plan.fit is None:
        return "unknown"
    inodes = f", {plan.budget.inodes:,} inodes" if plan.budget.inodes < NO_LIMIT else ""
    limits = f"{format_size(plan.budget.size_bytes)}{inodes} ({plan.budget.why})"
    needed = f"{format_size(plan.fit.needed_bytes)} and {plan.fit.needed_inodes:,} inodes are needed"
    if plan.fit.fits:
        return f"{limits}; {needed}: all fits"
    fitting = f"the first {_files(plan.fit.files)} of the order fit ({plan.fit.share:.1%} of the bytes)"
    return f"{limits}; {needed}: {fitting}, the rest is read from the source"


# ---- the table


def _table(plan: Plan, limit: int) -> Iterator[str]:
    if limit <= 0:
        return
    yield f"{'position':>9} {'size':>9} {'cumulative':>11} {'expected':>9}  path"
    for row in islice(rows(plan), limit):
        yield _row(plan, row)
    rest = len(plan.manifest) - limit
    if rest > 0:
        yield f"{'':9} ... and {rest:,} more (--limit N shows more)"


def _row(plan: Plan, row: Row) -> str:
    when = UNKNOWN if row.expected_s is None else format_duration(row.expected_s)
    when = when if row.staged else "-"
    one = len(plan.manifest.datasets) == 1
    path = plan.manifest.path(row.file_id) if one else plan.manifest.source_path(row.file_id)
    sizes = f"{format_size(row.size_bytes):>9} {format_size(row.cumulative_bytes):>11}"
    return f"{row.position:>9,} {sizes} {when:>9}  {printable(path)}"


# ---- the forecast


def _forecast(plan: Plan) -> Iterator[str]:
    if plan.forecast is None:
        return
    yield f"forecast {'total':>9} {'1st batch':>9} {'1st epoch':>9} {'later':>9}  how"
    for name in _MODES:
        mode = plan.forecast.modes[name]
        times = (mode.total_s, mode.first_batch_s, mode.first_epoch_s, mode.later_epoch_s)
        yield f"{name:<8} " + " ".join(f"{format_duration(value):>9}" for value in times) + f"  {mode.formula}"
    yield _line("choice", f"{plan.forecast.choice}: {plan.forecast.why}")
    if plan.mode is not None and plan.mode != plan.forecast.choice:
        yield _line("mode", f"{plan.mode} is what the run did")


def _tail(plan: Plan) -> Iterator[str]:
    if plan.workload is not None:
        yield from _program(plan.workload)
    if plan.rates is not None:
        yield from _rates(plan.rates)
    if plan.forecast is not None:
        for item in plan.forecast.assumptions:
            yield _line("assumed", item)
    for note in plan.notes:
        yield _line("note", note)


def _program(workload: Workload) -> Iterator[str]:
    values = {
        "epochs": workload.epochs and (f"{workload.epochs:,} epochs" if workload.epochs > 1 else "1 epoch"),
        "epoch_compute_s": workload.epoch_compute_s is not None
        and f"compute {format_duration(workload.epoch_compute_s)} per epoch",
        "readers": workload.readers is not None and f"{workload.readers} readers ahead",
        "startup_s": workload.startup_s and f"startup {format_duration(workload.startup_s)}",
    }
    known = [f"{value} ({workload.sources.get(name, 'default')})" for name, value in values.items() if value]
    if known:
        yield _line("program", ", ".join(known))


def _rates(rates: Rates) -> Iterator[str]:
    yield from _rate("source", rates, "source_bytes_per_s", rates.source_bytes_per_s, per_s=rates.source_files_per_s)
    yield from _rate("reader", rates, "reader_bytes_per_s", rates.reader_bytes_per_s, file_s=rates.reader_file_s)
    yield from _rate("copying", rates, "copy_bytes_per_s", rates.copy_bytes_per_s, per_s=rates.copy_files_per_s)
    yield from _rate("disk", rates, "local_bytes_per_s", rates.local_bytes_per_s, file_s=rates.local_file_s)


def _rate(
    name: str, rates: Rates, key: str, bytes_per_s: float | None, *, per_s: float | None = None,
    file_s: float | None = None,
) -> Iterator[str]:  # fmt: skip
    found = [
        format_rate(bytes_per_s) if bytes_per_s is not None else "",
        f"{per_s:,.0f} files/s" if per_s is not None else "",
        f"{file_s * 1000:.3g} ms per file" if file_s is not None else "",
    ]
    known = ", ".join(item for item in found if item)
    if known:
        yield _line(name, f"{known} ({rates.sources.get(key, 'unknown')})")
