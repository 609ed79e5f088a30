"""Keeps the names that may have to be carried over, and when each is due. It is pure: it is told the time.

Owns the times: how long after an event a name is carried, how long a name rests after it was carried, and how the
tries after an error are spaced.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from hpcstage.outputs.names import Names

CLOSED_S = 0.05
"""A closed file is carried this long after; the times of files advance in steps of up to 10 ms, so a file that is
written again gets another time."""
OPEN_S = 2.0
"""A file that stays open is carried this long after the first write that was not carried."""
REST_S = 1.0
REST_SHARE = 10
"""A name rests for at least REST_S, and for REST_SHARE times as long as its last drain took."""
MOST_REST_S = 300.0
RETRY_S, MOST_RETRY_S = 1.0, 60.0
BLOCKED_S = 0.05
"""A name that waits for another one is asked for again this much later: there may be a hundred thousand."""


@dataclass
class Mark:
    """A name that may have to be carried over."""

    seq: int
    due: float
    is_written: bool = False
    is_open: bool = False
    tries: int = 0
    why: str = ""
    """The reason why the last try failed."""


class Marks:
    """Owns the marks, by name, and their order in time."""

    def __init__(self) -> None:
        self.by_name = Names[Mark]()
        self._heap: list[tuple[float, int, str]] = []
        self._rests: dict[str, float] = {}
        self._seq = 0

    def next_seq(self) -> int:
        """Returns a number that is larger than that of all marks until now."""
        self._seq += 1
        return self._seq

    def add(self, name: str, due: float, *, is_written: bool = False, is_open: bool | None = None) -> None:
        """Marks a name, or adds to its mark; an earlier time stays. `is_open` None leaves what is known."""
        due = max(due, self._rests.get(name, 0.0))
        mark = self.by_name.get(name)
        if mark is None:
            self.put(name, Mark(self.next_seq(), due, is_written, bool(is_open)))
            return
        mark.is_written |= is_written
        was_open = mark.is_open
        mark.is_open = was_open if is_open is None else is_open
        if due < mark.due and not mark.tries:
            mark.due = due
            heapq.heappush(self._heap, (mark.due, mark.seq, name))

    def put(self, name: str, mark: Mark) -> None:
        """Puts a mark in the place of the name's."""
        self.by_name[name] = mark
        heapq.heappush(self._heap, (mark.due, mark.seq, name))

    def retry(self, name: str, mark: Mark, now: float, why: str) -> None:
        """Puts a mark back after a try that failed, for later; one that came meanwhile is added to it."""
        newer = self.by_name.get(name)
        due = now + min(MOST_RETRY_S, RETRY_S * 2.0**mark.tries)
        is_open = mark.is_open if newer is None else newer.is_open
        self.put(name, Mark(self.next_seq(), due, True, is_open, mark.tries + 1, why))

    def rest(self, name: str, now: float, took_s: float) -> None:
        """Notes that a name was carried, which took so long."""
        if len(self._rests) > 1024:
            self._rests = {other: until for other, until in self._rests.items() if until > now}
        self._rests[name] = now + min(MOST_REST_S, max(REST_S, REST_SHARE * took_s))

    def hurry(self, now: float) -> None:
        """Makes all marks due, as at the end of a run; names rest no more."""
        self._rests.clear()
        self._heap = []
        for name, mark in self.by_name.items():
            mark.due = min(mark.due, now)
            self._heap.append((mark.due, mark.seq, name))
        heapq.heapify(self._heap)

    def take_due(self, now: float, is_blocked: Callable[[str], bool], most: int) -> Iterator[tuple[str, Mark]]:
        """Takes marks that are due, the earliest first, except those of blocked names."""
        blocked = []
        while most and self._heap and self._heap[0][0] <= now:
            due, seq, name = heapq.heappop(self._heap)
            mark = self.by_name.get(name)
            if mark is None or (mark.due, mark.seq) != (due, seq):
                continue
            if is_blocked(name):
                blocked.append(name)
                continue
            del self.by_name[name]
            most -= 1
            yield name, mark
        for name in blocked:
            self.by_name[name].due = now + BLOCKED_S
            self.put(name, self.by_name[name])

    def next_due(self) -> float | None:
        """Returns the time of the earliest mark; None if there is none."""
        while self._heap:
            due, seq, name = self._heap[0]
            mark = self.by_name.get(name)
            if mark is not None and (mark.due, mark.seq) == (due, seq):
                return due
            heapq.heappop(self._heap)
        return None

    def drop(self, name: str, *, is_dir: bool) -> None:
        """Forgets a name and, if it is a directory, what is below it."""
        self.by_name.pop(name, None)
        if is_dir:
            for below in self.by_name.below(name):
                del self.by_name[below]

    def rename(self, old: str, new: str, *, is_dir: bool) -> None:
        """Renames a name and, if it is a directory, what is below it."""
        moved = self.by_name.below(old) if is_dir else [old]
        for name in filter(self.by_name.__contains__, moved):
            self.put(new + name[len(old) :], self.by_name.pop(name))

    def oldest_waiting(self) -> int | None:
        """Returns the least number of the marks that will be carried soon: neither failing nor of open files."""
        waiting = (mark.seq for mark in self.by_name.values() if not mark.tries and not mark.is_open)
        return min(waiting, default=None)
