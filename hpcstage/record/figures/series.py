"""Composes the section `series`: the run over time in at most 240 points, as columns of equal length. Pure.

Times are on the run's axis.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from operator import attrgetter

from hpcstage.record.figures.cells import Cells
from hpcstage.record.parts.draft import Sample
from hpcstage.record.parts.part import NodePart
from hpcstage.record.schema import LatencySeries, Series

POINTS = 240
LATENCY_POINTS = 20
FINE = 0.25
"""Samples longer than this share of a cell are divided at its borders."""
NS_PER_MS = 1e6

Placed = tuple[float, Sample]
"""A sample, and its start on the run's axis."""


def series_of(node: NodePart | None, shift_s: float) -> Series:
    """Returns the section of one node, or an empty one."""
    samples = node.samples if node else ()
    placed = sorted(((shift_s + sample.start_s, sample) for sample in samples), key=lambda pair: pair[0])
    groups = _grouped(placed, POINTS)
    return Series(
        interval_s=_width(placed, POINTS),
        start_s=tuple(start_s for start_s, _ in groups),
        source_bytes_per_s=_rates(groups, "copied_bytes", "shim_bytes"),
        copied_bytes_per_s=_rates(groups, "copied_bytes"),
        direct_bytes_per_s=_rates(groups, "shim_bytes"),
        peer_bytes_per_s=_rates(groups, "peer_bytes"),
        hit_opens_per_s=_rates(groups, "hit_opens"),
        wants_per_s=_rates(groups, "wants"),
        queued_files=tuple(samples[-1][1].queued_files for _, samples in groups),
        store_bytes=tuple(samples[-1][1].store_bytes for _, samples in groups),
        busy=tuple(map(_mean_busy, groups)),
        latency=_latency(placed),
    )


def _width(placed: Sequence[Placed], points: int) -> float | None:
    if not placed:
        return None
    return max((placed[-1][0] + placed[-1][1].length_s - placed[0][0]) / points, _longest(placed))


def _longest(placed: Sequence[Placed]) -> float:
    return max(sample.length_s for _, sample in placed)


def _grouped(placed: Sequence[Placed], points: int) -> list[tuple[float, list[Placed]]]:
    """Groups samples by intervals of equal width; empty intervals are left out."""
    width_s = _width(placed, points)
    if not width_s:
        return []
    first_s = placed[0][0]
    groups: dict[int, list[Placed]] = {}
    for start_s, sample in placed:
        middle_s = start_s + sample.length_s / 2 - first_s
        groups.setdefault(min(int(middle_s / width_s), points - 1), []).append((start_s, sample))
    return [(groups[index][0][0], groups[index]) for index in sorted(groups)]


Group = tuple[float, list[Placed]]


def _span_s(group: Group) -> float:
    """Returns the seconds that the group's samples cover."""
    starts = [start_s for start_s, _ in group[1]]
    ends = [start_s + sample.length_s for start_s, sample in group[1]]
    return max(max(ends) - min(starts), 1e-9)


def _rates(groups: Sequence[Group], *names: str) -> tuple[float, ...]:
    return tuple(_sum(group, names) / _span_s(group) for group in groups)


def _mean_busy(group: Group) -> float:
    return sum(sample.busy * sample.length_s for _, sample in group[1]) / _span_s(group)


def _latency(placed: Sequence[Placed]) -> LatencySeries:
    """Returns means over about a twentieth of the run each."""
    groups = _grouped(placed, LATENCY_POINTS)
    sums = [{name: _sum(group, (name,)) for name in TIMES} for group in groups]
    return _latencies([start_s for start_s, _ in groups], sums)


