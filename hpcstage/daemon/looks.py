"""How processes wait whose counters alone do not tell: looks at their threads, many times a second.

Where one thread of a process reads, the time inside its calls is what the process waited. Where several read, one may
compute while another waits; and a page fault on a mapped file is no call at all. A process waits at the moment of a
look if none of its threads runs, and one is inside a call on a dataset's file, or in a page fault (the kernel's state
D) while files are mapped. Each look stands for the time since the one before.

Owns the looks and their sums. Which processes are looked at is the page's knowledge, what the sums mean the record's.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

EVERY_S = 0.05
LONGEST_S = 0.25
"""A look stands for at most so long: the daemon may have been busy."""
FIND_EVERY_S = 0.25
COST = 50
"""Looks take at most this part of the time."""
MOST_PROCESSES = 32
MOST_THREADS = 256
"""In one look, of all processes together."""
Several = Callable[[], Iterator[tuple[int, bool, bool, bool, bool]]]


@dataclass
class Looked:
    """Sums over the looks at one process, in seconds."""

    looked_s: float = 0.0
    source_s: float = 0.0
    local_s: float = 0.0
    at: float | None = None

    def counters(self) -> dict[str, int]:
        """As they stand beside the process's own counters."""
        names = {"looked_ns": self.looked_s, "look_source_ns": self.source_s, "look_local_ns": self.local_s}
        return {name: int(value * 1e9) for name, value in names.items() if value}


class Looks:
    """`several`: see `Page.several`."""

    def __init__(self, several: Several, now: float) -> None:
        self._several = several
        self._found: dict[int, Looked] = {}
        self._next = now + FIND_EVERY_S

    def wake_after(self, now: float) -> float:
        """Seconds until the next look."""
        return max(0.0, self._next - now)

    def look(self, now: float) -> None:
        """One look at all of them, if it is time."""
        if now < self._next:
            return
        begin = time.monotonic()
        room, seen = MOST_THREADS, 0
        for pid, inside, waits, source_maps, local_maps in self._several():
            seen += 1
            if seen > MOST_PROCESSES or room <= 0:
                break
            states = threads_of(pid, room)
            room -= len(states)
            if states:
                self._add(pid, now, _wait(states, inside, waits, source_maps, local_maps))
        least_s = EVERY_S if seen else FIND_EVERY_S
        self._next = now + max(least_s, COST * (time.monotonic() - begin))

    def _add(self, pid: int, now: float, wait: str) -> None:
        looked = self._found.setdefault(pid, Looked())
        passed_s = 0.0 if looked.at is None else min(now - looked.at, LONGEST_S)
        looked.at = now
        looked.looked_s += passed_s
        looked.source_s += passed_s * (wait == "source")
        looked.local_s += passed_s * (wait == "local")

    def of(self, pid: int) -> dict[str, int]:
        """What was seen of a process."""
        looked = self._found.get(pid)
        return looked.counters() if looked else {}


def _wait(states: str, inside: bool, waits: bool, source_maps: bool, local_maps: bool) -> str:
    """What a process waits for at this moment: `source`, `local` or nothing."""
    if "R" in states:
        return ""
    if inside:
        return "source" if waits else "local"
    if "D" in states:
        return "source" if source_maps else "local" if local_maps else ""
    return ""


def threads_of(pid: int, most: int) -> str:
    """The states of a process's threads, a letter each, up to the first that runs; empty if it is gone."""
    states = ""
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return ""
    for thread in threads[:most]:
        try:
            with open(f"/proc/{pid}/task/{thread}/stat", "rb") as file:
                states += file.read(512).rpartition(b")")[2][1:2].decode("ascii", "replace")
        except OSError:
            continue
        if states[-1:] == "R":
            break
    return states
