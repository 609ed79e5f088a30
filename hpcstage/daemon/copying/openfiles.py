"""Finds the files below some directories that processes have open or mapped, from /proc, whatever program opened
them."""

from __future__ import annotations

import os
import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress

from hpcstage.daemon.copying.engine import Engine
from hpcstage.daemon.copying.mapped import MappedReads
from hpcstage.daemon.process.helpers import Helpers
from hpcstage.daemon.queue.beside import BytesRead
from hpcstage.daemon.queue.large import LEAST_BYTES
from hpcstage.daemon.queue.sourcereads import MAPPED_SHARE
from hpcstage.daemon.queue.states import FileState
from hpcstage.protocol.shim import Counter

MOST_PROCESSES = 64
"""The most processes that one look takes in, in some ten milliseconds."""
_DELETED = b" (deleted)"


class LargeInUse:
    """Looks which large files programs have open, so that the queue defers their copies; see `queue.large`."""

    def __init__(self, engine: Engine, helpers: Helpers) -> None:
        self._engine = engine
        self._mapped = MappedReads(helpers, MAPPED_SHARE, self._read_by_faults)
        self._roots = [engine.copies.store.root, *(dataset.root for dataset in engine.manifest.datasets)]
        self._last = 0
        """The pid of the process that was looked at last."""
        self._may_be_large = max(engine.manifest.sizes, default=0) > LEAST_BYTES

    def look(self, programs: Callable[[], Iterable[int]], sums: Sequence[int], now: float) -> None:
        """Finds the large files that these processes have open, at the source and in the store. `sums` are the counters
        of all attached processes. Who has both open reads the copy: the source's open file is only kept."""
        engine, large = self._engine, self._engine.queue.large
        ahead = list(large.ahead)
        if engine.queue.settled or not self._may_be_large:
            return
        self._last, pids = in_turn(programs(), self._last)
        paths = open_below(pids, self._roots)
        ids = map(engine.manifest.find_source, paths)
        found = {id_ for id_ in ids if id_ is not None and large.is_large(id_) and engine.copies.path(id_) not in paths}
        for id_ in found:
            large.reads.here(id_, now)
        self.note_reads_in_order(now)
        copied = engine.pool.stats.totals().bytes
        program_s = sums[Counter.SOURCE_READ_NS] / 1e9
        read = BytesRead(now, sums[Counter.SOURCE_READ_BYTES], copied, sums[Counter.MOVABLE_READ_BYTES], program_s)
        large.followed.look(engine.arriving.read, read)
        large.looked(found, read)
        if sums[Counter.SOURCE_MAPS]:
            self._mapped.look({id_: engine.manifest.source_path(id_) for id_ in large.may_be_led(now)})
        for id_ in large.shown:
            engine.arriving.set_priority(id_, large.priority(id_, now))
        for id_ in ahead:
            copy = engine.copies.path(id_)
            if engine.queue.states.of(id_) is FileState.STORED and (copy in paths or engine.copies.was_read(id_)):
                large.ahead.discard(id_)

    def _read_by_faults(self, id_: int) -> None:
        self._engine.queue.large.read_by_faults(id_, time.monotonic())

    def note_reads_in_order(self, now: float) -> bool:
        """Notes how much programs have read in order of what they read at the source, by what they wrote down. Returns
        whether they read something there."""
        engine, large = self._engine, self._engine.queue.large
        found = large.reads.ids(now)
        for id_ in found:
            large.read_in_order(id_, engine.arriving.in_order(engine.manifest.inodes[id_]))
        return bool(found)

    def are_mapped(self, programs: Callable[[], Iterable[int]]) -> bool:
        """Returns whether processes have files of the datasets mapped, at the source or in the store."""
        return are_mapped_below(programs(), self._roots)


def in_turn(pids: Iterable[int], last: int) -> tuple[int, list[int]]:
    """Chooses the processes to look at next: those that still run and come after `last`, at most MOST_PROCESSES.

    Returns the last of them, and all of them.
    """
    running = sorted(set(pids).intersection(int(name) for name in os.listdir("/proc") if name.isdigit()))
    first = bisect_right(running, last)
    chosen = [*running[first:], *running[:first]][:MOST_PROCESSES]
    return (chosen[-1] if chosen else 0), chosen


def open_below(pids: Iterable[int], roots: Iterable[bytes]) -> set[bytes]:
    """Returns the paths of files below one of `roots` that one of these processes has open or mapped. It passes over
    processes that ended or belong to another user."""
    prefixes = tuple(root.rstrip(b"/") + b"/" for root in roots)
    found: set[bytes] = set()
    for pid in pids:
        for path in (*_descriptors(pid), *_mapped(pid)):
            if path.startswith(prefixes):
                found.add(path.removesuffix(_DELETED))
    return found


def are_mapped_below(pids: Iterable[int], roots: Iterable[bytes]) -> bool:
    """Returns whether one of these processes has a file below one of `roots` mapped."""
    prefixes = tuple(root.rstrip(b"/") + b"/" for root in roots)
    return any(path.startswith(prefixes) for pid in pids for path in _mapped(pid))


def _descriptors(pid: int) -> Iterator[bytes]:
    directory = b"/proc/%d/fd" % pid
    with suppress(OSError):
        for name in os.listdir(directory):
            with suppress(OSError):
                yield os.readlink(directory + b"/" + name)


def _mapped(pid: int) -> Iterator[bytes]:
    with suppress(OSError), open(f"/proc/{pid}/maps", "rb") as file:
        for line in file:
            at = line.find(b"/")
            if at >= 0:
                yield line[at:].rstrip(b"\n")
