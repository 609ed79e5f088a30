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
from collections import Counter
from collections.abc import Callable, Iterator

EVERY_S = 0.05
LONGEST_S = 0.25
"""The longest time that a look stands for, as the daemon may have been busy."""
FIND_EVERY_S = 0.25
MOST_TIME_SHARE = 0.02
"""Looks take at most this share of a processor."""
MOST_PROCESSES = 32
MOST_THREADS = 256
"""The most threads in one look, of all processes together."""
Several = Callable[[], Iterator[tuple[int, str, str]]]


class Looks:
    """Owns the looks at all processes. `several` is `Attached.several`."""

    def __init__(self, several: Several, now: float) -> None:
        self._several = several
        self._found: dict[int, Counter[str]] = {}
        self._at: dict[int, float] = {}
        """When each process was looked at last."""
        self._next = now + FIND_EVERY_S

    def wake_after(self, now: float) -> float:
        """Returns the seconds until the next look."""
        return max(0.0, self._next - now)

    def look(self, now: float) -> None:
        """Looks at all processes if it is time."""
        if now < self._next:
            return
        begin = time.thread_time()
        threads_left, seen = MOST_THREADS, 0
        for pid, call, mapped in self._several():
            seen += 1
            if seen > MOST_PROCESSES or threads_left <= 0:
                break
            states = threads_of(pid, threads_left)
            threads_left -= len(states)
            if states:
                self._add(pid, now, states, call, mapped)
        least_s = EVERY_S if seen else FIND_EVERY_S
        self._next = now + max(least_s, (time.thread_time() - begin) / MOST_TIME_SHARE)

    def _add(self, pid: int, now: float, states: str, call: str, mapped: str) -> None:
        passed_ns = int(min(now - self._at.get(pid, now), LONGEST_S) * 1e9)
        counters = self._found.setdefault(pid, Counter())
        self._at[pid] = now
        counters["looked_ns"] += passed_ns
        rests = "R" not in states
        if call:
            counters[f"look_inside_{call}_ns"] += passed_ns
            counters[f"look_wait_{call}_ns"] += passed_ns * rests
        elif mapped and rests and "D" in states:
            counters[f"look_fault_{mapped}_ns"] += passed_ns

    def of(self, pid: int) -> dict[str, int]:
        """Returns sums over the looks at a process, which stand beside its own counters: how long it was looked at, was
        inside a call, and waited in a call or a page fault. Empty if it was never looked at."""
        return {name: value for name, value in self._found.get(pid, {}).items() if value}

    def forget(self, pid: int) -> None:
        """Forgets a process that has ended, as its pid may be given to another one."""
        self._found.pop(pid, None)
        self._at.pop(pid, None)


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
