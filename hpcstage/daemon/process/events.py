"""Writes the events file: a fixed-size record per transfer, appended and capped, with a mark where it was cut."""

from __future__ import annotations

import contextlib
import os
import struct
import time
from enum import IntEnum
from pathlib import Path

from hpcstage.store.copierpipe import Result
from hpcstage.store.copyfile import Status

MAGIC = b"hpcstage events1"
RECORD = struct.Struct("<QIBBHQIIII")
"""Monotonic ns at the end, id, kind, status or reason, errno, bytes, open us, read us, write us, whole us."""
MOST_BYTES = 32 << 20
_FLUSH_BYTES = 64 << 10
_MOST_US = (1 << 32) - 1
NOTHING = Result(0, Status.OK)


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

    def __init__(self, path: Path) -> None:
        self._path = path
        self._left = MOST_BYTES - len(MAGIC) - RECORD.size
        self._buffer = bytearray(MAGIC)
        self._open = True

    def copied(self, result: Result) -> None:
        """Adds the end of a transfer from the source."""
        self._add(EventKind.COPIED if result.status is Status.OK else EventKind.FAILED, result)

    def received(self, result: Result) -> None:
        """Adds a copy that came from another node."""
        self._add(EventKind.RECEIVED, result)

    def _add(self, kind: EventKind, result: Result) -> None:
        if not self._open:
            return
        is_full = self._left < RECORD.size
        self._append(EventKind.TRUNCATED if is_full else kind, NOTHING if is_full else result)
        if is_full or len(self._buffer) >= _FLUSH_BYTES:
            self.flush()
        self._open = self._open and not is_full

    def _append(self, kind: EventKind, result: Result) -> None:
        now_ns = time.monotonic_ns()
        whole_ns = max(0, now_ns - result.started_ns) if result.started_ns else 0
        times_ns = (result.open_ns, result.read_ns, result.write_ns, whole_ns)
        times_us = [min(time_ns // 1000, _MOST_US) for time_ns in times_ns]
        number, size_bytes = result.errno, result.size_bytes
        self._buffer += RECORD.pack(now_ns, result.id, kind, result.status, number, size_bytes, *times_us)
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
