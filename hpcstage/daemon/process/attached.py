"""Reads what the processes that attached count in their slots of the page, and keeps the counts of those that ended."""

from __future__ import annotations

import mmap
import os
import struct
import time
from collections.abc import Iterator

from hpcstage.daemon.process.slottable import SlotTable, slot_at
from hpcstage.protocol.shim import (
    COUNTERS,
    COUNTERS_OFFSET,
    HIST_BUCKETS,
    HIST_OPEN_OFFSET,
    HIST_READ_OFFSET,
    SLOT_BYTES,
    SLOT_HEAD,
    SLOTS,
    Counter,
    Layer,
    Reason,
)
from hpcstage.record.parts.rows import UNCOUNTED_LAYER, ProcessPart

_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")
_NEGATIVE = 1 << 63
_COUNTERS = struct.Struct(f"<{COUNTERS}Q")
_HIST = struct.Struct(f"<{HIST_BUCKETS}I")
_NAMES = {int(c): c.name.lower() for c in Counter if c is not Counter.DIRECT_BASE} | {
    Counter.DIRECT_BASE + reason: f"direct_{reason.name.lower()}" for reason in Reason
}


class Attached:
    """Knows the processes that attached, the ended ones included."""

    def __init__(self, page: mmap.mmap, slots: SlotTable) -> None:
        self._map = page
        self._slots = slots
        self.gone: set[int] = set()
        """Slots whose processes were found to have ended, in whatever way."""
        self._retired = 0
        self._retired_sums = [0] * COUNTERS

    def ended(self, slot: int) -> bool:
        """Returns whether a slot's process is known to have ended, or ends in an orderly way."""
        at = slot_at(slot) + COUNTERS_OFFSET
        return slot < SLOTS and (slot in self.gone or _COUNTERS.unpack_from(self._map, at)[Counter.EXIT_NS] != 0)

    def take(self, slot: int) -> ProcessPart:
        """Returns what the ended process of a slot had counted. The slot is zeros then, and can be freed."""
        at = slot_at(slot)
        part = self._process(at)
        row = _finished(_COUNTERS.unpack_from(self._map, at + COUNTERS_OFFSET), time.monotonic_ns())
        self._retired_sums = [sum(pair) for pair in zip(self._retired_sums, row, strict=True)]
        self._retired += 1
        self._map[at : at + SLOT_BYTES] = bytes(SLOT_BYTES)
        self.gone.discard(slot)
        return part

    def sums(self) -> list[int]:
        """Returns the counters summed over all processes, ended ones included."""
        now_ns = time.monotonic_ns()
        rows = [_finished(_COUNTERS.unpack_from(self._map, at + COUNTERS_OFFSET), now_ns) for at in self._slots.used()]
        return [sum(column) for column in zip(self._retired_sums, *rows, strict=True)]

    def number(self) -> int:
        """Returns how many processes attached and count."""
        return self._retired + len(self.pids()) + self._sharers()

    def several(self) -> Iterator[tuple[int, str, str]]:
        """Yields the living processes whose waits do not follow from the counters alone: those in which several threads
        read at once, and those that map files. For each it yields the pid, where a thread is inside a call on a
        dataset's file now, and where files are mapped: `source`, `local` or empty."""
        for at in self._slots.used():
            pid = _U32.unpack_from(self._map, at)[0]
            values = _COUNTERS.unpack_from(self._map, at + COUNTERS_OFFSET)
            mapped = "source" if values[Counter.SOURCE_MAPS] else "local" if values[Counter.LOCAL_MAPS] else ""
            if pid and not values[Counter.EXIT_NS] and (values[Counter.READERS] > 1 or mapped):
                waits = values[Counter.BLOCKED_SOURCE_NS] >= _NEGATIVE
                inside = values[Counter.BLOCKED_NS] >= _NEGATIVE
                yield pid, ("source" if waits else "local") if inside else "", mapped

    def are_using(self, active_s: float) -> bool:
        """Returns whether living processes use the datasets: they opened files and used one within `active_s` seconds,
        or opened a copy where its use is not counted (mapped files, the Python layer, the shared slot)."""
        since_ns = time.monotonic_ns() - int(active_s * 1e9)
        return any(self._is_using(at, since_ns) for at in self._slots.used())

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
        return {_U32.unpack_from(self._map, at)[0] for at in self._slots.used()} - {0}

    def families(self, slots: list[int]) -> list[list[int]]:
        """Returns for each slot the pids of its process, of its parent, and of their parents as far as these
        attached."""
        heads = [SLOT_HEAD.unpack_from(self._map, at) for at in self._slots.used()]
        parents = {head[0]: head[3] for head in heads if head[0]}
        own = [SLOT_HEAD.unpack_from(self._map, slot_at(slot)) for slot in slots]
        return [_ancestors(head[0], head[3], parents) for head in own]

    def processes(self) -> list[ProcessPart]:
        """Returns all slots that are in use, in the form of the record. Of processes that found no slot, those of the
        native layer share a row, and those of the Python layer are only numbered."""
        parts = [self._process(at) for at in self._slots.used()]
        if self._sharers():
            parts[0].processes = self._sharers()
            del parts[0].counters[_NAMES[Counter.SHARERS]]
        found = [part for part in parts if part.pid or part.counters]
        if uncounted := self._slots.without():
            found.append(ProcessPart(0, 0, UNCOUNTED_LAYER, {}, processes=uncounted))
        return found

    def _sharers(self) -> int:
        return int(_U64.unpack_from(self._map, slot_at(0) + COUNTERS_OFFSET + 8 * Counter.SHARERS)[0])

    def _process(self, at: int) -> ProcessPart:
        pid, layer, _, parent, attach_ns = SLOT_HEAD.unpack_from(self._map, at)
        values = _finished(_COUNTERS.unpack_from(self._map, at + COUNTERS_OFFSET), time.monotonic_ns())
        values[Counter.ATTACH_NS] = attach_ns
        return ProcessPart(
            processes=int(not values[Counter.IS_AGAIN]),
            pid=pid,
            parent_pid=parent,
            layer=Layer(layer).name.lower() if layer in Layer._value2member_map_ else "unknown",
            counters={_NAMES.get(i, f"counter_{i}"): value for i, value in enumerate(values) if value},
            hist_open=_histogram(_HIST.unpack_from(self._map, at + HIST_OPEN_OFFSET)),
            hist_read=_histogram(_HIST.unpack_from(self._map, at + HIST_READ_OFFSET)),
        )


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
