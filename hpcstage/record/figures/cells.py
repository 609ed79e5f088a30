"""Sums over the cells of a common time axis, and a node's speeds on it. Pure.

Cell `i` of level `l` reaches from `i * 2**l` to `(i + 1) * 2**l` seconds of the run, so the axes of all nodes fit into
one another, and a coarser cell is the sum of two neighbours. The number of cells has a bound, however long the run is.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from math import nan

from hpcstage.record.figures.speeds import Point
from hpcstage.record.schema import MeasuredOn

MOST_CELLS = 2048
"""A node's track has at most this many cells: cells of two seconds in a run of an hour."""


class Cells:
    """Sums by cell. The cells double in length as often as it takes to have at most `most` of them."""

    def __init__(self, most: int) -> None:
        self.level = 0
        self.sums: dict[int, float] = {}
        self._most = most
        self._span: tuple[int, int] | None = None

    @property
    def length_s(self) -> float:
        """Returns the length of a cell."""
        return float(2**self.level)

    def reach(self, start_s: float, end_s: float) -> None:
        """Makes the axis contain this time; the caller does so before it adds values there."""
        first, last = int(start_s // self.length_s), int(end_s // self.length_s)
        low, high = self._span or (first, last)
        low, high = min(first, low), max(last, high)
        while high - low >= self._most:
            low, high = low >> 1, high >> 1
            self._coarsen()
        self._span = low, high

    def add(self, start_s: float, length_s: float, value: float) -> None:
        """Adds the value of an interval; divides it in proportion to time where it lies across a border."""
        for cell, inside_s in parts_of(start_s, length_s, self.length_s):
            self.put(cell, value * inside_s / length_s)

    def put(self, cell: int, value: float) -> None:
        """Adds a value to a cell."""
        self.sums[cell] = self.sums.get(cell, 0.0) + value

    def _coarsen(self) -> None:
        sums, self.sums = self.sums, {}
        self.level += 1
        for cell, value in sums.items():
            self.put(cell >> 1, value)


def parts_of(start_s: float, length_s: float, cell_s: float) -> list[tuple[int, float]]:
    """Returns the cells that an interval touches, and how many seconds of it lie in each."""
    first, last = int(start_s // cell_s), int((start_s + length_s) // cell_s)
    if first == last:
        return [(first, length_s)]
    inner = [(cell, cell_s) for cell in range(first + 1, last)]
    return [(first, (first + 1) * cell_s - start_s), *inner, (last, start_s + length_s - last * cell_s)]


@dataclass(frozen=True)
class Track:
    """How fast the source was for a node, cell by cell; `seen_s` is 0 in a cell where no sample tells it."""

    on: MeasuredOn
    """The transfers that were measured: `copies` of the copiers or `reads` of the program."""
    level: int
    first: int
    """The cell of the first values in the columns."""
    seen_s: array[float]
    size: array[float]
    """Bytes."""
    work: array[float]
    """Bytes as `Point.speed` counts them, made comparable for equal numbers in flight."""
    files: array[float]

    def speeds(self, cells: range) -> array[float]:
        """Returns the speeds in `cells`, which contain all of the track's; nan where less than half of one was seen."""
        found = array("f", [nan]) * len(cells)
        least_s = 2 ** (self.level - 1)
        for at, (seen_s, work) in enumerate(zip(self.seen_s, self.work, strict=True), self.first - cells.start):
            if seen_s >= least_s:
                found[at] = work / seen_s
        return found

    def mean(self, cells: Sequence[int]) -> float | None:
        """Returns the mean speed over cells, weighted by time; None where nothing was seen in them."""
        inside = [cell - self.first for cell in cells if 0 <= cell - self.first < len(self.seen_s)]
        seen_s = sum(self.seen_s[at] for at in inside)
        return sum(self.work[at] for at in inside) / seen_s if seen_s > 0 else None


def track_of(on: MeasuredOn, points: Sequence[Point], shift_s: float) -> Track | None:
    """Puts a node's points, which are in order of time, on the run's axis; None if there are none."""
    if not points:
        return None
    start_s = min(p.start_s for p in points) + shift_s
    end_s = max(p.start_s + p.length_s for p in points) + shift_s
    level = 0
    while end_s // 2**level - start_s // 2**level >= MOST_CELLS:
        level += 1
    cell_s = float(2**level)
    first = int(start_s // cell_s)
    columns = [[0.0] * (int(end_s // cell_s) - first + 1) for _ in range(4)]
    seen, size, work, files = columns
    for p in points:
        for cell, inside_s in parts_of(p.start_s + shift_s, p.length_s, cell_s):
            at = cell - first
            seen[at] += inside_s
            size[at] += p.bytes_per_s * inside_s
            work[at] += p.speed * inside_s
            files[at] += p.files * inside_s / p.length_s
    return Track(on, level, first, *(_small(column) for column in columns))


def _small(column: list[float]) -> array[float]:
    return array("f", column if max(column) <= LARGEST_FLOAT else [min(value, LARGEST_FLOAT) for value in column])


LARGEST_FLOAT = 3e38
"""About the largest value of a 32-bit float; larger ones are cut."""


def coarser(track: Track, level: int) -> Track:
    """Returns the track in the longer cells of a higher level."""
    steps = level - track.level
    if steps <= 0:
        return track
    first = track.first >> steps
    length = ((track.first + len(track.seen_s) - 1) >> steps) - first + 1
    columns = [array("f", bytes(4 * length)) for _ in range(4)]
    for old, new in zip((track.seen_s, track.size, track.work, track.files), columns, strict=True):
        for at, value in enumerate(old, track.first):
            new[(at >> steps) - first] += value
    return Track(track.on, level, first, *columns)
