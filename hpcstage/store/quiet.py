"""Tells a copier for how long programs have left the source alone, so that a copy can be made while they compute.

The page holds that for each process: the word BLOCKED_SOURCE_NS is the time that its threads have spent in calls that
the source answers, and is negative while one is in such a call. A page fault is no call: it is looked for where
programs have files of the source mapped. The kernel says that a thread in one waits and is not to be woken (state D),
as it says of a thread in a call on any other disk, which is taken for the same.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path

from hpcstage.protocol.shim import (
    COUNTERS_OFFSET,
    NEXT_NATIVE_OFFSET,
    PAGE_BYTES,
    PAGE_HEADER_BYTES,
    PYTHON_SLOTS_FROM,
    SLOT_BYTES,
    Counter,
)

FAULTS_EVERY_S, MOST_TIME_SHARE = 0.002, 0.1
"""The interval at which threads are looked at, and the most of the time that this may take."""
LIST_EVERY_S = 0.25
"""The interval at which it is looked which threads there are."""
MOST_THREADS = 64
_U32 = struct.Struct("<I")
_I64 = struct.Struct("<q")
_BLOCKED = PAGE_HEADER_BYTES + COUNTERS_OFFSET + 8 * Counter.BLOCKED_SOURCE_NS
_MAPS = PAGE_HEADER_BYTES + COUNTERS_OFFSET + 8 * Counter.SOURCE_MAPS


class PageFaults:
    """Looks at the threads of some processes."""

    def __init__(self, pids: Callable[[], Iterable[int]]) -> None:
        self._pids = pids
        self._threads: list[str] = []
        self._found = False
        self._look_at = self._list_at = 0.0

    def any(self) -> bool:
        """Returns whether a thread waits, as it was seen at most FAULTS_EVERY_S ago."""
        began = time.monotonic()
        if began >= self._list_at:
            self._threads = [*islice(_threads(self._pids()), MOST_THREADS)]
            self._list_at = began + LIST_EVERY_S
        if began >= self._look_at:
            self._found = any(map(_waits, self._threads))
            after = time.monotonic()
            self._look_at = after + max(FAULTS_EVERY_S, (after - began) / MOST_TIME_SHARE)
        return self._found


def _threads(pids: Iterable[int]) -> Iterator[str]:
    """Yields the files that tell the states of the threads: of all processes the first one, then the others."""
    pids = list(pids)
    yield from (f"/proc/{pid}/task/{pid}/stat" for pid in pids)
    for pid in pids:
        with suppress(OSError):
            yield from (f"/proc/{pid}/task/{name}/stat" for name in os.listdir(f"/proc/{pid}/task") if name != str(pid))


def _waits(thread: str) -> bool:
    try:
        fd = os.open(thread, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        return os.read(fd, 512).rpartition(b")")[2][1:2] == b"D"
    except OSError:
        return False
    finally:
        os.close(fd)


class Quiet:
    """Looks at the processes with the native layer."""

    def __init__(self, page: Path) -> None:
        fd = os.open(page, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            self._map = mmap.mmap(fd, PAGE_BYTES, prot=mmap.PROT_READ)
        finally:
            os.close(fd)
        self._faults = PageFaults(self._mapping)
        self._at = time.monotonic_ns()
        self._blocked_ns: list[int] = []
        self.quiet_ns = 0
        """How long no program was in such a call or in a page fault, as far as was looked."""

    def look(self) -> bool:
        """Returns whether no program is in such a call now, or in a page fault."""
        words, now = self._words(_BLOCKED), time.monotonic_ns()
        blocked_ns = [word if word >= 0 else now + word for word in words]
        before = self._blocked_ns + [0] * (len(words) - len(self._blocked_ns))
        busy_ns = sum(max(0, ns - was) for ns, was in zip(blocked_ns, before, strict=False))
        faults = self._faults.any()
        if not faults:
            self.quiet_ns += max(0, now - self._at - busy_ns)
        self._at, self._blocked_ns = now, blocked_ns
        return not faults and all(word >= 0 for word in words)

    def _words(self, at: int) -> list[int]:
        slots = min(_U32.unpack_from(self._map, NEXT_NATIVE_OFFSET)[0], PYTHON_SLOTS_FROM)
        return [_I64.unpack_from(self._map, at + slot * SLOT_BYTES)[0] for slot in range(slots)]

    def _mapping(self) -> list[int]:
        """Returns the pids of all processes if one of them has mapped files of the source: those that it forked have
        its mappings."""
        if not any(self._words(_MAPS)):
            return []
        return [pid for word in self._words(PAGE_HEADER_BYTES) if (pid := word & 0xFFFF_FFFF)]
