"""Tells a copier whether programs read the source at this moment, so that a copy can be made while they compute.

The page holds that for each process: the word BLOCKED_SOURCE_NS is negative while one of its threads is in such a call.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from collections.abc import Callable
from pathlib import Path

from hpcstage.protocol.shim import (
    COUNTERS_OFFSET,
    NEXT_NATIVE_OFFSET,
    PAGE_BYTES,
    PAGE_HEADER_BYTES,
    PYTHON_SLOTS_FROM,
    SLOT_BYTES,
    Counter,
)

_U32 = struct.Struct("<I")
_I64 = struct.Struct("<q")
_BLOCKED = PAGE_HEADER_BYTES + COUNTERS_OFFSET + 8 * Counter.BLOCKED_SOURCE_NS
LOOK_EVERY_S = 0.0005
LEAST_PATIENCE_S, PATIENCE = 0.5, 20
"""A chunk waits at least so long for programs that read, and at least so many times what the last one took: a process
that was killed in a call seems to read until the daemon finds that it has gone."""


class ProgramReads:
    """Looks at the processes with the native layer."""

    def __init__(self, page: Path) -> None:
        fd = os.open(page, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            self._map = mmap.mmap(fd, PAGE_BYTES, prot=mmap.PROT_READ)
        finally:
            os.close(fd)

    def any(self) -> bool:
        """Returns whether a program is in a call that the source answers."""
        slots = min(_U32.unpack_from(self._map, NEXT_NATIVE_OFFSET)[0], PYTHON_SLOTS_FROM)
        return any(_I64.unpack_from(self._map, _BLOCKED + slot * SLOT_BYTES)[0] < 0 for slot in range(slots))

    def let_pass(self, chunk_s: float, is_over: Callable[[], bool]) -> None:
        """Waits until no program reads the source, but not for ever. `chunk_s` is how long the last chunk took."""
        until = time.monotonic() + max(LEAST_PATIENCE_S, PATIENCE * chunk_s)
        while self.any() and time.monotonic() < until and not is_over():
            time.sleep(LOOK_EVERY_S)
