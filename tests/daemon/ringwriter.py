"""Writes the ring of a process's opens as the shim does, for tests of who reads it."""

from __future__ import annotations

import mmap
import os
import struct

from hpcstage.protocol import shim


class RingWriter:
    """The ring's file."""

    def __init__(self, path: bytes) -> None:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(fd, 0, shim.RING_HEADER_BYTES + shim.RING_DATA_BYTES)
            self._map = memoryview(mmap.mmap(fd, shim.RING_HEADER_BYTES + shim.RING_DATA_BYTES))
        finally:
            os.close(fd)
        self._head = self._map[shim.RING_HEAD_OFFSET : shim.RING_HEAD_OFFSET + 8].cast("Q")
        self._map[16:24] = struct.pack("<II", shim.RING_DATA_BYTES, os.getpid())
        self._map[:8] = shim.RING_MAGIC.to_bytes(8, "little")

    def put(self, ns: int, payload: bytes) -> None:
        """Writes one record: first the head says that its place is taken, last its stamp says that it is complete."""
        at = self._head[0]
        begin = at % shim.RING_DATA_BYTES + shim.RING_HEADER_BYTES
        end = shim.RING_HEADER_BYTES + shim.RING_DATA_BYTES
        if begin + shim.RECORD_BYTES + len(payload) > end:
            self._record(at, begin, at + end - begin, struct.pack("<HBB", 0, shim.RECORD_PAD, 0))
            at, begin = at + end - begin, shim.RING_HEADER_BYTES
        data = struct.pack("<HBBQ", len(payload), shim.RECORD_OPEN, 0, ns) + payload
        self._record(at, begin, at + (shim.RECORD_BYTES + len(payload) + 7 & -8), data)

    def _record(self, at: int, begin: int, behind: int, data: bytes) -> None:
        self._head[0] = behind
        self._map[begin + 4 : begin + 4 + len(data)] = data
        self._map[begin : begin + 4] = struct.pack("<I", at + 1 & 0xFFFFFFFF)
