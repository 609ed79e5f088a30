"""Estimates how much of a program's computing between the reads of one file the kernel's read-ahead hides. Pure.

A program that reads a file in pieces, in order, and computes between them does not wait for the whole file: while it
computes, the kernel reads what follows. Linux first reads a few pieces, and each time that the program comes to what
was read ahead it asks for the next window, of up to four times the size, until the windows have their largest size.
That is 128 kB unless the administrator or the client of the file system has set another, so that what is hidden is a
range: from windows of 128 kB to all of the file asked for at once.

A read that does not begin where the one before ended was not read ahead. It takes at most as long as a window.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hpcstage.record.figures import counts
from hpcstage.record.figures.sourceload import Range
from hpcstage.record.parts.rows import ProcessPart

NS = 1e9
WINDOW_BYTES = 128 * 1024
PAGE_BYTES = 4096
PLAYED = 2000
"""At most this many pieces of a file, or windows, are simulated; the other pieces take the mean of these."""
NOTHING = Range(0.0, 0.0)


@dataclass(frozen=True)
class Pieces:
    """How processes read a file on average."""

    size_bytes: float = 0.0
    reads: float = 0.0
    within_s: float = 0.0
    """Seconds between a read of the file and the next one, summed."""
    jumps: float = 0.0
    """Reads that did not begin where the one before ended."""

    def hidden_s(self, read_s: float) -> Range:
        """Returns by how much computing between reads overlaps with reading, which takes `read_s` for a whole file."""
        if self.reads <= 1 or not self.within_s or not read_s or not self.size_bytes:
            return NOTHING
        piece = max(1.0, self.size_bytes / self.reads)
        gap_s = self.within_s / (self.reads - 1)
        least_s = self._taken_s(piece, gap_s, read_s / self.size_bytes)
        first = min(1.0, _first_window(piece) / self.size_bytes)
        most_hidden_s = min(self.within_s, read_s * (1 - first))
        return Range(min(most_hidden_s, max(0.0, read_s + self.within_s - least_s)), most_hidden_s)

    def jumping_s(self, read_s: float) -> float:
        """Returns by how much jumps lengthen reading at most: for each the program waits for one window more."""
        return self.jumps * read_s / max(1.0, self.size_bytes / WINDOW_BYTES)

    def _taken_s(self, piece: float, gap_s: float, byte_s: float) -> float:
        """Returns how long reading and computing take together where each window has WINDOW_BYTES or less."""
        count = max(1, round(self.size_bytes / piece))
        played = min(count, PLAYED, max(2, round(PLAYED * WINDOW_BYTES / piece)))
        source = _Source(played * piece, piece, byte_s)
        now_s = 0.0
        for number in range(played):
            now_s = source.read(number * piece, (number + 1) * piece, now_s) + gap_s
        return now_s * count / played - gap_s


class _Source:
    """A file that comes window after window, each asked for when the program comes to where the one before begins."""

    def __init__(self, size_bytes: float, piece: float, byte_s: float) -> None:
        self._size_bytes, self._byte_s = size_bytes, byte_s
        self._next_bytes = _first_window(piece)
        self._asks_at = min(piece, self._next_bytes) if piece < self._next_bytes else 0.0
        """The program asks for the next window when it reads this byte."""
        self._end = self._free_s = 0.0
        self._arrived: list[tuple[float, float]] = []
        """The end of each window that was asked for and is not read to its end, and when it is there."""
        self._ask(0.0)

    def read(self, at: float, end: float, now_s: float) -> float:
        """Returns when the program, which asks at `now_s`, has the bytes from `at` to `end`."""
        end = min(end, self._size_bytes)
        while at < end:
            if at >= self._asks_at and self._end < self._size_bytes:
                self._asks_at = self._end
                self._ask(now_s)
            to, there_s = self._arrived[0]
            now_s = max(now_s, there_s)
            at = min(end, to, self._asks_at if self._asks_at > at else end)
            if at >= to:
                self._arrived.pop(0)
        return now_s

    def _ask(self, now_s: float) -> None:
        size_bytes = min(self._next_bytes, self._size_bytes - self._end)
        self._end += size_bytes
        self._free_s = max(self._free_s, now_s) + size_bytes * self._byte_s
        self._arrived.append((self._end, self._free_s))
        self._next_bytes = min(WINDOW_BYTES, self._next_bytes * (4 if self._next_bytes < WINDOW_BYTES / 16 else 2))


def _first_window(piece: float) -> float:
    """Returns the bytes that Linux reads at first for a program that asks for `piece` bytes."""
    rounded = float(PAGE_BYTES)
    while rounded < piece:
        rounded *= 2
    factor = 4 if rounded <= WINDOW_BYTES / 32 else 2 if rounded <= WINDOW_BYTES / 4 else WINDOW_BYTES
    return min(WINDOW_BYTES, factor * rounded)


def pieces_of(processes: Sequence[ProcessPart]) -> Pieces:
    """Returns how processes read their files on average; nothing where they opened none."""
    opens = sum(map(counts.opens_of, processes))
    if not opens:
        return Pieces()
    size_bytes, reads = (
        sum(counts.total(processes, f"{where}_{what}") for where in ("local", "source")) / opens
        for what in ("read_bytes", "reads")
    )
    within_s, jumps = counts.total(processes, "within_ns") / NS / opens, counts.total(processes, "jumps") / opens
    return Pieces(size_bytes, reads, within_s, jumps)
