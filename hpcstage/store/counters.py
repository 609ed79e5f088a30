"""Counters of the copier threads in memory shared with the daemon, so that bytes count in the second they are read in.

Owns the layout (repeated in `_copy.c`). Each thread writes only its own block, except that the copier's main thread
sets CANCEL, so there are no locks; the daemon only reads. Counters outlive the copier that wrote them.
"""

from __future__ import annotations

import mmap
from dataclasses import dataclass

from hpcstage.protocol.shim import HIST_BUCKETS, bucket_of_ns

BLOCK_BYTES = 1024
BYTES, OPENS, OPEN_NS, READS, READ_NS, WRITE_NS, FILES, CANCEL, CURRENT, CURRENT_BYTES, RECEIVED = range(11)
_COUNTERS = 7
_WORDS = 16
"""The number of u64 at the start of a block; two histograms of u32 follow."""
_HIST_OPEN = _WORDS * 2
_HIST_READ = _HIST_OPEN + HIST_BUCKETS


@dataclass(frozen=True)
class Totals:
    """Sums over all threads since the start."""

    bytes: int = 0
    opens: int = 0
    open_ns: int = 0
    reads: int = 0
    read_ns: int = 0
    write_ns: int = 0
    files: int = 0


class ThreadStats:
    """The counters of one thread, in its block."""

    def __init__(self, block: memoryview) -> None:
        self.words = block.cast("Q")
        self._hist = block.cast("I")
        self.block = block

    def opened(self, took_ns: int) -> None:
        """Counts an open at the source."""
        self.words[OPENS] += 1
        self.words[OPEN_NS] += took_ns
        self._hist[_HIST_OPEN + bucket_of_ns(took_ns)] += 1

    def read(self, size_bytes: int, took_ns: int) -> None:
        """Counts a read at the source."""
        self.words[BYTES] += size_bytes
        self.words[CURRENT_BYTES] += size_bytes
        self.words[READS] += 1
        self.words[READ_NS] += took_ns
        self._hist[_HIST_READ + bucket_of_ns(took_ns)] += 1

    def received(self, size_bytes: int) -> None:
        """Counts bytes of the current file that another node gave."""
        self.words[RECEIVED] += size_bytes
        self.words[CURRENT_BYTES] += size_bytes

    def copied(self) -> None:
        """Counts a file whose copy is in the store."""
        self.words[FILES] += 1

    def wrote(self, took_ns: int) -> None:
        """Counts time at the local disk."""
        self.words[WRITE_NS] += took_ns

    def works_on(self, id_: int) -> None:
        """Notes the file that this thread reads from here on."""
        if self.words[CURRENT] != id_ + 1:
            self.words[CURRENT_BYTES] = 0
            self.words[CURRENT] = id_ + 1

    @property
    def cancelled(self) -> bool:
        """Whether the copy that this thread makes was cancelled."""
        return bool(self.words[CANCEL])


class StatsArea:
    """Owns the blocks of all threads of all copiers: anonymous shared memory, made before the copiers are forked."""

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self._map = mmap.mmap(-1, max(threads, 1) * BLOCK_BYTES)
        self._view = memoryview(self._map)

    def thread(self, index: int) -> ThreadStats:
        """Returns the counters of a thread."""
        start = index * BLOCK_BYTES
        return ThreadStats(self._view[start : start + BLOCK_BYTES])

    def totals(self) -> Totals:
        """Returns the sums at this moment."""
        words = self._view.cast("Q")
        step = BLOCK_BYTES // 8
        blocks = (words[i * step : i * step + _COUNTERS].tolist() for i in range(self.threads))
        return Totals(*(sum(column) for column in zip(*blocks, strict=True)))

    @property
    def received(self) -> int:
        """The bytes of large files that other nodes gave."""
        words = self._view.cast("Q")
        return sum(words[RECEIVED + thread * (BLOCK_BYTES // 8)] for thread in range(self.threads))

    def read_of(self, id_: int) -> int:
        """Returns the bytes of one file that the threads whose last file it is have read, or got from other nodes, in
        all attempts at it."""
        words = self._view.cast("Q")
        starts = range(0, self.threads * (BLOCK_BYTES // 8), BLOCK_BYTES // 8)
        return sum(words[start + CURRENT_BYTES] for start in starts if words[start + CURRENT] == id_ + 1)

    def histograms(self) -> tuple[dict[int, int], dict[int, int]]:
        """Returns the numbers of opens and of reads by bucket, zeros left out."""
        words = self._view.cast("I")
        step = BLOCK_BYTES // 4
        pair = []
        for offset in (_HIST_OPEN, _HIST_READ):
            rows = (words[i * step + offset : i * step + offset + HIST_BUCKETS].tolist() for i in range(self.threads))
            sums = [sum(column) for column in zip(*rows, strict=True)]
            pair.append({bucket: count for bucket, count in enumerate(sums) if count})
        return pair[0], pair[1]
