"""Composes the section `series`: what the source gave over time, in at most 240 points. Pure.

Times are on the run's axis.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from operator import itemgetter

from hpcstage.record.figures.arrivals import arrived
from hpcstage.record.figures.cells import Cells
from hpcstage.record.parts.part import NodePart
from hpcstage.record.parts.rows import Sample
from hpcstage.record.schema import Series

MOST_POINTS = 240
FINE_SHARE = 0.25
"""Samples longer than this share of a cell are divided at its borders."""

Placed = tuple[float, Sample]
"""A sample, and its start on the run's axis."""
Group = list[Placed]


def series_of(node: NodePart | None, shift_s: float) -> Series:
    """Returns the section of one node, or an empty one."""
    samples = arrived(node.samples) if node else []
    placed = sorted(((shift_s + sample.start_s, sample) for sample in samples), key=itemgetter(0))
    interval_s = _width(placed)
    groups = _grouped(placed, interval_s) if interval_s else []
    starts_s = tuple(group[0][0] for group in groups)
    return Series(interval_s=interval_s, start_s=starts_s, source_bytes_per_s=tuple(map(_rate, groups)))


def _width(placed: Sequence[Placed]) -> float | None:
    if not placed:
        return None
    longest_s = max(sample.length_s for _, sample in placed)
    return max((placed[-1][0] + placed[-1][1].length_s - placed[0][0]) / MOST_POINTS, longest_s)


def _grouped(placed: Sequence[Placed], width_s: float) -> list[Group]:
    """Groups samples by intervals of equal width; empty intervals are left out."""
    groups: dict[int, Group] = {}
    for start_s, sample in placed:
        middle_s = start_s + sample.length_s / 2 - placed[0][0]
        groups.setdefault(min(int(middle_s / width_s), MOST_POINTS - 1), []).append((start_s, sample))
    return [groups[index] for index in sorted(groups)]


def _rate(group: Group) -> float:
    """Returns the mean rate over the seconds that the group's samples cover."""
    span_s = max(start_s + sample.length_s for start_s, sample in group) - min(start_s for start_s, _ in group)
    return sum(_bytes(sample) for _, sample in group) / max(span_s, 1e-9)


def _bytes(sample: Sample) -> int:
    return sample.copied_bytes + sample.shim_bytes


class Together:
    """Sums the samples of all nodes on one axis; each node is added once."""

    def __init__(self) -> None:
        self._cells = Cells(MOST_POINTS)

    def add(self, node: NodePart, shift_s: float) -> None:
        """Adds a node's samples."""
        if not node.samples:
            return
        longest_s = max(sample.length_s for sample in node.samples)
        starts_s = [sample.start_s + shift_s for sample in node.samples]
        self._cells.reach(min(starts_s), max(starts_s) + longest_s)
        if longest_s > FINE_SHARE * self._cells.length_s:
            for start_s, sample in zip(starts_s, arrived(node.samples), strict=True):
                self._cells.add(start_s, sample.length_s, _bytes(sample))
            return
        sums = Counter[int]()  # whole samples, where cells are so long that their borders hardly matter
        for start_s, sample in zip(starts_s, node.samples, strict=True):
            sums[int((start_s + sample.length_s / 2) // self._cells.length_s)] += _bytes(sample)
        for cell, size_bytes in sums.items():
            self._cells.put(cell, size_bytes)

    def section(self) -> Series:
        """Returns the section: what all nodes got together."""
        length_s, rows = self._cells.length_s, sorted(self._cells.sums.items())
        return Series(
            interval_s=length_s if rows else None,
            start_s=tuple(cell * length_s for cell, _ in rows),
            source_bytes_per_s=tuple(size_bytes / length_s for _, size_bytes in rows),
        )
