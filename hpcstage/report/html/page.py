"""Lays out the report of a run, or of several side by side, as one web page, which loads nothing. From record to text.

Its figures and words are those of the terminal's report (`report.figures`), and its text is escaped by Jinja2.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template
from markupsafe import Markup

from hpcstage.errors import NoResult
from hpcstage.record.schema import Contention, NodeRow, Percentiles, Record
from hpcstage.record.verdict import untold
from hpcstage.report import figures
from hpcstage.report.canvas import cleaned
from hpcstage.report.comparison import Comparison
from hpcstage.report.figures import count, percent, rate, seconds, size
from hpcstage.report.html import charts
from hpcstage.report.html.charts import Band
from hpcstage.report.terminal.nodes import FAILED
from hpcstage.report.terminal.page import clock
from hpcstage.units import format_number
from hpcstage.writing import replace_text

STYLES = {
    "compute": "compute",
    "waited for the source": "source",
    "waited for local disk": "local",
    "waited for decoding": "decoding",
    "start and end (imports)": "other",
    "not divided": "other",
}
ORIGIN_STYLES = ("local", "source", "source", "peer")
FIRST_NODES = 16
"""The nodes that are shown at once; the others are behind a line that opens."""
FIRST_EPOCHS = 16
MOST_BANDS = 64
LEAST_ROW_PX, MOST_ROW_PX, MOST_MAP_PX = 2, 18, 480


@dataclass(frozen=True)
class Chart:
    """A chart with the words beside it."""

    name: str
    top: str
    """The largest value."""
    drawn: Markup
    px: int = 64


@dataclass(frozen=True)
class Bar:
    """A value with a name, and its share of the largest."""

    name: str
    value: str
    share: float
    style: str
    after: str = ""


def write_page(record: Record, path: Path) -> None:
    """Writes the page. Raises NoResult if that is impossible."""
    try:
        replace_text(path, render(record), 0o644)
    except OSError as error:
        raise NoResult(f"cannot write {path}: {error.strerror}", "name another file with --html") from None


def _template(name: str) -> Template:
    """Returns the template of a page. Names and commands may hold anything: they are escaped."""
    env = Environment(
        autoescape=True,
        loader=FileSystemLoader(Path(__file__).parent),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    env.filters |= {"seconds": seconds, "size": size, "count": count, "percent": percent, "rate": rate, "clock": clock}
    return env.get_template(name)


def render(record: Record) -> str:
    """Returns the page."""
    record = cleaned(record, unicode=True)
    return _template("page.html.j2").render(
        record=record,
        title=f"hpcstage: {record.run.id}",
        command=shlex.join(record.run.command),
        mode=figures.mode(record.run),
        ending=figures.ending(record.run),
        started=f"{datetime.fromtimestamp(record.run.started_unix_s, timezone.utc):%Y-%m-%d %H:%M:%S} UTC",
        verdict=figures.verdict(record),
        notes=untold(record),
        is_judged=record.names_dataset and record.run.was_watched,
        times=_times(record),
        hidden=(figures.HIDDEN, record.time_split.hidden_s),
        timeline=_timeline(record),
        end_s=_end_s(record),
        periods=_periods(record.contention),
        per_node=_per_node(record),
        latency=_latency(record),
        origins=_origins(record),
        nodes=_nodes(record),
        first_nodes=FIRST_NODES,
        first_epochs=FIRST_EPOCHS,
        settings=_settings(record),
        number=format_number,
    )


def _times(record: Record) -> tuple[Markup, list[Bar]]:
    split = record.time_split
    rows, wall_s = figures.times(split), split.wall_s or 0.0
    drawn = charts.stacked(
        [(STYLES[name], value, f"{name}: {seconds(value)}") for name, value in rows], wall_s, "where the time went"
    )
    bars = [
        Bar(name, seconds(value), value / wall_s, STYLES[name], percent(value / wall_s))
        for name, value in rows
        if wall_s
    ]
    return drawn, bars


# ---- over time


def _end_s(record: Record) -> float:
    series = record.series
    return series.start_s[-1] + (series.interval_s or 0.0) if series.start_s else 0.0


def _timeline(record: Record) -> list[Chart]:
    """Returns a chart each for what came from the source, from other nodes, and from copies; without those of which
    nothing came."""
    series, first_s, end_s = record.series, record.series.start_s[:1], _end_s(record)
    if not first_s or not series.interval_s:
        return []
    before = [0.0] * round(max(0.0, first_s[0]) / series.interval_s)  # the axis begins with the run
    bands = [
        Band(one.start_s, one.end_s, f"contention: {percent(one.loss)} below its best")
        for one in record.contention.shared[:MOST_BANDS]
    ]
    found = []
    for name, values, style in (
        ("from the source", series.source_bytes_per_s, "source"),
        ("from other nodes", series.peer_bytes_per_s, "peer"),
        ("from the local copy", series.local_bytes_per_s, "local"),
    ):
        if any(values):
            marked = bands if style == "source" else ()
            drawn = charts.area([*before, *values], style, f"bytes {name} over time", end_s, marked)
            found.append(Chart(name, rate(max(values)), drawn))
    return found


def _periods(part: Contention) -> list[str]:
    told = [
        f"{clock(one.start_s)} to {clock(one.end_s)}: the source was {percent(one.loss)} below its own best"
        for one in part.shared[:MOST_BANDS]
    ]
    return told + [
        f"{clock(one.start_s)} to {clock(one.end_s)}: {one.host} alone was {percent(one.loss)} behind the others"
        for one in part.periods
        if one.host is not None
    ]


def _per_node(record: Record) -> Chart | None:
    """Returns a map of what the source gave to each node over time, slowest nodes first."""
    rows = [row.over_time for row in _sorted(record) if row.over_time is not None]
    drawn = charts.heat(rows, "bytes from the source to each node over time") if len(rows) > 1 else Markup("")
    if not drawn:
        return None
    row_px = max(LEAST_ROW_PX, min(MOST_ROW_PX, MOST_MAP_PX // len(rows)))
    return Chart(format_number(len(rows), "node"), rate(max(map(max, rows))), drawn, row_px * len(rows))


# ---- the source, the origin of bytes, the nodes, the settings


def _latency(record: Record) -> list[Chart]:
    found = []
    for name, values in record.contention.latency_ms.items():
        known = [(f"{label} {seconds(value / 1000)}", value) for label, value in _labelled(values) if value is not None]
        if known:
            drawn = charts.dots(known, 0.0, max(value for _, value in known), f"latency of {name}")
            found.append(Chart(name, ", ".join(text for text, _ in known), drawn, 20))
    return found


def _labelled(values: Percentiles) -> Sequence[tuple[str, float | None]]:
    return (("best", values.p05), ("median", values.p50), ("95 %", values.p95), ("99 %", values.p99))


def _origins(record: Record) -> list[Bar]:
    rows = figures.origins(record)
    largest = max((amount or 0 for _, _, amount in rows), default=0)
    style = dict(zip(figures.ORIGINS, ORIGIN_STYLES, strict=True))
    return [
        Bar(
            name,
            "" if amount is None else size(amount),
            (amount or 0) / largest if largest else 0.0,
            style[name],
            "" if opens is None else format_number(opens, "open"),
        )
        for name, opens, amount in rows
    ]


def _sorted(record: Record) -> list[NodeRow]:
    """Returns the nodes: failed ones first, then those that waited longest."""
    return sorted(record.nodes, key=lambda row: (row.state not in FAILED, -(row.waited_s or 0.0)))


def _nodes(record: Record) -> list[tuple[NodeRow, str]]:
    """Returns the rows of a job of several nodes, each with what is wrong with it."""
    if record.group is None:
        return []
    words = {row.host: (FAILED.get(row.state), row.why, *row.slow) for row in record.nodes}
    return [(row, "; ".join(filter(None, words[row.host]))) for row in _sorted(record)]


def _value(value: Any) -> str:  # noqa: ANN401  a setting of any type
    if isinstance(value, (list, tuple)):
        return ", ".join(map(str, value))
    return "" if value is None else str(value)


def _settings(record: Record) -> list[tuple[str, str, str]]:
    """Returns name, value and origin, first what somebody set."""
    origin = record.config_origin
    rows = [(key, _value(value), origin.get(key, "")) for key, value in record.config.items()]
    return sorted(rows, key=lambda row: row[2] == "default")


# ---- runs side by side

PARTS = (
    "before the command",
    "compute",
    "waited for decoding",
    "waited for the source",
    "waited for local disk",
    "start and end",
)


def render_comparison(found: Comparison) -> str:
    """Returns the page."""
    found = cleaned(found, unicode=True)
    return _template("comparison.html.j2").render(
        runs=found.runs,
        rows=found.rows,
        unlike=found.unlike,
        remark=found.remark,
        parts=PARTS,
        bars=_bars(found),
        started=lambda run: time.strftime("%Y-%m-%d %H:%M", time.localtime(run.started_unix_s)),
    )


def _bars(found: Comparison) -> list[dict[str, object]]:
    """Returns the parts of the time of each run in percent of the longest; empty where no run has a time."""
    rows = {row.name.strip(): row for row in found.rows}
    totals = [float(value or 0) for value in rows["total"].values] if "total" in rows else []
    longest_s = max(totals, default=0.0)
    if not longest_s:
        return []
    bars: list[dict[str, object]] = []
    for at, run in enumerate(found.runs):
        parts = []
        for name in PARTS:
            value = rows[name].values[at] if name in rows else None
            width = 100 * float(value or 0) / longest_s
            told = f"{name}: {rows[name].text(at)}" if name in rows else ""
            parts.append({"percent": f"{width:.2f}", "told": told})
        bars.append({"label": run.label, "total": rows["total"].text(at), "parts": parts})
    return bars
