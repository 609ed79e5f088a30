"""Prints several records side by side, one column each, to compare modes on the same command. From records to text."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich import box
from rich.table import Table

from hpcstage.record.schema import Record
from hpcstage.report import figures
from hpcstage.report.canvas import Canvas, cleaned, line
from hpcstage.report.figures import percent, rate, seconds, size


def side_by_side(records: Sequence[Record], canvas: Canvas) -> str:
    """Returns a table with a row for each figure, and a column for each record, headed by its mode."""
    shown = [cleaned(record, unicode=canvas.unicode) for record in records]
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    table.add_column("mode", no_wrap=True)
    for record in shown:
        table.add_column(figures.mode(record.run), justify="right")
    some_copied = any(record.totals.peer_bytes is not None for record in shown)
    for name, cell in ROWS:
        if some_copied or name != PEERS:
            table.add_row(name, *(line(cell(record)) for record in shown))
    return "\n".join(canvas.lines(table))


PEERS = "copied between nodes"
ROWS: list[tuple[str, Callable[[Record], str]]] = [
    ("total", lambda r: seconds(r.time_split.total_s)),
    ("  before the command", lambda r: seconds(r.time_split.before_s)),
    ("  compute", lambda r: seconds(r.time_split.compute_s)),
    ("  waited for decoding", lambda r: seconds(r.time_split.preprocess_s)),
    ("  waited for the source", lambda r: seconds(r.time_split.wait_source_s)),
    ("  waited for local disk", lambda r: seconds(r.time_split.wait_local_s)),
    ("  start and end", lambda r: seconds(r.time_split.other_s)),
    (figures.HIDDEN, lambda r: seconds(r.time_split.hidden_s)),
    ("waited for data", lambda r: percent(figures.wait_share(r.time_split))),
    ("from the local copy", lambda r: percent(r.local_share)),
    ("opens served from it", lambda r: percent(r.coverage.share)),
    ("read from the source", lambda r: size(r.totals.source_bytes)),
    (PEERS, lambda r: size(r.totals.peer_bytes)),
    ("read from local disk", lambda r: size(r.totals.local_bytes)),
    ("best bandwidth", lambda r: rate(r.contention.best_bytes_per_s)),
    ("end", lambda r: figures.ending(r.run)),
]
