"""Uses the shared page for the daemon: sets the state, gives out slots of the python layer, reads all slots."""

from __future__ import annotations

import mmap
import os
import struct
import time
from collections.abc import Iterator
from pathlib import Path

from hpcstage.protocol.shim import (
    CAUGHT_UP,
    CLOSED,
    COUNTERS,
    COUNTERS_OFFSET,
    DEVICE_OFFSET,
    FREE_OFFSET,
    GATE_OFFSET,
    GIVEN_UP,
    HELD,
    HIST_BUCKETS,
    HIST_OPEN_OFFSET,
    HIST_READ_OFFSET,
    LINKED_OFFSET,
    LOGGING_OFFSET,
    NEXT_NATIVE_OFFSET,
    PAGE_BYTES,
    PAGE_HEADER_BYTES,
    PID_SPACE_OFFSET,
    PYTHON_SLOTS_FROM,
    SLOT_BYTES,
    SLOT_FREE,
    SLOT_HEAD,
    SLOTS,
    STATE_OFFSET,
    UNLINKED,
    Counter,
    Layer,
    Reason,
    State,
)
from hpcstage.record.parts.rows import UNCOUNTED_LAYER, ProcessPart

_NEXT_PYTHON_OFFSET = NEXT_NATIVE_OFFSET + 4
_PID_OFFSET = NEXT_NATIVE_OFFSET + 8
_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")
_NEGATIVE = 1 << 63
_COUNTERS = struct.Struct(f"<{COUNTERS}Q")
_HIST = struct.Struct(f"<{HIST_BUCKETS}I")
_NAMES = {int(c): c.name.lower() for c in Counter if c is not Counter.DIRECT_BASE} | {
    Counter.DIRECT_BASE + reason: f"direct_{reason.name.lower()}" for reason in Reason
}


