"""Finds the files below some directories that processes have open or mapped, from /proc, whatever program opened
them."""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress

from hpcstage.daemon.copying.engine import Engine
from hpcstage.daemon.copying.mapped import MappedReads
from hpcstage.forked import Helpers
from hpcstage.plan.blocks import LARGE_BYTES
from hpcstage.plan.rule import MAPPED_SHARE
from hpcstage.protocol.shim import Counter

MOST_PROCESSES = 64
"""The most processes that one look takes in, in some ten milliseconds."""
_DELETED = b" (deleted)"


class LargeInUse:
    """Looks which large files programs have open at the source; see `queue.large`."""

    def __init__(self, engine: Engine, helpers: Helpers) -> None:
        self._engine = engine
        self._mapped = MappedReads(helpers, MAPPED_SHARE, self._read_by_faults)
        self._roots = [engine.copies.store.root, *(dataset.root for dataset in engine.manifest.datasets)]
        self._last = 0
        """The pid of the process that was looked at last."""
        self._may_be_large = max(engine.manifest.sizes, default=0) > LARGE_BYTES

    def look(self, programs: Callable[[], Iterable[int]], sums: Sequence[int], now: float) -> None:
        """Finds the large files that these processes have open, at the source and in the store. `sums` are the counters
        of all attached processes. Who has both open reads the copy: the source's open file is only kept."""
        engine, large = self._engine, self._engine.queue.large
        if engine.queue.settled or not self._may_be_large:
            return
        self._last, pids = in_turn(programs(), self._last)
        paths = open_below(pids, self._roots)
        ids = map(engine.manifest.find_source, paths)
        for id_ in {*ids} - {None}:
            if id_ is not None and large.is_large(id_) and engine.copies.path(id_) not in paths:
                large.reads.here(id_, now)
        if sums[Counter.SOURCE_MAPS]:
            self._mapped.look({id_: engine.manifest.source_path(id_) for id_ in large.may_be_mapped(now)})

    def _read_by_faults(self, id_: int) -> None:
        """Notes that much of a file was read in page faults: it is taken for all, as what the copier reads is in the
        page cache, too."""
        self._engine.arriving.set_faults(id_, self._engine.manifest.size(id_))

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
