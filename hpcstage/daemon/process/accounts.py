"""Sums what the processes of the command read, by the kernel's own counters, and how much of it is accounted for.

The kernel adds what a process read to its parent when the parent reaps it, so the command's counter at its end holds
all of its descendants: Python or not, however short their lives. What attached processes read of it is accounted
for: by looks at them, by what they tell at an orderly end, and by what they counted of the datasets. The rest was read
by processes that hpcstage did not see, from files of any kind.

Owns the sums. The kernel's counters do not contain what is read from mapped files.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING

from hpcstage.procio import read_bytes
from hpcstage.protocol.shim import READ_UNKNOWN
from hpcstage.record.parts.rows import ProcessPart

if TYPE_CHECKING:
    from hpcstage.record.parts.part import AccountsPart

MOST_THREADS = 128
"""The most threads in one look, of all processes together: a look takes a millisecond or two."""
_OWN = "own_read_bytes"


class Accounts:
    """Owns the sums of one node."""

    def __init__(self) -> None:
        self._own: dict[int, int] = {}
        self._retired: Counter[int] = Counter()
        """Pid → what processes counted that have ended and are not told apart any more."""
        self._told = 0
        """How many of these told at their end what they had read themselves."""
        self._next = 0
        self._command: int | None = 0
        self._ended = 0

    def ended(self, read_bytes: int) -> None:
        """Adds what a wrapper's command, which has ended, read with all of its descendants."""
        self._ended += 1
        unknown = read_bytes == READ_UNKNOWN or self._command is None
        self._command = None if unknown else (self._command or 0) + read_bytes

    @property
    def own_bytes(self) -> int:
        """Returns the bytes that attached processes have read themselves, as far as the last looks have shown."""
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
        read = sum(read_bytes(f"/proc/{pid}/task/{thread}/io") or 0 for thread in threads)
        self._own[pid] = max(self._own.get(pid, 0), read)
        return len(threads)

    def retired(self, process: ProcessPart) -> None:
        """Notes that a process has ended and is not told apart any more."""
        self._take(process)
        self._told += process.processes if _OWN in process.counters else 0
        if process.pid in self._own:
            self._retired[process.pid] += _seen(process)

    def sums(self, processes: Iterable[ProcessPart], unattached: int) -> AccountsPart | None:
        """Returns the sums for the record; None where the command's counter is not known. `unattached` is the number of
        processes that were seen and never attached."""
        from hpcstage.record.parts.part import AccountsPart

        if not self._ended or self._command is None:
            return None
        found = list(processes)
        seen = self._retired.copy()
        for process in found:
            self._take(process)
            seen[process.pid] += _seen(process)
        besides = sum(max(0, read - seen[pid]) for pid, read in self._own.items())
        accounted = sum(map(_seen, found)) + besides
        return AccountsPart(
            command_bytes=self._command,
            accounted_bytes=accounted,
            attached=sum(p.processes for p in found),
            told=self._told + sum(p.processes for p in found if p.pid and _OWN in p.counters),
            unattached=unattached,
        )

    def _take(self, process: ProcessPart) -> None:
        """Takes what a process told at its end; it may have read more since the last look."""
        if process.pid and (read := process.counters.get(_OWN, 0)):
            self._own[process.pid] = max(self._own.get(process.pid, 0), read)


def _seen(process: ProcessPart) -> int:
    return process.counters.get("local_read_bytes", 0) + process.counters.get("source_read_bytes", 0)
