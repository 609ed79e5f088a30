"""Estimates how reading a file in pieces differs from reading it at once: the kernel reads ahead of the program. Pure.

A program that reads a file in pieces, in order, and computes between them does not wait for the whole file: while it
computes, the kernel reads what follows. Linux first reads a few pieces, and each time that the program comes to what
was read ahead it asks for the next window, of up to four times the size, until the windows have their largest size.
The kernel tells that size for the file systems of which it reads ahead itself. Where it is not known, or larger, so
that a window arrives in parts, the difference is a range: from all of the file asked for at once to windows of 128 kB.

The time of a whole file was measured with copies, which ask for all of it. Their windows are large from the beginning.
A program whose first read is small needs more windows, and so waits for more requests, each of which takes the source
some time besides its bytes. A file that one part of a program opens and another reads through a descriptor of its own,
as numpy's arrays are, may cost one request more: for the attributes, which are not known after a read.

A read that does not begin where the one before ended was not read ahead. It takes at most as long as a window.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from hpcstage.record.figures import counts
from hpcstage.record.figures.sourceload import Range
from hpcstage.record.parts.rows import ProcessPart
from hpcstage.units import NS_PER_S

WINDOW_BYTES = 128 * 1024
KERNEL_PAGE_BYTES = 4096
COPY_READ_BYTES = 1024 * 1024
"""Copies read so much at a time."""
FEW_READS = 4
"""The mean of fewer reads of a file says nothing about the first one, which may be that of a header."""
MOST_PLAYED = 2000
"""At most this many pieces of a file, or windows, are simulated; the other pieces take the mean of these."""
SOLVED_BYTES, HALVINGS = 4 * 1024 * 1024, 20
"""The time of a byte is searched for in the first SOLVED_BYTES of a file, to one part in 2 to the power of HALVINGS."""
NOTHING = Range(0.0, 0.0)


@dataclass(frozen=True)
class WholeRead:
    """The seconds that the source takes for a file of which a single reader asks for all."""

    read_s: float
    open_s: float = 0.0
    """The seconds of an open, which is a request without data."""
    waiting_s: float = 0.0
    """The part of `read_s` that is more than the source takes for a file when it passes as many as it can."""
    window_bytes: int | None = None
    """The largest window that is read ahead; None: unknown."""

    def request_s(self, rounds: float) -> float:
        """Returns the seconds, at most, of a request besides its bytes, where the reader waited for so many in turn.

        A request takes about as long as an open; longer if the reader waited longer than the bytes explain.
        """
        return min(self.read_s / rounds, max(self.open_s, self.waiting_s / rounds))


@dataclass(frozen=True)
class Pieces:
    """How processes read a file on average."""

    size_bytes: float = 0.0
    reads: float = 0.0
    within_s: float = 0.0
    """Seconds between a read of the file and the next one, summed."""
    jumps: float = 0.0
    """Reads that did not begin where the one before ended."""
    descriptors: float = 1.0
    """The number of descriptors through which the file is read."""

    def added_s(self, whole: WholeRead) -> Range:
        """Returns by how much longer than `whole` the program's reading takes; less than 0 as far as it overlaps with
        the computing between the reads."""
        if self.reads <= 1 or not whole.read_s or not self.size_bytes:
            return NOTHING
        low_s, high_s = self._least_s(whole), self._longer_s(whole, self._in_order())
        return Range(low_s, max(low_s, high_s) + (self.descriptors - 1) * whole.open_s)

    def _least_s(self, whole: WholeRead) -> float:
        """Returns by how much longer the reading takes at least."""
        first = min(1.0, _first_window(max(1.0, self.size_bytes / self.reads), WINDOW_BYTES) / self.size_bytes)
        least_s = -min(self.within_s, whole.read_s * (1 - first))
        if not whole.window_bytes or whole.window_bytes > WINDOW_BYTES:
            return least_s
        return max(least_s, self._longer_s(whole, _Reads.even(self.size_bytes, max(2.0, self.reads))))

    def jumping_s(self, read_s: float) -> float:
        """Returns by how much jumps lengthen reading at most: for each the program waits for one window more."""
        return self.jumps * read_s / max(1.0, self.size_bytes / WINDOW_BYTES)

    def _longer_s(self, whole: WholeRead, reads: _Reads) -> float:
        """Returns by how much longer than `whole` some reads take where no window is larger than the largest."""
        window = min(whole.window_bytes or WINDOW_BYTES, WINDOW_BYTES)
        part = min(1.0, SOLVED_BYTES / self.size_bytes)
        copied = _Reads.even(part * self.size_bytes, part * self.size_bytes / COPY_READ_BYTES)
        request_s = whole.request_s(copied.taken_s(0.0, 0.0, 1.0, window) / part)
        byte_s = copied.byte_s(part * whole.read_s, request_s, window)
        taken_s = reads.taken_s(self.within_s / (reads.count - 1), byte_s, request_s, window)
        return taken_s - whole.read_s - self.within_s

    def _in_order(self) -> _Reads:
        """Returns two reads or more, the first of which is as small as it may be."""
        even = _Reads.even(self.size_bytes, max(2.0, self.reads))
        if self.reads >= FEW_READS or even.first <= KERNEL_PAGE_BYTES:
            return even
        return replace(even, first=KERNEL_PAGE_BYTES, piece=(self.size_bytes - KERNEL_PAGE_BYTES) / (even.count - 1))


@dataclass(frozen=True)
class _Reads:
    """The reads of a file in order."""

    size_bytes: float
    first: float
    """The bytes of the first one."""
    piece: float
    """The bytes of each later one."""
    count: int

    @classmethod
    def even(cls, size_bytes: float, reads: float) -> _Reads:
        """Returns reads of one size, which is not more than the program asked for: its last read may be a rest."""
        count = max(1, math.ceil(reads))
        return cls(size_bytes, size_bytes / count, size_bytes / count, count)

    def taken_s(self, gap_s: float, byte_s: float, request_s: float, window: int) -> float:
        """Returns the seconds from the first read to the end of the last, with `gap_s` between reads."""
        played = min(self.count, MOST_PLAYED, max(2, round(MOST_PLAYED * window / self.piece)))
        ends = [min(self.size_bytes, self.first + number * self.piece) for number in range(played)]
        if played == self.count:
            ends[-1] = self.size_bytes
        source = _Source(ends[-1], self.first, window, (byte_s, request_s))
        now_s = at = 0.0
        for end in ends:
            now_s = source.read(at, end, now_s) + gap_s
            at = end
        return now_s * self.count / played - gap_s

    def byte_s(self, taken_s: float, request_s: float, window: int) -> float:
        """Returns the seconds of a byte at which all takes `taken_s`, if each request takes `request_s` besides."""
        low_s, high_s = 0.0, taken_s / self.size_bytes
        for _ in range(HALVINGS):
            middle_s = (low_s + high_s) / 2
            if self.taken_s(0.0, middle_s, request_s, window) < taken_s:
                low_s = middle_s
            else:
                high_s = middle_s
        return high_s


class _Source:
    """A file that comes window after window, each asked for when the program comes to where the one before begins."""

    def __init__(self, size_bytes: float, first: float, window: int, times_s: tuple[float, float]) -> None:
        """The program asks for `first` bytes at first. `times_s` are those of a byte, and of a request besides."""
        self._size_bytes, self._window = size_bytes, window
        self._byte_s, self._request_s = times_s
        self._next_bytes = _first_window(first, window)
        self._asks_at = first if first < self._next_bytes else self._next_bytes / 2
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
        self._arrived.append((self._end, self._free_s + self._request_s))
        self._next_bytes = min(self._window, self._next_bytes * (4 if self._next_bytes < self._window / 16 else 2))


def _first_window(piece: float, window: int) -> float:
    """Returns the bytes that Linux reads at first for a program that asks for `piece` bytes; `window` are the most."""
    rounded = float(KERNEL_PAGE_BYTES)
    while rounded < piece:
        rounded *= 2
    factor = 4 if rounded <= window / 32 else 2 if rounded <= window / 4 else window
    return min(window, factor * rounded)


def pieces_of(processes: Sequence[ProcessPart]) -> Pieces:
    """Returns how processes read their files on average; nothing where they opened none."""
    opens = sum(map(counts.opens_of, processes))
    if not opens:
        return Pieces()
    size_bytes, reads = (
        sum(counts.total(processes, f"{where}_{what}") for where in ("local", "source")) / opens
        for what in ("read_bytes", "reads")
    )
    within_s, jumps = counts.total(processes, "within_ns") / NS_PER_S / opens, counts.total(processes, "jumps") / opens
    # Time and jumps are counted from one read of a descriptor to the next of the same.
    descriptors = 2.0 if reads > 1 and not within_s and not jumps else 1.0
    return Pieces(size_bytes, reads, within_s, jumps, descriptors)
