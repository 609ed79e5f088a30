"""Composes the section `series`: the run over time in at most 240 points, as columns of equal length. Pure.

Times are on the run's axis.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from operator import add, attrgetter, itemgetter, mul

from hpcstage.record.figures.arrivals import arrived
from hpcstage.record.figures.cells import Cells
from hpcstage.record.parts.part import NodePart
from hpcstage.record.parts.rows import Sample
from hpcstage.record.schema import LatencySeries, Series

MOST_POINTS = 240
MOST_LATENCY_POINTS = 20
FINE_SHARE = 0.25
"""Samples longer than this share of a cell are divided at its borders."""
NS_PER_MS = 1e6

Placed = tuple[float, Sample]
"""A sample, and its start on the run's axis."""
Group = list[Placed]
Columns = Mapping[str, Sequence[float]]


def series_of(node: NodePart | None, shift_s: float) -> Series:
    """Returns the section of one node, or an empty one."""
    samples = arrived(node.samples) if node else []
    placed = sorted(((shift_s + sample.start_s, sample) for sample in samples), key=itemgetter(0))
    groups = _grouped(placed, MOST_POINTS)
    last = [group[-1][1] for group in groups]
    columns: Columns = {
        **{name: [_sum(group, name) / _span_s(group) for group in groups] for name in ADDED},
        "queued_files": [sample.queued_files for sample in last],
        "store_bytes": [sample.store_bytes for sample in last],
        "busy": [sum(sample.busy * sample.length_s for _, sample in group) / _span_s(group) for group in groups],
    }
    few = _grouped(placed, MOST_LATENCY_POINTS)
    latency = _latencies(_starts(few), [{name: _sum(group, name) for name in TIMES} for group in few])
    return _section(_width(placed, MOST_POINTS), _starts(groups), columns, latency)


def _section(interval_s: float | None, starts_s: Sequence[float], columns: Columns, latency: LatencySeries) -> Series:
    copied, direct = columns["copied_bytes"], columns["shim_bytes"]
    return Series(
        interval_s=interval_s,
        start_s=tuple(starts_s),
        source_bytes_per_s=tuple(map(add, copied, direct)),
        copied_bytes_per_s=tuple(copied),
        direct_bytes_per_s=tuple(direct),
        peer_bytes_per_s=tuple(columns["peer_bytes"]),
        hit_opens_per_s=tuple(columns["hit_opens"]),
        wants_per_s=tuple(columns["wants"]),
        queued_files=tuple(map(int, columns["queued_files"])),
        store_bytes=tuple(map(int, columns["store_bytes"])),
        busy=tuple(columns["busy"]),
        latency=latency,
    )


def _width(placed: Sequence[Placed], points: int) -> float | None:
    if not placed:
        return None
    longest_s = max(sample.length_s for _, sample in placed)
    return max((placed[-1][0] + placed[-1][1].length_s - placed[0][0]) / points, longest_s)


def _grouped(placed: Sequence[Placed], points: int) -> list[Group]:
    """Groups samples by intervals of equal width; empty intervals are left out."""
    width_s = _width(placed, points)
    if not width_s:
        return []
    groups: dict[int, Group] = {}
    for start_s, sample in placed:
        middle_s = start_s + sample.length_s / 2 - placed[0][0]
        groups.setdefault(min(int(middle_s / width_s), points - 1), []).append((start_s, sample))
    return [groups[index] for index in sorted(groups)]


def _starts(groups: Sequence[Group]) -> list[float]:
    return [group[0][0] for group in groups]


def _span_s(group: Group) -> float:
    """Returns the seconds that the group's samples cover."""
    end_s = max(start_s + sample.length_s for start_s, sample in group)
    return max(end_s - min(start_s for start_s, _ in group), 1e-9)


def _sum(group: Group, name: str) -> float:
    return float(sum(getattr(sample, name) for _, sample in group))


def _latencies(starts_s: Sequence[float], sums: Sequence[Mapping[str, float]]) -> LatencySeries:
    """Returns means in milliseconds: per open at the source, of reading per copied file, and per read of the program at
    the source."""
    return LatencySeries(
        start_s=tuple(starts_s),
        open_ms=tuple(_ms(s, ("copy_open_ns", "shim_open_ns"), ("copied_files", "shim_opens")) for s in sums),
        copy_read_ms=tuple(_ms(s, ("copy_read_ns",), ("copied_files",)) for s in sums),
        direct_read_ms=tuple(_ms(s, ("shim_read_ns",), ("shim_reads",)) for s in sums),
    )


def _ms(sums: Mapping[str, float], times: Sequence[str], counts: Sequence[str]) -> float | None:
    number = sum(sums[name] for name in counts)
    return sum(sums[name] for name in times) / number / NS_PER_MS if number > 0 else None


# ---- several nodes ----

ADDED = ("copied_bytes", "shim_bytes", "peer_bytes", "hit_opens", "wants")
HELD = ("queued_files", "store_bytes", "busy")
"""These fields are levels, not flows: their means over time are added over the nodes."""
TIMES = ("copy_open_ns", "shim_open_ns", "copied_files", "shim_opens", "copy_read_ns", "shim_read_ns", "shim_reads")
NAMES = (*ADDED, *HELD, *TIMES)


class Together:
    """Sums the samples of all nodes on one axis; each node is added once."""

    def __init__(self) -> None:
        self._cells = Cells(MOST_POINTS)

    def add(self, node: NodePart, shift_s: float) -> None:
        """Adds a node's samples."""
        if not node.samples:
            return
        longest_s = max(sample.length_s for sample in node.samples)
        starts = [sample.start_s + shift_s for sample in node.samples]
        self._cells.reach(min(starts), max(starts) + longest_s)
        are_long = longest_s > FINE_SHARE * self._cells.length_s
        samples = arrived(node.samples) if are_long else node.samples
        length_s = [sample.length_s for sample in samples]
        named = dict(zip(NAMES, zip(*map(attrgetter(*NAMES), samples), strict=True), strict=True))
        columns = [tuple(map(mul, named[name], length_s)) if name in HELD else named[name] for name in NAMES]
        if are_long:
            for start_s, length, *row in zip(starts, length_s, *columns, strict=True):
                self._cells.add(start_s, length, row)
        else:
            self._by_runs([start_s + length / 2 for start_s, length in zip(starts, length_s, strict=True)], columns)

    def _by_runs(self, middles_s: Sequence[float], columns: Sequence[Sequence[float]]) -> None:
        """Adds whole samples, undivided, where cells are so long that their borders hardly matter."""
        length_s = self._cells.length_s
        begin = 0
        for cell, run in groupby(int(middle_s // length_s) for middle_s in middles_s):
            end = begin + sum(1 for _ in run)
            self._cells.put(cell, [sum(column[begin:end]) for column in columns])
            begin = end

    def section(self) -> Series:
        """Returns the section: flows and levels of all nodes together."""
        length_s = self._cells.length_s
        rows = sorted(self._cells.rows.items())
        starts_s = [cell * length_s for cell, _ in rows]
        rates = {name: [row[at] / length_s for _, row in rows] for at, name in enumerate(NAMES)}
        step = max(1, -(-len(rows) // MOST_LATENCY_POINTS))
        few = [rows[at : at + step] for at in range(0, len(rows), step)]
        sums = [{name: sum(row[at] for _, row in group) for at, name in enumerate(NAMES)} for group in few]
        return _section(length_s if rows else None, starts_s, rates, _latencies(starts_s[::step], sums))
