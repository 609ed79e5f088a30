"""Uses the shared page for the daemon: sets the words at its head, by which the daemon tells all programs what holds.

`slottable` knows which slots processes have taken, `attached` reads what they count there.
"""

from __future__ import annotations

import mmap
import os
import struct
from pathlib import Path

from hpcstage.daemon.process.attached import Attached
from hpcstage.daemon.process.slottable import SlotTable
from hpcstage.protocol.shim import (
    CAUGHT_UP,
    CLOSED,
    DEVICE_OFFSET,
    GATE_OFFSET,
    GIVEN_UP,
    HELD,
    LINKED_OFFSET,
    LOGGING_OFFSET,
    NEXT_NATIVE_OFFSET,
    PAGE_BYTES,
    PUBLISHED_OFFSET,
    STATE_OFFSET,
    UNLINKED,
    VOIDED_OFFSET,
    State,
)
from hpcstage.store.mappedfile import put_u32, put_u64

_PID_OFFSET = NEXT_NATIVE_OFFSET + 8
_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")


class Page:
    """Owns the daemon's mapping of the page. Raises OSError or ValueError if there is no page of the right size."""

    def __init__(self, path: Path) -> None:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            self._map = mmap.mmap(fd, PAGE_BYTES)
        finally:
            os.close(fd)
        self._transfers, self._is_apart = 0, False
        self._put(_PID_OFFSET, os.getpid())
        self.slots = SlotTable(self._map)
        self.attached = Attached(self._map, self.slots)

    def set_state(self, state: State) -> None:
        """Sets the state that shims read."""
        self._put(STATE_OFFSET, state)

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
        self._transfers = transfers
        self._put_held()

    def set_apart(self, *, is_apart: bool) -> None:
        """Sets whether other nodes may have written without this one knowing; programs open no copy meanwhile."""
        self._is_apart = is_apart
        self._put_held()

    def _put_held(self) -> None:
        self._put(GATE_OFFSET + 4 * HELD, self._transfers + self._is_apart)

    def set_device(self, device: int) -> None:
        """Tells programs that all files of the datasets are on this device."""
        put_u64(self._map, DEVICE_OFFSET, device)

    def set_unlinked(self) -> None:
        """Tells programs that no file of the datasets is a symbolic link or behind one."""
        self._put(LINKED_OFFSET, UNLINKED)

    def published(self) -> None:
        """Tells programs that there are more copies than before, with their attributes."""
        self._raise(PUBLISHED_OFFSET)

    def voided(self) -> None:
        """Tells programs that copies which they may have open are not what is at the source."""
        self._raise(VOIDED_OFFSET)

    def _raise(self, offset: int) -> None:
        self._put(offset, (self._get(offset) + 1) % 2**32)

    def _gate(self, word: int) -> int:
        return self._get(GATE_OFFSET + 4 * word)

    def _get(self, offset: int) -> int:
        return int(_U32.unpack_from(self._map, offset)[0])

    def _put(self, offset: int, value: int) -> None:
        put_u32(self._map, offset, value)
