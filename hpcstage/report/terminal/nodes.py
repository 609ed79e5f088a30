"""Prints the nodes of a job side by side, in a few lines however many there are. From record to lines.

Failed nodes come first, then slow ones, each with the reason; the others are in one line where they are many.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from statistics import median

from hpcstage.record.parts.roster import Presence
from hpcstage.record.schema import GroupSection, NodeRow, Record
from hpcstage.report.canvas import Canvas, grid
from hpcstage.report.figures import UNKNOWN, count, seconds, short_name, size, source_times

LINES = 11
LEAST = 4
FAILED = {Presence.MISSING: "never came up", Presence.DIED: "died", Presence.SILENT: "is silent"}
_MOVED = attrgetter("source_bytes"), attrgetter("peer_bytes"), attrgetter("local_bytes")
SINGLY = 2
"""Up to this many failed nodes get a line each."""


@dataclass(frozen=True)
class _Line:
    """A row of the table, and the lines below it."""

    cells: tuple[str, ...]
    below: tuple[str, ...] = ()


def nodes(record: Record, canvas: Canvas, lines: int = LINES) -> list[str]:
    """Returns the section; empty where the job has one node."""
    group = record.group
    if group is None:
        return []
    failed, slow, well = _sorted(record)
    said = tuple(_failed(failed, len(record.nodes)))
    shown = slow[: max(0, (lines - 4 - len(said)) // 2)]
    table = [_all(record, said), *(_Line(_cells(row), (f"    {'; '.join(row.slow)}",)) for row in shown)]
    left = lines - 2 - sum(1 + len(one.below) for one in table)
    table += [_Line(cells) for cells in _rest([*slow[len(shown) :], *well], left)]
    drawn = _drawn(canvas, ("Nodes", "waited", "source", "from peers", "local"), table)
    return [*drawn, *canvas.lines(f"  {_together(record, group, slow)}")]


def every(record: Record, canvas: Canvas) -> list[str]:
    """Returns a line for each node without a limit: failed ones first, then slow ones, both with the reason."""
    if record.group is None:
        return ["this job had one node: see `hpcstage report`"]
    failed, slow, well = _sorted(record)
    table = []
    for row in (*failed, *slow, *well):
        below = f"  !! {FAILED[row.state]}{_why(row)}" if row.state in FAILED else f"    {'; '.join(row.slow)}"
        table.append(_Line((*_cells(row), count(row.staged_files)), (below,) if below.strip() else ()))
    drawn = _drawn(canvas, ("Nodes", "waited", "source", "from peers", "local", "files"), table)
    return [*drawn, *canvas.lines(f"  {_together(record, record.group, slow)}")]


def _drawn(canvas: Canvas, heads: Sequence[str], table: Sequence[_Line]) -> list[str]:
    """Draws the table, and then puts the lines below its rows, which are wider than a column."""
    cells = (["-" if cell == UNKNOWN else cell for cell in row.cells] for row in table)
    found, *rows = canvas.lines(grid("w" + "r" * (len(heads) - 1), cells, heads))
    lines = [found]
    for drawn, row in zip(rows, table, strict=True):
        lines += [drawn, *canvas.lines(*row.below)]
    return lines


def _sorted(record: Record) -> tuple[list[NodeRow], list[NodeRow], list[NodeRow]]:
    """Returns the failed nodes, the slow ones by what they cost, and the others. Their names lack the domain where all
    have the same, such as `.cluster.example.org`."""
    domains = {row.host.partition(".")[2] for row in record.nodes}
    domain = f".{domains.pop()}" if len(domains) == 1 else ""
    rows = [replace(row, host=row.host.removesuffix(domain)) for row in record.nodes]
    alive = [row for row in rows if row.state not in FAILED]
    slow = sorted((row for row in alive if row.slow), key=lambda row: -(row.waited_s or 0.0))
    return [row for row in rows if row.state in FAILED], slow, [row for row in alive if not row.slow]


def _all(record: Record, below: tuple[str, ...]) -> _Line:
    """Returns the sums of bytes and the longest wait, as the job waits for its slowest node."""
    waits = [row.waited_s for row in record.nodes if row.waited_s is not None]
    longest = f"max {seconds(max(waits))}" if waits else UNKNOWN
    return _Line(("  all nodes", longest, *(size(moved(record.totals)) for moved in _MOVED)), below)


def _cells(row: NodeRow) -> tuple[str, ...]:
    return (f"  {short_name(row.host)}", seconds(row.waited_s), *(size(moved(row)) for moved in _MOVED))


def _failed(rows: Sequence[NodeRow], total: int) -> list[str]:
    if len(rows) <= SINGLY:
        return [f"  !! {short_name(row.host)} {FAILED[row.state]}{_why(row)}" for row in rows]
    lines = []
    for state, what in FAILED.items():
        if same := [row for row in rows if row.state is state]:
            names = ", ".join(short_name(row.host) for row in same[:3]) + (", ..." if len(same) > 3 else "")
            lines.append(f"  !! {len(same)} of {total} nodes {what} ({names}){_why(same[0])}")
    return lines


def _why(row: NodeRow) -> str:
    return f": {row.why}" if row.why else ""


def _rest(rows: Sequence[NodeRow], left: int) -> list[tuple[str, ...]]:
    """Returns the cells of each node where that fits into `left` lines, else one row for all."""
    if not rows or left < 1:
        return []
    if len(rows) <= left:
        return [_cells(row) for row in rows]
    waited, *moved = (_median(figure(row) for row in rows) for figure in (attrgetter("waited_s"), *_MOVED))
    return [(f"  {len(rows)} others each", seconds(waited), *map(size, moved))]


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None


def _together(record: Record, group: GroupSection, slow: Sequence[NodeRow]) -> str:
    """Says the placement and why, and how often the source was read."""
    is_direct = record.run.mode == "direct"
    why = f" ({group.placement_why})" if group.placement_why else ""
    alone = "each node reads the source" if record.names_dataset else "no dataset is named"
    said = [alone if is_direct else f"{group.placement or 'no placement'}{why}"]
    said += [f"{len(slow)} slow" if slow else "", source_times(record)]
    if group.generations > 1:
        said.append(f"group started {group.generations} times")
    return "; ".join(filter(None, said))
