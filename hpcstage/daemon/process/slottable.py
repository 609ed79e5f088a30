"""Knows which slots of the page processes have taken, and lets other processes take those that are free again.

`slots` decides when that is.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator

from hpcstage.protocol.shim import (
    FREE_OFFSET,
    NEXT_NATIVE_OFFSET,
    NEXT_PYTHON_OFFSET,
    PAGE_HEADER_BYTES,
    PID_SPACE_OFFSET,
    PYTHON_SLOTS_FROM,
    SLOT_BYTES,
    SLOT_FREE,
    SLOTS,
)
from hpcstage.store.mappedfile import put_u32

_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")


class SlotTable:
    """Owns the bookkeeping of the slots; processes of the native layer that find none share slot 0."""

    ranges = range(1, PYTHON_SLOTS_FROM), range(PYTHON_SLOTS_FROM, SLOTS)
    """The slots of the native layer, and those of the Python layer."""

    def __init__(self, page: mmap.mmap) -> None:
        self._map = page

    def used(self) -> Iterator[int]:
        """Yields where in the page the slots begin that processes have taken, the shared one included."""
        native = min(self._get(NEXT_NATIVE_OFFSET), PYTHON_SLOTS_FROM)
        python = min(self._get(NEXT_PYTHON_OFFSET), SLOTS)
        for slot in (*range(native), *range(PYTHON_SLOTS_FROM, python)):
            yield slot_at(slot)

    def allot_python(self) -> int:
        """Returns a slot for a process of the Python layer; 0, the shared one, when none is left."""
        slot = self._get(NEXT_PYTHON_OFFSET)
        if slot >= SLOTS:
            return 0
        put_u32(self._map, NEXT_PYTHON_OFFSET, slot + 1)
        return slot

    def without(self) -> int:
        """Returns how many processes of the Python layer found no slot."""
        return max(0, self._get(NEXT_PYTHON_OFFSET) - SLOTS)

    def share_in_use(self, layer: range) -> float:
        """Returns the share of a range that processes have taken and that is not free again."""
        given = self._given(layer)
        free = self._map[FREE_OFFSET + given.start : FREE_OFFSET + given.stop].count(SLOT_FREE)
        return (len(given) - free) / len(layer)

    def in_use(self, layer: range) -> list[int]:
        """Returns the slots of a range that have a process."""
        return [slot for slot in self._given(layer) if _U32.unpack_from(self._map, slot_at(slot))[0]]

    def process_of(self, slot: int) -> tuple[int, int]:
        """Returns the pid of a slot's process, and its PID namespace; 0: not known."""
        begin = slot_at(slot)
        return _U32.unpack_from(self._map, begin)[0], _U64.unpack_from(self._map, begin + PID_SPACE_OFFSET)[0]

    def free(self, slots: list[int]) -> None:
        """Lets other processes take these slots, which `Attached.take` has cleared."""
        for slot in slots:
            self._map[FREE_OFFSET + slot] = SLOT_FREE

    def _given(self, layer: range) -> range:
        offset = NEXT_NATIVE_OFFSET if layer.start < PYTHON_SLOTS_FROM else NEXT_PYTHON_OFFSET
        return range(layer.start, max(layer.start, min(self._get(offset), layer.stop)))

    def _get(self, offset: int) -> int:
        return int(_U32.unpack_from(self._map, offset)[0])


def slot_at(slot: int) -> int:
    """Returns where in the page a slot begins."""
    return PAGE_HEADER_BYTES + slot * SLOT_BYTES
