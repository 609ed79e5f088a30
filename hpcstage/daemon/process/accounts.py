"""What the processes of the command read, by the kernel's own counters, and how much of it is accounted for.

The kernel adds what a process read to its parent when the parent reaps it, so the command's counter at its end holds
all of its descendants: Python or not, however short their lives. Of that, what attached processes read is accounted
for. The rest was read by processes that hpcstage did not see, from files of any kind.

Owns the sums. Files that are mapped into memory do not count as read.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

from hpcstage.procio import read_bytes
from hpcstage.protocol.shim import READ_UNKNOWN
from hpcstage.record.parts.part import ProcessPart

MOST_THREADS = 128
"""In one look, of all processes together: a look takes a millisecond or two."""


class Accounts:
    """Of one node."""

    def __init__(self) -> None:
        self._own: dict[int, int] = {}
        self._next = 0
        self._command: int | None = 0
        self._ended = 0

    def ended(self, read_bytes: int) -> None:
        """A wrapper's command has ended, and read so much with all of its descendants."""
        self._ended += 1
        unknown = read_bytes == READ_UNKNOWN or self._command is None
        self._command = None if unknown else (self._command or 0) + read_bytes

    @property
    def own_bytes(self) -> int:
        """What attached processes have read themselves, as far as it was looked at."""
        return sum(self._own.values())

    def look(self, pids: Iterable[int]) -> None:
        """What attached processes have read themselves so far; of many processes some, and the next ones next time."""
        found = sorted(pids)
        room = MOST_THREADS
        for _ in range(len(found)):
            if room <= 0:
                break
            pid = found[self._next % len(found)]
            self._next += 1
            room -= self._one(pid, room)

    def _one(self, pid: int, most: int) -> int:
        """Its living threads only: its process-wide counter holds what its reaped children read, too."""
        try:
            threads = os.listdir(f"/proc/{pid}/task")[:most]
        except OSError:
            return 1
        read = sum(read_bytes(f"/proc/{pid}/task/{thread}/io") or 0 for thread in threads)
        self._own[pid] = max(self._own.get(pid, 0), read)
        return len(threads)

    def to_json(self, processes: Iterable[ProcessPart]) -> dict[str, int]:
        """Empty where the command's counter is not known."""
        if not self._ended or self._command is None:
            return {}
        found = list(processes)
        accounted = sum(max(self._own.get(p.pid, 0), _seen(p)) for p in found)
        return {"command_bytes": self._command, "accounted_bytes": accounted, "attached": len(found)}


def _seen(process: ProcessPart) -> int:
    return process.counters.get("local_read_bytes", 0) + process.counters.get("source_read_bytes", 0)
