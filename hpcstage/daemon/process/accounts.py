"""Sums what attached processes read, by the kernel's own counters: looks at them, and what they tell at an orderly end.

Owns the sum. The kernel's counters do not contain what is read from mapped files.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

from hpcstage.procio import read_bytes
from hpcstage.record.parts.rows import ProcessPart

MOST_THREADS = 128
"""The most threads in one look, of all processes together: a look takes a millisecond or two."""


class Accounts:
    """Owns what each process has read itself."""

    def __init__(self) -> None:
        self._own: dict[int, int] = {}
        self._next = 0

    @property
    def own_bytes(self) -> int:
        """Returns the bytes that attached processes have read themselves, as far as is known."""
        return sum(self._own.values())

    def look(self, pids: Iterable[int]) -> None:
        """Reads what attached processes have read themselves so far; if they are many, some now and others at the next
        look."""
        found = sorted(pids)
        threads_left = MOST_THREADS
        for _ in range(len(found)):
            if threads_left <= 0:
                break
            pid = found[self._next % len(found)]
            self._next += 1
            threads_left -= self._one(pid, threads_left)

    def _one(self, pid: int, most: int) -> int:
        """Looks at the living threads of a process only, since its process-wide counter also holds what its reaped
        children read. Returns the number of threads."""
        try:
            threads = os.listdir(f"/proc/{pid}/task")[:most]
        except OSError:
            return 1
        self._note(pid, sum(read_bytes(f"/proc/{pid}/task/{thread}/io") or 0 for thread in threads))
        return len(threads)

    def told(self, processes: Iterable[ProcessPart]) -> None:
        """Takes what processes told at their ends; they may have read more since the last look."""
        for process in processes:
            if process.pid and (read := process.counters.get("own_read_bytes", 0)):
                self._note(process.pid, read)

    def _note(self, pid: int, read: int) -> None:
        self._own[pid] = max(self._own.get(pid, 0), read)
