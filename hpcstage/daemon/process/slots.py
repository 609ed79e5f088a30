"""Uses the slots of processes that have ended again where slots run short, and adds up what those processes counted.

This module decides when to look, and which processes have ended. A process that is in another PID namespace, or whose
namespace is not known, keeps its slot. So does one whose log of opens has not been read. A pid that is used again keeps
the slot of its former process until the later one has ended, too; so does a process that runs another program (exec),
which takes another slot. A slot without a pid is not freed: a process is taking it, or was killed meanwhile. When the
daemon dies, slots are not freed any more, and one that it had cleared but not marked as free is lost.

What ended processes counted is one row per layer and parent, so that short-lived workers of a loader stay beside the
process that they worked for; where there are many parents, one per layer. Training processes keep rows of their own.
"""

from __future__ import annotations

import os
import select
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress

from hpcstage.daemon.process.daemonpage import Page
from hpcstage.daemon.process.proc import exists
from hpcstage.protocol.shim import PID_SPACE_FILE
from hpcstage.record.parts.rows import ProcessPart

LOOK_EVERY_S = 1.0
FILL_EVERY_S = 0.1
"""The interval while at least BUSY_SHARE of a layer's slots are in use."""
BUSY_SHARE = 0.25
SHORT_SHARE = 0.5
"""Once this share of a layer's slots is in use, those of ended processes are freed."""
MOST_LOOKS = 512
"""The most processes that one look takes in, in some milliseconds."""
LetGo = Callable[[Sequence[int]], list[int]]
Retire = Callable[[ProcessPart], None]


class SlotReuse:
    """Owns the looks. `let_go` says which slots of ended processes may be freed; `retire` is told of every process
    whose slot is."""

    def __init__(self, page: Page, let_go: LetGo, retire: Retire, started: float) -> None:
        self._table, self._attached = page.slots, page.attached
        self._let_go = let_go
        self._retire = retire
        self._next = started
        self._last = dict.fromkeys(page.slots.ranges, 0)
        self._cleared: list[int] = []
        self._pid_space = _pid_space()

    def wake_after(self, now: float) -> float:
        """Returns the seconds until the next look."""
        return max(0.0, self._next - now)

    def look(self, now: float) -> None:
        """Looks once, if it is time."""
        if now < self._next:
            return
        # These were cleared in the look before, so other processors see the zeros before they see that a slot is free.
        self._table.free(self._cleared)
        self._cleared = []
        shares = [self._table.share_in_use(layer) for layer in self._table.ranges]
        for layer, share in zip(self._table.ranges, shares, strict=True):
            if share >= SHORT_SHARE:
                self._free(layer)
        self._next = time.monotonic() + (FILL_EVERY_S if max(shares) >= BUSY_SHARE or self._cleared else LOOK_EVERY_S)

    def _free(self, layer: range) -> None:
        found = [slot for slot in self._in_turn(layer) if self._has_ended(slot)]
        self._attached.gone.update(found)
        freed = self._let_go(found)
        for slot in freed:
            self._retire(self._attached.take(slot))
        self._cleared += freed

    def _in_turn(self, layer: range) -> list[int]:
        """Returns slots that are in use: at most MOST_LOOKS of them, and the next ones at the next look."""
        used = self._table.in_use(layer)
        later = [slot for slot in used if slot > self._last[layer]]
        chosen = (later + used)[: min(MOST_LOOKS, len(used))]
        self._last[layer] = chosen[-1] if chosen else 0
        return chosen

    def _has_ended(self, slot: int) -> bool:
        pid, pid_space = self._table.process_of(slot)
        return slot in self._attached.gone or (pid_space == self._pid_space != 0 and has_ended(pid))


def has_ended(pid: int) -> bool:
    """Returns whether a process and all its threads have ended; where the kernel tells, also before it is reaped."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    except (OSError, AttributeError):
        return not exists(pid)
    try:
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        return bool(poll.poll(0))
    finally:
        os.close(fd)


def _pid_space() -> int:
    with suppress(OSError):
        return os.stat(PID_SPACE_FILE).st_ino
    return 0


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
