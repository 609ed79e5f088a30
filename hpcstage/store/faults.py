"""Tells whether threads wait in page faults: for a page of a mapped file, which the source has to give.

The kernel says that such a thread waits and is not to be woken (state D). So it says of one that waits in a call on any
other disk, which is taken for the same.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from itertools import islice

LOOK_EVERY_S, MOST_TIME_SHARE = 0.002, 0.1
"""The interval at which threads are looked at, and the most of the time that this may take."""
LIST_EVERY_S = 0.25
"""The interval at which it is looked which threads there are."""
MOST_THREADS = 64


class PageFaults:
    """Looks at the threads of some processes."""

    def __init__(self, pids: Callable[[], Iterable[int]]) -> None:
        self._pids = pids
        self._threads: list[str] = []
        self._found = False
        self._look_at = self._list_at = 0.0

    def any(self) -> bool:
        """Returns whether a thread waits, as it was seen at most LOOK_EVERY_S ago."""
        began = time.monotonic()
        if began >= self._list_at:
            self._threads = [*islice(_threads(self._pids()), MOST_THREADS)]
            self._list_at = began + LIST_EVERY_S
        if began >= self._look_at:
            self._found = any(map(_waits, self._threads))
            after = time.monotonic()
            self._look_at = after + max(LOOK_EVERY_S, (after - began) / MOST_TIME_SHARE)
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
