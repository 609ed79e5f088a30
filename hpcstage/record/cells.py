"""Sums over the cells of a common time axis, and a node's speeds on it. Pure.

Cell `i` of level `l` reaches from `i * 2**l` to `(i + 1) * 2**l` seconds of the run: the axes of all nodes fit into one
another, and a coarser one is the sum of neighbours. However long a run is, it has at most so many cells.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from hpcstage.record.speeds import Point

CELLS = 2048
"""Of a node's track: an hour in cells of two seconds."""


class Cells:
    """Rows of sums by cell; what lies across a border is divided in proportion to time."""

    def __init__(self, columns: int, most: int) -> None:
        self.level = 0
        self.rows: dict[int, list[float]] = {}
        self._columns = columns
        self._most = most
        self._low = 0
        self._high = 0

    @property
    def length_s(self) -> float:
        """Of a cell."""
        return float(2**self.level)

    def add(self, start_s: float, length_s: float, values: Sequence[float]) -> None:
        """Adds values that belong to an interval."""
        length = self.length_s
        first, last = int(start_s // length), int((start_s + length_s) // length)
        if not self.rows:
            self._low, self._high = first, last
        if first < self._low or last > self._high:
            self._low, self._high = min(first, self._low), max(last, self._high)
            if self._high - self._low >= self._most:
                self._coarsen()
                self.add(start_s, length_s, values)
                return
        if first == last:
            self._put(first, values)
            return
        for cell in range(first, last + 1):
            inside_s = min(start_s + length_s, (cell + 1) * length) - max(start_s, cell * length)
            self._put(cell, [value * inside_s / length_s for value in values])

    def _put(self, cell: int, values: Sequence[float]) -> None:
        row = self.rows.get(cell)
        if row is None:
            self.rows[cell] = list(values)
            return
        for column, value in enumerate(values):
            if value:
                row[column] += value

    def _coarsen(self) -> None:
        while self._high - self._low >= self._most:
            rows, self.rows = self.rows, {}
            self.level += 1
            self._low >>= 1
            self._high >>= 1
            for cell, row in rows.items():
                self._put(cell >> 1, row)


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

    def speed(self, cell: int) -> float | None:
        """In this cell, if at least half of it was seen."""
        at = cell - self.first
        if not 0 <= at < len(self.seen_s) or self.seen_s[at] < 2 ** (self.level - 1):
            return None
        return self.work[at] / self.seen_s[at]

    def mean(self, cells: Sequence[int]) -> float | None:
        """Over cells, by time; None where nothing was seen in them."""
        inside = [cell - self.first for cell in cells if 0 <= cell - self.first < len(self.seen_s)]
        seen_s = sum(self.seen_s[at] for at in inside)
        return sum(self.work[at] for at in inside) / seen_s if seen_s > 0 else None


def track_of(on: str, points: Sequence[Point], shift_s: float) -> Track | None:
    """A node's points on the run's axis; None if there are none."""
    if not points:
        return None
    cells = Cells(4, CELLS)
    for p in points:
        length_s = p.length_s
        values = (length_s, p.bytes_per_s * length_s, p.speed * length_s, p.files)
        cells.add(p.start_s + shift_s, length_s, values)
    first, last = min(cells.rows), max(cells.rows)
    columns = [array("f", bytes(4 * (last - first + 1))) for _ in range(4)]
    for cell, row in cells.rows.items():
        for column, value in zip(columns, row, strict=True):
            column[cell - first] = min(value, LARGEST)
    return Track(on, cells.level, first, *columns)


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
