"""Sums over the cells of a common time axis, and a node's speeds on it. Pure.

Cell `i` of level `l` reaches from `i * 2**l` to `(i + 1) * 2**l` seconds of the run: the axes of all nodes fit into one
another, and a coarser one is the sum of neighbours. However long a run is, it has at most so many cells.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from math import nan

from hpcstage.record.figures.speeds import Point

CELLS = 2048
"""Of a node's track: an hour in cells of two seconds."""


class Cells:
    """Rows of sums by cell; cells double in length as often as it takes to have at most `most`."""

    def __init__(self, most: int) -> None:
        self.level = 0
        self.rows: dict[int, list[float]] = {}
        self._most = most
        self._span: tuple[int, int] | None = None

    @property
    def length_s(self) -> float:
        """Of a cell."""
        return float(2**self.level)

    def reach(self, start_s: float, end_s: float) -> None:
        """Makes room for this time, before anything is put there."""
        first, last = int(start_s // self.length_s), int(end_s // self.length_s)
        low, high = self._span or (first, last)
        low, high = min(first, low), max(last, high)
        while high - low >= self._most:
            low, high = low >> 1, high >> 1
            self._coarsen()
        self._span = low, high

    def add(self, start_s: float, length_s: float, values: Sequence[float]) -> None:
        """Adds values that belong to an interval; what lies across a border is divided in proportion to time."""
        for cell, inside_s in parts_of(start_s, length_s, self.length_s):
            self.put(cell, [value * inside_s / length_s for value in values])

    def put(self, cell: int, values: Sequence[float]) -> None:
        """Adds values to a cell."""
        row = self.rows.get(cell)
        self.rows[cell] = list(values) if row is None else [one + other for one, other in zip(row, values, strict=True)]

    def _coarsen(self) -> None:
        rows, self.rows = self.rows, {}
        self.level += 1
        for cell, row in rows.items():
            self.put(cell >> 1, row)


def parts_of(start_s: float, length_s: float, cell_s: float) -> list[tuple[int, float]]:
    """The cells that an interval touches, and how much of it lies in each."""
    first, last = int(start_s // cell_s), int((start_s + length_s) // cell_s)
    if first == last:
        return [(first, length_s)]
    inner = [(cell, cell_s) for cell in range(first + 1, last)]
    return [(first, (first + 1) * cell_s - start_s), *inner, (last, start_s + length_s - last * cell_s)]


@dataclass(frozen=True)
class Track:
    """A node's speeds of the source, cell by cell; `seen_s` is 0 where nothing says anything about it."""

    on: str
    """copies or reads: of whom."""
    level: int
    first: int
    """The cell with which the columns begin."""
    seen_s: array[float]
    size: array[float]
    """Bytes."""
    work: array[float]
    """Bytes as to be compared (Point.speed), for equal numbers in flight."""
    files: array[float]

    def speeds(self, cells: range) -> array[float]:
        """In these cells, among which are all of its own; nan where less than half of one was seen."""
        found = array("f", [nan]) * len(cells)
        least_s = 2 ** (self.level - 1)
        for at, (seen_s, work) in enumerate(zip(self.seen_s, self.work, strict=True), self.first - cells.start):
            if seen_s >= least_s:
                found[at] = work / seen_s
        return found

    def mean(self, cells: Sequence[int]) -> float | None:
        """Over cells, by time; None where nothing was seen in them."""
        inside = [cell - self.first for cell in cells if 0 <= cell - self.first < len(self.seen_s)]
        seen_s = sum(self.seen_s[at] for at in inside)
        return sum(self.work[at] for at in inside) / seen_s if seen_s > 0 else None


def track_of(on: str, points: Sequence[Point], shift_s: float) -> Track | None:
    """A node's points, in order, on the run's axis; None if there are none."""
    if not points:
        return None
    start_s = min(p.start_s for p in points) + shift_s
    end_s = max(p.start_s + p.length_s for p in points) + shift_s
    level = 0
    while end_s // 2**level - start_s // 2**level >= CELLS:
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
    return array("f", column if max(column) <= LARGEST else [min(value, LARGEST) for value in column])


LARGEST = 3e38
"""Of a 32-bit float."""


def coarser(track: Track, level: int) -> Track:
    """The same in the cells of a higher level."""
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
