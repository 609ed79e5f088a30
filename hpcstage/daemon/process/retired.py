"""Adds up what processes counted that have ended and whose slots are used again: many make few rows.

There is one row per layer and parent, so that short-lived workers of a loader stay beside the process that they worked
for; where there are many parents, one per layer. Training processes keep rows of their own.
"""

from __future__ import annotations

from collections import Counter

from hpcstage.record.parts.rows import ProcessPart

MOST_PARENTS = 64
MOST_TRAINERS = 64
LARGEST = ("exit_ns", "last_ns", "loader_last_ns", "loader_workers", "readers")
EARLIEST = ("attach_ns", "loader_first_ns")
LEAST = ("reads_measured",)


class Retired:
    """Owns the rows."""

    def __init__(self) -> None:
        self._trainers: list[ProcessPart] = []
        self._sums: dict[tuple[str, int], ProcessPart] = {}

    def tells_apart(self, part: ProcessPart) -> bool:
        """Returns whether a process gets a row of its own."""
        return bool(part.counters.get("loader_steps")) and len(self._trainers) < MOST_TRAINERS

    def add(self, part: ProcessPart) -> None:
        """Adds a process that has ended."""
        if self.tells_apart(part):
            self._trainers.append(part)
            return
        key = part.layer, part.parent_pid
        if key not in self._sums and len(self._sums) >= MOST_PARENTS:
            key = part.layer, 0
        _lives(part)
        if key in self._sums:
            _join(self._sums[key], part)
        else:
            part.pid, part.parent_pid = 0, key[1]
            self._sums[key] = part

    def rows(self) -> list[ProcessPart]:
        """Returns rows for all that were added."""
        return [*self._trainers, *self._sums.values()]


def _lives(part: ProcessPart) -> None:
    """Notes how long it lived: this cannot be told of a sum."""
    counters = part.counters
    end_ns = counters.get("exit_ns") or counters.get("last_ns", 0)
    counters["life_ns"] = max(0, end_ns - counters.get("attach_ns", end_ns))


def _join(row: ProcessPart, part: ProcessPart) -> None:
    """Adds a process to a row."""
    mine, other = row.counters, part.counters
    for name in mine.keys() | other.keys():
        values = mine.get(name, 0), other.get(name, 0)
        if name in EARLIEST:
            mine[name] = min(filter(None, values), default=0)
        elif name in LARGEST:
            mine[name] = max(values)
        else:
            mine[name] = min(values) if name in LEAST else sum(values)
    row.processes += part.processes
    row.hist_open = dict(Counter(row.hist_open) + Counter(part.hist_open))
    row.hist_read = dict(Counter(row.hist_read) + Counter(part.hist_read))
