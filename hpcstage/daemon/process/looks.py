"""Finds out how long processes wait where their counters do not say: looks at their threads many times a second.

Where one thread of a process reads, the time inside its calls is what the process waited. Where several read, one may
compute while another waits; and a page fault on a mapped file is no call at all. A process waits at the moment of a
look if none of its threads runs, and one is inside a call on a dataset's file, or in a page fault (the kernel's state
D) while files are mapped. Each look stands for the time since the one before.

Owns the looks and their sums. The page says which processes are looked at, the record what the sums mean.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

EVERY_S = 0.05
LONGEST_S = 0.25
"""The longest time that a look stands for, as the daemon may have been busy."""
FIND_EVERY_S = 0.25
MOST_TIME_SHARE = 0.02
"""Looks take at most this share of the time."""
MOST_PROCESSES = 32
MOST_THREADS = 256
"""The most threads in one look, of all processes together."""
Several = Callable[[], Iterator[tuple[int, bool, bool, bool, bool]]]


@dataclass
class Looked:
    """Sums over the looks at one process, in seconds."""

    looked_s: float = 0.0
    inside: dict[str, float] = field(default_factory=dict)
    """By `source` or `local`: the time in which a thread was inside a call, whatever the others did."""
    waited: dict[str, float] = field(default_factory=dict)
    """By `source` or `local`: the time in which the process waited inside a call."""
    faulted: dict[str, float] = field(default_factory=dict)
    """By `source` or `local`: the time in which the process waited in a page fault."""
    at: float | None = None

    def counters(self) -> dict[str, int]:
        """Returns the sums as counters, which stand beside the process's own."""
        sums = {"look_inside": self.inside, "look_wait": self.waited, "look_fault": self.faulted}
        found = {f"{name}_{where}_ns": value for name, sum_s in sums.items() for where, value in sum_s.items()}
        return {name: int(value * 1e9) for name, value in {"looked_ns": self.looked_s, **found}.items() if value}


class Looks:
    """Owns the looks at all processes. `several` is `Attached.several`."""

    def __init__(self, several: Several, now: float) -> None:
        self._several = several
        self._found: dict[int, Looked] = {}
        self._next = now + FIND_EVERY_S

    def wake_after(self, now: float) -> float:
        """Returns the seconds until the next look."""
        return max(0.0, self._next - now)

    def look(self, now: float) -> None:
        """Looks at all processes if it is time."""
        if now < self._next:
            return
        begin = time.monotonic()
        threads_left, seen = MOST_THREADS, 0
        for pid, inside, waits, source_maps, local_maps in self._several():
            seen += 1
            if seen > MOST_PROCESSES or threads_left <= 0:
                break
            states = threads_of(pid, threads_left)
            threads_left -= len(states)
            if states:
                call = ("source" if waits else "local") if inside else ""
                self._add(pid, now, states, call, "source" if source_maps else "local" if local_maps else "")
        least_s = EVERY_S if seen else FIND_EVERY_S
        self._next = now + max(least_s, (time.monotonic() - begin) / MOST_TIME_SHARE)

    def _add(self, pid: int, now: float, states: str, call: str, mapped: str) -> None:
        """Adds a look. `call` says where a thread is inside a call, `mapped` where files are mapped: `source`, `local`
        or empty."""
        looked = self._found.setdefault(pid, Looked())
        passed_s = 0.0 if looked.at is None else min(now - looked.at, LONGEST_S)
        looked.at = now
        looked.looked_s += passed_s
        rests = "R" not in states
        if call:
            looked.inside[call] = looked.inside.get(call, 0.0) + passed_s
            looked.waited[call] = looked.waited.get(call, 0.0) + passed_s * rests
        elif mapped and rests and "D" in states:
            looked.faulted[mapped] = looked.faulted.get(mapped, 0.0) + passed_s

    def of(self, pid: int) -> dict[str, int]:
        """Returns the counters of a process; empty if it was never looked at."""
        looked = self._found.get(pid)
        return looked.counters() if looked else {}

    def forget(self, pid: int) -> None:
        """Forgets a process that has ended, as its pid may be given to another one."""
        self._found.pop(pid, None)


def threads_of(pid: int, most: int) -> str:
    """Returns the states of a process's threads, a letter each, up to the first that runs; empty if it is gone."""
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
