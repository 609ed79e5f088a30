"""Puts the figures of several runs side by side, and says in what the runs are unlike. From records to a comparison,
and from that to text.

It draws no conclusion: which run was faster is in the figures, and why is in each run's report.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from hpcstage.record.schema import Record
from hpcstage.report import figures
from hpcstage.report.canvas import Canvas, cleaned, grid
from hpcstage.units import format_number

Unit = Literal["s", "bytes", "bytes/s", "ms", "share", "count", "text"]
Value = float | str | None
ONE_EACH = "one run each: how busy the file system and the nodes were then is in these figures, too"
MOST_RATIO = 999
NO_SETTINGS = frozenset({"mode", "run_dir", "local_dir", "data"})
"""Settings that have rows or sentences of their own, or name places."""


@dataclass(frozen=True)
class Row:
    """One figure of all runs. None is not known."""

    name: str
    unit: Unit
    values: tuple[Value, ...]
    ratios: tuple[float | None, ...]
    """To the first run; None for that, and where one of the two is 0 or not known, or the unit has no ratio."""

    def text(self, at: int) -> str:
        """Returns the figure of one run in words."""
        value = self.values[at]
        if value is None or isinstance(value, str):
            return value or "-"
        return FORMS[self.unit](value)

    def ratio(self, at: int) -> str:
        """Returns the ratio of one run to the first in words; empty where there is none."""
        ratio = self.ratios[at]
        if ratio is None or ratio >= MOST_RATIO:
            return "" if ratio is None else f">{MOST_RATIO}x"
        return f"{ratio:.2f}x" if ratio < 9.995 else f"{ratio:.3g}x"


@dataclass(frozen=True)
class Compared:
    """One of the runs."""

    label: str
    id: str
    job_id: str | None
    mode: str
    nodes: int
    command: str
    started_unix_s: float


@dataclass(frozen=True)
class Comparison:
    """Runs side by side."""

    runs: tuple[Compared, ...]
    rows: tuple[Row, ...]
    unlike: tuple[str, ...]
    """In what the runs differ from the first, beside the mode, or are not whole."""
    remark: str = ONE_EACH

    def to_json(self) -> dict[str, Any]:
        """Returns plain data for json.dump."""
        return asdict(self)


def compare(records: Sequence[Record]) -> Comparison:
    """Compares runs with the first of them."""
    runs = tuple(_run(record, _label(at)) for at, record in enumerate(records))
    is_one_mode = len({figures.mode(record.run) for record in records}) == 1
    shown = [row for row in FIGURES if is_one_mode or row[1] != "ms"]
    rows = (_row(name, unit, [figure(record) for record in records]) for name, unit, figure in shown)
    unlike = [told for record, run in zip(records, runs, strict=True) for told in _unlike(record, run, records[0])]
    return Comparison(runs, tuple(row for row in rows if any(row.values)), (*unlike, *_settings(records)))


def _label(at: int) -> str:
    return chr(ord("A") + at) if at < 26 else str(at + 1)


def _run(record: Record, label: str) -> Compared:
    run = record.run
    command = " ".join(run.command)
    return Compared(label, run.id, run.job_id, figures.mode(run), record.node_count, command, run.started_unix_s)


# ---- figures ----

FORMS: dict[Unit, Callable[[float], str]] = {
    "s": figures.seconds,
    "bytes": figures.size,
    "bytes/s": figures.rate,
    "ms": lambda value: figures.seconds(value / 1000),
    "share": figures.percent,
    "count": figures.count,
}
RATED = frozenset({"s", "bytes", "bytes/s", "ms"})


def _output(record: Record, name: str) -> Value:
    """Returns a figure of the output files; None without --out."""
    return getattr(record.drains.get("out"), name, None)


FIGURES: tuple[tuple[str, Unit, Callable[[Record], Value]], ...] = (
    ("total", "s", lambda r: r.time_split.total_s),
    ("  before the command", "s", lambda r: r.time_split.before_s),
    ("  compute", "s", lambda r: r.time_split.compute_s),
    ("  waited for decoding", "s", lambda r: r.time_split.preprocess_s),
    ("  waited for the source", "s", lambda r: r.time_split.wait_source_s),
    ("  waited for local disk", "s", lambda r: r.time_split.wait_local_s),
    ("  start and end", "s", lambda r: r.time_split.other_s),
    (figures.HIDDEN, "s", lambda r: r.time_split.hidden_s),
    ("waited for data", "share", lambda r: figures.wait_share(r.time_split)),
    ("slowest node waited", "s", lambda r: r.slowest.waited_s if r.slowest else None),
    ("from the local copy", "share", lambda r: r.local_share),
    ("opens served from it", "share", lambda r: r.coverage.share),
    ("read from the source", "bytes", lambda r: r.totals.source_bytes),
    ("  by copiers", "bytes", lambda r: r.totals.copied_bytes),
    ("  by the program", "bytes", lambda r: r.totals.direct_bytes),
    ("copied between nodes", "bytes", lambda r: r.totals.peer_bytes),
    ("read from local disk", "bytes", lambda r: r.totals.local_bytes),
    ("best bandwidth", "bytes/s", lambda r: r.contention.best_bytes_per_s),
    ("typical bandwidth", "bytes/s", lambda r: r.contention.typical_bytes_per_s),
    ("contention", "s", lambda r: figures.contended_s(r.contention)),
    ("open at source, p50", "ms", lambda r: r.contention.latency_ms["open"].p50),
    ("open at source, p95", "ms", lambda r: r.contention.latency_ms["open"].p95),
    ("read at source, p50", "ms", lambda r: r.contention.latency_ms["read"].p50),
    ("read at source, p95", "ms", lambda r: r.contention.latency_ms["read"].p95),
    ("output files copied", "bytes", lambda r: _output(r, "size_bytes")),
    ("  done after the end", "s", lambda r: _output(r, "took_s")),
    ("  names not copied", "count", lambda r: _output(r, "undrained_count")),
    ("checkpoints saved", "count", lambda r: r.checkpoints.saved_count if r.checkpoints else None),
    ("  training stood still", "s", lambda r: getattr(r.checkpoints and r.checkpoints.standstill, "seconds", None)),
    ("end", "text", lambda r: figures.ending(r.run)),
)


def _row(name: str, unit: Unit, values: Sequence[Value]) -> Row:
    first = values[0]
    known = [value if isinstance(value, int | float) and unit in RATED else None for value in values]
    base = known[0] if isinstance(first, int | float) else None
    ratios = [value / base if value and base and at else None for at, value in enumerate(known)]
    return Row(name, unit, tuple(values), tuple(ratios))


# ---- what keeps runs from being compared ----


def _unlike(record: Record, run: Compared, first: Record) -> Iterator[str]:
    """Says in what a run is unlike the first, and what its figures lack."""
    if record is not first:
        yield from (f"{run.label}: {told}" for told in _differences(record, first))
    if record.run.state != "ended" or record.run.exit_code != 0:
        yield f"{run.label}: {figures.ending(record.run)}"
    if told := figures.reported(record):
        yield f"{run.label}: its sums are those {told}"
    elif record.lost_nodes and record.run.state == "ended":
        yield f"{run.label}: nodes were lost: its sums lack what these did last"


def _differences(record: Record, first: Record) -> Iterator[str]:
    if record.run == first.run:
        yield "the same run"
    if record.run.command != first.run.command:
        yield f"another command: {' '.join(record.run.command)}"
    if (here := record.node_count) != (there := first.node_count):
        yield f"on {here} {'node' if here == 1 else 'nodes'}, not on {there}"
    if _roots(record) != _roots(first):
        yield f"other datasets: {', '.join(_roots(record)) or 'none'}"
    elif any(size != _sizes(record).get(root, size) for root, size in _sizes(first).items()):
        yield "its datasets had other files"
    if record.generator != first.generator:
        yield f"of {record.generator}"


def _roots(record: Record) -> list[str]:
    return sorted(dataset.root for dataset in record.datasets)


def _sizes(record: Record) -> dict[str, tuple[int, int]]:
    """Returns files and bytes by dataset, as far as they were counted: mode direct counts none."""
    known = ((one.root, one.files, one.size_bytes) for one in record.datasets)
    return {root: (files, size) for root, files, size in known if files is not None and size is not None}


def _settings(records: Sequence[Record]) -> Iterator[str]:
    """Names the settings that are not the same in all runs."""
    for key in sorted({key for record in records for key in record.config} - NO_SETTINGS):
        values = [str(record.config.get(key)) for record in records]
        if len(set(values)) > 1:
            yield f"setting {key}: {', '.join(values)}"


# ---- for a terminal ----


def side_by_side(records: Sequence[Record], canvas: Canvas) -> str:
    """Returns a table with a row for each figure, and a column for each record, headed by its mode."""
    found = cleaned(compare(records), unicode=canvas.unicode)
    return "\n".join(_table(found, "mode", [run.mode for run in found.runs], canvas))


def text(found: Comparison, canvas: Canvas) -> str:
    """Returns what is compared, the table, and what keeps the runs from being compared."""
    found = cleaned(found, unicode=canvas.unicode)
    runs = canvas.lines(grid("lllll", (tuple(_head(run)) for run in found.runs)), found.runs[0].command)
    table = _table(found, "", [run.label for run in found.runs], canvas)
    unlike = [f"! {told}" for told in found.unlike]
    return "\n".join([*runs, "", *table, "", *unlike, found.remark])


def _head(run: Compared) -> Iterator[str]:
    yield run.label
    yield run.id
    yield f"{run.mode}, {format_number(run.nodes, 'node')}"
    yield f"job {run.job_id}" if run.job_id else ""
    yield f"started {time.strftime('%Y-%m-%d %H:%M', time.localtime(run.started_unix_s))}"


def _table(found: Comparison, name: str, heads: Sequence[str], canvas: Canvas) -> list[str]:
    """Draws the table: behind each figure but the first its ratio to the first."""
    rows = []
    for row in found.rows:
        cells = [row.text(0)]
        for at in range(1, len(heads)):
            cells += [row.text(at), row.ratio(at)]
        rows.append((row.name, *cells))
    above = [name, heads[0], *(head for run in heads[1:] for head in (run, ""))]
    return canvas.lines(grid("lr" + "rr" * (len(heads) - 1), rows, above))