def _latencies(starts_s: Sequence[float], sums: Sequence[Mapping[str, float]]) -> LatencySeries:
    """Returns means in milliseconds: per open at the source, of reading per copied file, and per read of the program at
    the source."""
    return LatencySeries(
        start_s=tuple(starts_s),
        open_ms=tuple(_ms(s, ("copy_open_ns", "shim_open_ns"), ("copied_files", "shim_opens")) for s in sums),
        copy_read_ms=tuple(_ms(s, ("copy_read_ns",), ("copied_files",)) for s in sums),
        direct_read_ms=tuple(_ms(s, ("shim_read_ns",), ("shim_reads",)) for s in sums),
    )


def _sum(group: Group, names: Sequence[str]) -> float:
    return float(sum(getattr(sample, name) for _, sample in group[1] for name in names))


# ---- several nodes ----

ADDED = ("copied_bytes", "shim_bytes", "peer_bytes", "hit_opens", "wants")
HELD = ("queued_files", "store_bytes", "busy")
"""These fields are levels, not flows: their means over time are added over the nodes."""
TIMES = ("copy_open_ns", "shim_open_ns", "copied_files", "shim_opens", "copy_read_ns", "shim_read_ns", "shim_reads")
_ADDED, _HELD, _TIMES = attrgetter(*ADDED), attrgetter(*HELD), attrgetter(*TIMES)


class Together:
    """Sums the samples of all nodes on one axis; each node is added once."""

    def __init__(self) -> None:
        self._cells = Cells(POINTS)

    def add(self, node: NodePart, shift_s: float) -> None:
        """Adds a node's samples."""
        samples = node.samples
        if not samples:
            return
        longest_s = max(sample.length_s for sample in samples)
        starts = [sample.start_s + shift_s for sample in samples]
        self._cells.reach(min(starts), max(starts) + longest_s)
        length_s = [sample.length_s for sample in samples]
        flows = zip(*map(_ADDED, samples), strict=True)
        held = (
            [v * s for v, s in zip(column, length_s, strict=True)] for column in zip(*map(_HELD, samples), strict=True)
        )
        columns = [*flows, *held, *zip(*map(_TIMES, samples), strict=True)]
        if longest_s > FINE * self._cells.length_s:
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
        rows = [self._cells.rows[cell] for cell in sorted(self._cells.rows)]
        columns = dict(zip((*ADDED, *HELD), zip(*rows, strict=True), strict=False)) if rows else {}
        rates = {name: [value / length_s for value in columns.get(name, ())] for name in (*ADDED, *HELD)}
        both = [a + b for a, b in zip(rates["copied_bytes"], rates["shim_bytes"], strict=True)]
        return Series(
            interval_s=length_s if rows else None,
            start_s=tuple(cell * length_s for cell in sorted(self._cells.rows)),
            source_bytes_per_s=tuple(both),
            copied_bytes_per_s=tuple(rates["copied_bytes"]),
            direct_bytes_per_s=tuple(rates["shim_bytes"]),
            peer_bytes_per_s=tuple(rates["peer_bytes"]),
            hit_opens_per_s=tuple(rates["hit_opens"]),
            wants_per_s=tuple(rates["wants"]),
            queued_files=tuple(int(value) for value in rates["queued_files"]),
            store_bytes=tuple(int(value) for value in rates["store_bytes"]),
            busy=tuple(rates["busy"]),
            latency=self._latency(),
        )

    def _latency(self) -> LatencySeries:
        cells = sorted(self._cells.rows)
        step = max(1, -(-len(cells) // LATENCY_POINTS))
        groups = [cells[at : at + step] for at in range(0, len(cells), step)]
        starts_s = [group[0] * self._cells.length_s for group in groups]
        return _latencies(starts_s, [self._times(group) for group in groups])

    def _times(self, cells: Sequence[int]) -> dict[str, float]:
        rows = (self._cells.rows[cell][-len(TIMES) :] for cell in cells)
        return dict(zip(TIMES, map(sum, zip(*rows, strict=True)), strict=True))


def _ms(sums: Mapping[str, float], times: Sequence[str], counts: Sequence[str]) -> float | None:
    number = sum(sums[name] for name in counts)
    return sum(sums[name] for name in times) / number / NS_PER_MS if number > 0 else None