class Page:
    """Owns the daemon's mapping of the page. Raises OSError or ValueError if there is no page of the right size."""

    def __init__(self, path: Path) -> None:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            self._map = mmap.mmap(fd, PAGE_BYTES)
        finally:
            os.close(fd)
        self._put(_PID_OFFSET, os.getpid())
        self.gone: set[int] = set()
        """Slots whose processes were found to have ended, in whatever way."""
        self._retired = 0
        self._retired_sums = [0] * COUNTERS

    def set_state(self, state: State) -> None:
        """Sets the state that shims read."""
        self._put(STATE_OFFSET, state)

    @property
    def state(self) -> State:
        """The state that shims see now."""
        return State(self._get(STATE_OFFSET))

    def set_logging(self, logging: bool) -> None:
        """Sets whether processes log what they open (see `opens`)."""
        self._put(LOGGING_OFFSET, int(logging))

    # ---- the gate

    @property
    def behind(self) -> int | None:
        """The value to give to `catch_up` once the daemon has read all that had been sent before; None if no program
        gave up waiting for an answer since the last `catch_up`."""
        given_up = self._gate(GIVEN_UP)
        return given_up if given_up != self._gate(CAUGHT_UP) else None

    def catch_up(self, given_up: int) -> None:
        """Notes that the daemon has read all that had been sent when it read `behind`."""
        self._put(GATE_OFFSET + 4 * CAUGHT_UP, given_up)

    def close(self) -> None:
        """Makes programs open no copy ever again, since a stale one may be visible."""
        self._put(GATE_OFFSET + 4 * CLOSED, 1)

    @property
    def is_closed(self) -> bool:
        """Whether no copy is ever opened again. Programs may close it, too."""
        return bool(self._gate(CLOSED))

    def hold(self, transfers: int) -> None:
        """Sets the number of transfers of files that were written to and that may still be published; programs open no
        copy while there are any."""
        self._put(GATE_OFFSET + 4 * HELD, transfers)

    def set_device(self, device: int) -> None:
        """Tells programs that all files of the datasets are on this device."""
        _U64.pack_into(self._map, DEVICE_OFFSET, device)

    def set_unlinked(self) -> None:
        """Tells programs that no file of the datasets is a symbolic link or behind one."""
        self._put(LINKED_OFFSET, UNLINKED)

    def _gate(self, word: int) -> int:
        return self._get(GATE_OFFSET + 4 * word)

    def ended(self, slot: int) -> bool:
        """Returns whether a slot's process is known to have ended, or ends in an orderly way."""
        at = _at(slot) + COUNTERS_OFFSET
        return slot < SLOTS and (slot in self.gone or _COUNTERS.unpack_from(self._map, at)[Counter.EXIT_NS] != 0)

    # ---- slots that are used again

    ranges = range(1, PYTHON_SLOTS_FROM), range(PYTHON_SLOTS_FROM, SLOTS)
    """The slots of the native layer, and those of the Python layer."""

    def share_in_use(self, layer: range) -> float:
        """Returns the share of a range that processes have taken and that is not free again."""
        given = self._given(layer)
        free = self._map[FREE_OFFSET + given.start : FREE_OFFSET + given.stop].count(SLOT_FREE)
        return (len(given) - free) / len(layer)

    def in_use(self, layer: range) -> list[int]:
        """Returns the slots of a range that have a process."""
        return [slot for slot in self._given(layer) if _U32.unpack_from(self._map, _at(slot))[0]]

    def process_of(self, slot: int) -> tuple[int, int]:
        """Returns the pid of a slot's process, and its PID namespace; 0: not known."""
        at = _at(slot)
        return _U32.unpack_from(self._map, at)[0], _U64.unpack_from(self._map, at + PID_SPACE_OFFSET)[0]

    def take(self, slot: int, started_monotonic_s: float) -> ProcessPart:
        """Returns what the ended process of a slot had counted. The slot is zeros then, and can be freed."""
        at = _at(slot)
        part = self._process(at, started_monotonic_s)
        row = _finished(_COUNTERS.unpack_from(self._map, at + COUNTERS_OFFSET), time.monotonic_ns())
        self._retired_sums = [sum(pair) for pair in zip(self._retired_sums, row, strict=True)]
        self._retired += 1
        self._map[at : at + SLOT_BYTES] = bytes(SLOT_BYTES)
        self.gone.discard(slot)
        return part

    def free(self, slots: list[int]) -> None:
        """Lets other processes take these slots, which `take` has cleared."""
        for slot in slots:
            self._map[FREE_OFFSET + slot] = SLOT_FREE

    def _given(self, layer: range) -> range:
        offset = NEXT_NATIVE_OFFSET if layer.start < PYTHON_SLOTS_FROM else _NEXT_PYTHON_OFFSET
        return range(layer.start, max(layer.start, min(self._get(offset), layer.stop)))

    def allot_python_slot(self) -> int:
        """Returns a slot for a process of the python layer; 0, the shared one, when none is left."""
        slot = self._get(_NEXT_PYTHON_OFFSET)
        if slot >= SLOTS:
            return 0
        self._put(_NEXT_PYTHON_OFFSET, slot + 1)
        return slot

    def sums(self) -> list[int]:
        """Returns the counters summed over all processes, ended ones included."""
        now_ns = time.monotonic_ns()
        rows = [_finished(_COUNTERS.unpack_from(self._map, at + COUNTERS_OFFSET), now_ns) for at in self._used()]
        return [sum(column) for column in zip(self._retired_sums, *rows, strict=True)]

    def attached(self) -> int:
        """Returns how many processes attached and count."""
        return self._retired + len(self.pids()) + self._sharers()

    def several(self) -> Iterator[tuple[int, bool, bool, bool, bool]]:
        """Yields the living processes whose waits do not follow from the counters alone: those in which several threads
        read at once, and those that map files.

        For each it yields the pid, whether a thread is inside a call on a dataset's file now, whether one waits for the
        source there, whether files of the source are mapped, and whether copies are.
        """
        for at in self._used():
            pid = _U32.unpack_from(self._map, at)[0]
            values = _COUNTERS.unpack_from(self._map, at + COUNTERS_OFFSET)
            maps = values[Counter.SOURCE_MAPS] > 0, values[Counter.LOCAL_MAPS] > 0
            if pid and not values[Counter.EXIT_NS] and (values[Counter.READERS] > 1 or any(maps)):
                inside, waits = (values[c] >= _NEGATIVE for c in (Counter.BLOCKED_NS, Counter.BLOCKED_SOURCE_NS))
                yield pid, inside, waits, *maps

    def are_using(self, active_s: float) -> bool:
        """Returns whether living processes use the datasets: they opened files and used one within `active_s` seconds,
        or opened a copy where its use is not counted (mapped files, the Python layer, the shared slot)."""
        since_ns = time.monotonic_ns() - int(active_s * 1e9)
        return any(self._is_using(at, since_ns) for at in self._used())

    def _is_using(self, at: int, since_ns: int) -> bool:
        pid = _U32.unpack_from(self._map, at)[0]
        values = _COUNTERS.unpack_from(self._map, at + COUNTERS_OFFSET)
        copies = values[Counter.HIT_OPENS] + values[Counter.READY_OPENS]
        if values[Counter.EXIT_NS] or not copies + values[Counter.SOURCE_OPENS]:
            return False
        if pid and not os.path.exists(f"/proc/{pid}"):
            return False
        counted = pid and values[Counter.READS_MEASURED] and not values[Counter.LOCAL_MAPS]
        is_inside = values[Counter.BLOCKED_NS] >= _NEGATIVE
        return (copies > 0 and not counted) or is_inside or values[Counter.LAST_NS] >= since_ns

    def pids(self) -> set[int]:
        """Returns the pids of processes that attached, without those that ended and whose slots are used again."""
        return {_U32.unpack_from(self._map, at)[0] for at in self._used()} - {0}

    def family(self, slot: int) -> list[int]:
        """Returns the pids of a slot's process, of its parent, and of their parents as far as these attached."""
        return self.families([slot])[0]

    def families(self, slots: list[int]) -> list[list[int]]:
        """Returns the same for several slots."""
        heads = [SLOT_HEAD.unpack_from(self._map, at) for at in self._used()]
        parents = {head[0]: head[3] for head in heads if head[0]}
        own = [SLOT_HEAD.unpack_from(self._map, _at(slot)) for slot in slots]
        return [_ancestors(head[0], head[3], parents) for head in own]

    def processes(self, started_monotonic_s: float) -> list[ProcessPart]:
        """Returns all slots that are in use, in the form of the record. Of processes that found no slot, those of the
        native layer share a row, and those of the Python layer are only numbered."""
        parts = [self._process(at, started_monotonic_s) for at in self._used()]
        if self._sharers():
            parts[0].processes = self._sharers()
            del parts[0].counters[_NAMES[Counter.SHARERS]]
        found = [part for part in parts if part.pid or part.counters]
        uncounted = self._get(_NEXT_PYTHON_OFFSET) - SLOTS
        if uncounted > 0:
            found.append(ProcessPart(0, 0, UNCOUNTED_LAYER, "", 0.0, {}, processes=uncounted))
        return found

    def _sharers(self) -> int:
        return int(_U64.unpack_from(self._map, _at(0) + COUNTERS_OFFSET + 8 * Counter.SHARERS)[0])

    def _process(self, at: int, started_s: float) -> ProcessPart:
        pid, layer, version, parent, attach_ns = SLOT_HEAD.unpack_from(self._map, at)
        values = _finished(_COUNTERS.unpack_from(self._map, at + COUNTERS_OFFSET), time.monotonic_ns())
        values[Counter.ATTACH_NS] = attach_ns
        return ProcessPart(
            pid=pid,
            parent_pid=parent,
            layer=Layer(layer).name.lower() if layer in Layer._value2member_map_ else "unknown",
            python=f"{version >> 8}.{version & 255}",
            attached_s=round(attach_ns / 1e9 - started_s, 6) if attach_ns else 0.0,
            counters={_NAMES.get(i, f"counter_{i}"): value for i, value in enumerate(values) if value},
            hist_open=_histogram(_HIST.unpack_from(self._map, at + HIST_OPEN_OFFSET)),
            hist_read=_histogram(_HIST.unpack_from(self._map, at + HIST_READ_OFFSET)),
        )

    def _used(self) -> Iterator[int]:
        native = min(self._get(NEXT_NATIVE_OFFSET), PYTHON_SLOTS_FROM)
        python = min(self._get(_NEXT_PYTHON_OFFSET), SLOTS)
        for slot in (*range(native), *range(PYTHON_SLOTS_FROM, python)):
            yield _at(slot)

    def _get(self, offset: int) -> int:
        return int(_U32.unpack_from(self._map, offset)[0])

    def _put(self, offset: int, value: int) -> None:
        _U32.pack_into(self._map, offset, value)


def _at(slot: int) -> int:
    return PAGE_HEADER_BYTES + slot * SLOT_BYTES


def _ancestors(pid: int, parent: int, parents: dict[int, int]) -> list[int]:
    found = [pid, parent]
    while (parent := parents.get(found[-1], 0)) and parent not in found:
        found.append(parent)
    return found


def _finished(values: tuple[int, ...], now_ns: int) -> list[int]:
    """Returns the counters with calls in progress counted up to now."""
    found = list(values)
    for counter in (Counter.BLOCKED_NS, Counter.BLOCKED_SOURCE_NS):
        if found[counter] >= _NEGATIVE:
            found[counter] = max(0, found[counter] - 2 * _NEGATIVE + now_ns)
    return found


def _histogram(values: tuple[int, ...]) -> dict[int, int]:
    return {bucket: count for bucket, count in enumerate(values) if count}
