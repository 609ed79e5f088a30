"""Writes the events file: a fixed-size record per transfer, appended and capped, with a mark where it was cut."""

from __future__ import annotations

import contextlib
import os
import struct
from enum import IntEnum
from pathlib import Path

MAGIC = b"hpcstage events1"
RECORD = struct.Struct("<QIBBHQIIII")
"""Monotonic ns at the end, id, kind, status or reason, errno, bytes, open us, read us, write us, whole us."""
MOST_BYTES = 32 << 20
_FLUSH_BYTES = 64 << 10
_MOST_US = (1 << 32) - 1


class EventKind(IntEnum):
    """The kind of an event."""

    COPIED = 1
    FAILED = 2
    RECEIVED = 6
    """A copy came from another node."""
    TRUNCATED = 255
    """The last record of a file that reached its cap."""


class Events:
    """Owns the events file: buffers events and writes many at a time, never one by one. An error ends it silently."""

    def __init__(self, path: Path, most_bytes: int = MOST_BYTES) -> None:
        self._path = path
        self._left = most_bytes - len(MAGIC) - RECORD.size
        self._buffer = bytearray(MAGIC)
        self._open = True

    def add(
        self,
        at_ns: int,
        id_: int,
        kind: EventKind,
        *,
        detail: int = 0,
        number: int = 0,
        size_bytes: int = 0,
        times_ns: tuple[int, int, int, int] = (0, 0, 0, 0),
    ) -> None:
        """Appends a record."""
        if not self._open:
            return
        if self._left < RECORD.size:
            self._append(at_ns, 0, EventKind.TRUNCATED, 0, 0, 0, (0, 0, 0, 0))
            self.flush()
            self._open = False
            return
        self._append(at_ns, id_, kind, detail, number, size_bytes, times_ns)
        if len(self._buffer) >= _FLUSH_BYTES:
            self.flush()

    def _append(
        self,
        at_ns: int,
        id_: int,
        kind: int,
        detail: int,
        number: int,
        size_bytes: int,
        times_ns: tuple[int, int, int, int],
    ) -> None:
        us = [min(t // 1000, _MOST_US) for t in times_ns]
        self._buffer += RECORD.pack(at_ns, id_, kind, detail, number, size_bytes, *us)
        self._left -= RECORD.size

    def flush(self) -> None:
        """Writes the buffer to the file."""
        data, self._buffer = self._buffer, bytearray()
        if not data:
            return
        with contextlib.suppress(OSError):
            fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
            try:
                os.write(fd, data)
            finally:
                os.close(fd)
            return
        self._open = False


def read(path: Path) -> tuple[list[tuple[int, ...]], bool]:
    """Returns all records of a file, and whether it was cut."""
    data = path.read_bytes()
    if not data.startswith(MAGIC):
        return [], False
    body = data[len(MAGIC) :]
    records = list(RECORD.iter_unpack(body[: len(body) - len(body) % RECORD.size]))
    truncated = bool(records) and records[-1][2] == EventKind.TRUNCATED
    return records, truncated
