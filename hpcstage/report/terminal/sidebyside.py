"""Prints runs side by side, one column each. From a comparison to text."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from hpcstage.record.schema import Record
from hpcstage.report.canvas import Canvas, cleaned, grid
from hpcstage.report.comparison import Compared, Comparison, compare
from hpcstage.units import format_number


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
