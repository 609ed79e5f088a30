"""Prints several records side by side, one column each, to compare modes on the same command. From records to text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from hpcstage.report.terminal import text
from hpcstage.report.terminal.sections import ending, local_share, wait_share

LABEL = 24
Cell = Callable[[dict[str, Any]], str]


def side_by_side(records: Sequence[dict[str, Any]], *, width: int = 80) -> str:
    """Returns a table with a row for each figure, and a column for each record, headed by its mode."""
    column = max(12, (width - LABEL) // max(1, len(records)))
    rows: list[tuple[str, Cell]] = [("mode", lambda r: r["run"]["mode"] or r["run"]["mode_asked"]), *ROWS]
    if any(record["totals"]["peer_bytes"] is not None for record in records):
        rows.insert([name for name, _ in rows].index("read from local disk"), ("copied between nodes", PEERS))
    lines = [_line(name, [cell(record) for record in records], column) for name, cell in rows]
    return "\n".join([lines[0], "-" * (LABEL + column * len(records)), *lines[1:]])


def _line(name: str, cells: Sequence[str], column: int) -> str:
    return f"{name:<{LABEL}}" + "".join(text.pad(text.clip(c, column - 1), column, right=True) for c in cells)


def total_s(record: dict[str, Any]) -> float | None:
    """Returns the seconds of the command and of staging before it."""
    split = record["time_split"]
    if split["wall_s"] is None:
        return None
    return float(split["wall_s"] + (split["before_s"] or 0.0))


def _split(key: str) -> Cell:
    return lambda record: text.seconds(record["time_split"][key])


def _total(key: str, form: Callable[[float | None], str]) -> Cell:
    return lambda record: form(record["totals"][key])


def _contention(record: dict[str, Any]) -> str:
    periods = record["contention"]["periods"]
    if record["contention"]["best_bytes_per_s"] is None:
        return text.UNKNOWN
    return text.seconds(sum(p["end_s"] - p["start_s"] for p in periods)) if periods else "none"


def _latency(record: dict[str, Any]) -> str:
    return text.milliseconds(record["contention"]["latency_ms"]["open"]["p50"])


PEERS = _total("peer_bytes", text.size)
ROWS: list[tuple[str, Cell]] = [
    ("total", lambda r: text.seconds(total_s(r))),
    ("  before the command", _split("before_s")),
    ("  compute", _split("compute_s")),
    ("  preprocessing", _split("preprocess_s")),
    ("  waiting for source", _split("wait_source_s")),
    ("  waiting for local", _split("wait_local_s")),
    ("  other", _split("other_s")),
    ("staging hidden", _split("hidden_s")),
    ("waiting for data", lambda r: text.percent(wait_share(r["time_split"]))),
    ("served locally", lambda r: text.percent(local_share(r))),
    ("opens swapped", lambda r: text.percent(r["coverage"]["share"])),
    ("read from the source", _total("source_bytes", text.size)),
    ("read from local disk", _total("local_bytes", text.size)),
    ("operations at source", _total("source_ops", text.count)),
    ("best bandwidth", lambda r: text.rate(r["contention"]["best_bytes_per_s"])),
    ("open latency (p50)", _latency),
    ("contention", _contention),
    ("end", lambda r: ending(r["run"])),
]
