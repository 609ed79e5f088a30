"""Writes the ring of opens from Python: which dataset files this process opened, in order.

The form is the native layer's. One thread writes at a time; what another thread (or a signal handler, in the middle of
a record) wants to log meanwhile is left for it. Where too much is left, the oldest is dropped, and the reader is told
that records are lost. Nobody waits, and no failure leaves this module: after a failure nothing is logged.
"""

from __future__ import annotations

import os
import sys
from _collections import deque  # type: ignore[import-not-found]  # `collections` itself costs two milliseconds
from _thread import allocate_lock

import _hpcstage_wire as wire  # type: ignore[import-not-found]
from _hpcstage_mapping import mapped  # type: ignore[import-not-found]

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

LEFT_OVER = 1024
"""At most so many records wait for the thread that writes."""
OPEN = wire.RECORD_OPEN
HEADER = wire.RING_HEADER_BYTES
DATA = wire.RING_DATA_BYTES
FRAME = wire.RECORD_BYTES
END = HEADER + DATA
ROUNDED = FRAME + 7
_open = os.open
_close = os.close
_unlink = os.unlink


class Log:
    """The log of one process. A forked child has one of its own, for its own slot."""

    def __init__(self, node_dir: bytes, slot: Any) -> None:
        self._path = b"%s/opens/%d.ring" % (node_dir, slot.number)
        self._name_at = len(os.fsdecode(node_dir)) + len("/store/")
        self._encoding = sys.getfilesystemencoding()
        self._errors = sys.getfilesystemencodeerrors()
        self._may_make = allocate_lock().acquire
        self._late = LateRecords()
        self._put: Any = self._make if slot.number > 0 else _nowhere

    def opened(self, local: str, ns: int) -> None:
        """Logs that a file was opened for reading; `local` is its place in the store."""
        self._put(ns, local[self._name_at :].encode(self._encoding, self._errors))

    def _make(self, ns: int, payload: bytes) -> None:
        """Makes the ring at the first record. What other threads open meanwhile waits for it."""
        if not self._may_make(False):
            self._late.leave((ns, payload))
            return
        try:
            self._put = RingWriter(self._path, self._late).put
        except Exception:
            self._put = _nowhere
        self._put(ns, payload)


class LateRecords:
    """The records that wait for the thread that writes."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[int, bytes]] = deque()
        self._any_dropped = False

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def leave(self, record: tuple[int, bytes]) -> None:
        """Adds one record. The oldest gives way to it where too many wait."""
        self._waiting.append(record)
        if len(self._waiting) > LEFT_OVER:
            self._waiting.popleft()
            self._any_dropped = True

    def take(self) -> tuple[int, bytes]:
        """Removes and returns the oldest record."""
        return self._waiting.popleft()  # type: ignore[no-any-return]

    def were_dropped(self) -> bool:
        """Returns whether records were dropped since the last call."""
        dropped, self._any_dropped = self._any_dropped, False
        return dropped


def _nowhere(ns: int, payload: bytes) -> None:
    """Stands in the place of a ring that cannot be made."""


class RingWriter:
    """The ring's file. Raises OSError where the file cannot be made."""

    def __init__(self, path: bytes, late: LateRecords | None = None) -> None:
        """`late` holds what waits to be written, now and later."""
        from struct import Struct

        fd = _open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            os.posix_fallocate(fd, 0, END)  # a hole on a disk that has filled up since would be SIGBUS
            self._map = view = mapped(fd, END, writable=True)
        except BaseException:
            _unlink(path)
            raise
        finally:
            _close(fd)
        lock = allocate_lock()
        self._acquire = lock.acquire
        self._release = lock.release
        self._late = LateRecords() if late is None else late
        self._stamps: Any = view.cast("I")
        self._head: Any = view[wire.RING_HEAD_OFFSET : wire.RING_HEAD_OFFSET + 8].cast("Q")
        self._behind_stamp = Struct("<HBBQ").pack
        view[16:24] = DATA.to_bytes(4, "little") + os.getpid().to_bytes(4, "little")
        view[:8] = wire.RING_MAGIC

    def put(self, ns: int, payload: bytes) -> None:
        """Writes one record. A thread's records stay in their order: what waits is written before what comes."""
        if not self._acquire(False):
            self._late.leave((ns, payload))
            self._put_late()
            return
        try:
            if self._late:
                self._write_late()
            self._write(ns, payload)
        finally:
            self._release()
        if self._late:
            self._put_late()

    def _put_late(self) -> None:
        while self._late and self._acquire(False):
            try:
                self._write_late()
            finally:
                self._release()

    def _write_late(self) -> None:
        while self._late:
            if self._late.were_dropped():
                self._head[0] += DATA + 8  # a reader that finds more to read than the ring holds says "lost"
            self._write(*self._late.take())

    def _write(self, ns: int, payload: bytes) -> None:
        """Writes a record: first the head says that its place is taken, last its stamp says that it is complete."""
        n = len(payload)
        at = self._head[0]
        begin = at % DATA + HEADER
        end = begin + FRAME + n
        if end > END:
            at = self._pad(at, begin)
            begin, end = HEADER, HEADER + FRAME + n
        self._head[0] = at + (ROUNDED + n & -8)
        self._map[begin + 4 : end] = self._behind_stamp(n, OPEN, 0, ns) + payload
        self._stamps[begin >> 2] = at + 1 & 0xFFFFFFFF

    def _pad(self, at: int, begin: int) -> int:
        """Fills the rest of the data. Returns the position behind it."""
        behind = int(at - begin + END)
        self._head[0] = behind
        self._map[begin + 4 : begin + 8] = bytes((0, 0, wire.RECORD_PAD, 0))
        self._stamps[begin >> 2] = at + 1 & 0xFFFFFFFF
        return behind
