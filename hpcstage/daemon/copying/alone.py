"""Measures what the source gives to one reader alone: by a few transfers at the start and a few opens at the end.

A program without staging reads with one or a few readers; copiers read with dozens, so that their times contain their
own queue. Therefore the first transfers go one at a time, for a moment, and their times are kept apart. The scan had
just looked up their names, which makes an open cheaper: after the last transfer, once the kernel has forgotten what it
knew, a few files are opened once more (nothing of them is read), and the kernel is asked whether it still has their
pages.

Owns both measurements. The record draws the conclusions.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import mmap
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from hpcstage.daemon.process.helpers import Helpers
from hpcstage.store.copyfile import DROP_BYTES, Status
from hpcstage.store.messages import Result

if TYPE_CHECKING:
    from hpcstage.record.parts.part import AlonePart

LEAST_FILES = 8
LEAST_S = 0.03
MOST_S = 0.3
"""Files are copied one at a time until there are LEAST_FILES and LEAST_S has passed; at most for MOST_S from the end of
the first one on."""
FIRST_S = 0.6
"""The longest that the first one may take: the copiers are just starting."""
FORGOTTEN_S = 1.5
"""A client of a network file system has forgotten a name by then; about a second is usual."""
MOST_REOPENED = 5
OPENING_S = 1.0
HELPER = "alone"


class Alone:
    """Lets the first transfers go one at a time and owns their times. Pure: callers pass `now`."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self._results: list[Result] = []
        self.last: float | None = None
        """The time at which the last of them ended."""
        self._began: float | None = None
        self._first: float | None = None
        """The time at which the first of them ended."""
        self._over = False

    def may_begin(self, free: int, assigned: int, now: float) -> int:
        """Returns how many of the `free` transfers may begin."""
        if self._began is None:
            self._began = now
        if now >= self._end(self._began):
            self._over = True
        if self._over or free <= 0:
            return free
        return 0 if assigned else 1

    def took(self, result: Result, now: float) -> None:
        """Takes the times of a transfer that ended."""
        if self._over or self._began is None or result.status is not Status.OK:
            return
        self.ids.append(result.id)
        self.last = now
        self._results.append(result)
        self._first = now if self._first is None else self._first
        self._over = len(self._results) >= LEAST_FILES and now - self._began >= LEAST_S

    def _end(self, began: float) -> float:
        return began + FIRST_S if self._first is None else self._first + MOST_S

    def wake_after(self, now: float) -> float | None:
        """Returns the seconds until more may begin by the clock; None once the measurement is over."""
        return None if self._over or self._began is None else max(0.0, self._end(self._began) - now)

    def record(self) -> AlonePart:
        """Returns sums as if all transfers had been typical: one may be slow because the machine did something else."""
        from hpcstage.record.parts.part import AlonePart

        if not self._results:
            return AlonePart()
        results = self._results
        reads = sorted(results, key=lambda r: r.read_ns / max(r.size_bytes, 1))
        usual = reads[: max(1, len(reads) - 1)]
        read_ns = sum(r.read_ns for r in usual) * len(results) / len(usual)
        open_ns = statistics.median(r.open_ns for r in results) * len(results)
        return AlonePart(files=len(results), open_ns=round(open_ns), read_ns=round(read_ns))


class Reopened:
    """Opens a few files once the last transfer is long enough ago, and owns what that measured."""

    def __init__(self, helpers: Helpers) -> None:
        self.files: int | None = None
        """The number of files that were opened."""
        self._cold_open_ns: int | None = None
        self._cached_share: float | None = None
        self._helpers = helpers
        self._started = False

    def look(self, now: float, alone: Alone, paths: Callable[[Sequence[int]], Sequence[bytes]]) -> None:
        """Starts the opens if it is time; called now and then once all is staged. `paths` returns paths by ids."""
        if self._started or alone.last is None or now - alone.last < FORGOTTEN_S:
            return
        self._started = True
        chosen = paths(alone.ids)
        self._helpers.start(HELPER, lambda: reopen(chosen), self._ended)

    def _ended(self, answer: bytes | None) -> None:
        with contextlib.suppress(ValueError, TypeError):
            self.files, self._cold_open_ns, self._cached_share = json.loads(answer or b"")

    def record(self, alone: AlonePart) -> AlonePart:
        """Returns the part of the record on single transfers with what the opens took."""
        return replace(alone, cold_open_ns=self._cold_open_ns, kept_share=self._cached_share)


def reopen(paths: Sequence[bytes]) -> bytes:
    """Opens files. Returns in JSON how many, the ns that an open took and the share of their pages in memory; null
    where these are not known. Runs in a helper, since the source may hang."""
    opened, cached = [], []
    end = time.monotonic() + OPENING_S
    for path in paths[:MOST_REOPENED]:
        with contextlib.suppress(OSError):
            begin_ns = time.monotonic_ns()
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            opened.append(time.monotonic_ns() - begin_ns)
            try:
                share = resident(fd)
            finally:
                os.close(fd)
            if share is not None:
                cached.append(share)
        if time.monotonic() > end:
            break
    cold_open_ns = sorted(opened)[len(opened) // 4] if opened else None  # a busy machine makes some of them slow
    return json.dumps([len(opened), cold_open_ns, statistics.median(cached) if cached else None]).encode()


def resident(fd: int) -> float | None:
    """Returns the share of a file's pages that are in memory; None where the kernel would not tell, or the copiers
    dropped them."""
    status = os.fstat(fd)
    if not 0 < status.st_size < DROP_BYTES or os.geteuid() not in (0, status.st_uid):
        return None
    pages = -(-status.st_size // mmap.PAGESIZE)
    flags = (ctypes.c_ubyte * pages)()
    with mmap.mmap(fd, status.st_size, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE) as mapped:
        first = ctypes.c_char.from_buffer(mapped)
        failed = ctypes.CDLL(None).mincore(ctypes.byref(first), ctypes.c_size_t(status.st_size), flags)
        del first
    return None if failed else sum(flag & 1 for flag in flags) / pages
