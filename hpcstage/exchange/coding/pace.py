"""Lets encoding give way: says when its next piece may begin, and gives its thread the lowest priority.

Training, and files that programs wait for, go first. Owns the caps on processor time and on bytes sent. What was not
used is not saved up, and what was used too much delays for a moment only, so that encoding goes on, slowly, beside an
exchange that is always busy with files.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import threading
import time

LOWEST = 19
"""The lowest priority."""
_IOPRIO_SET = {"x86_64": 251, "aarch64": 30, "ppc64le": 273, "s390x": 282, "riscv64": 30}
"""The number of the system call for the class of input and output; the C library has no function for it."""
_WHO_PROCESS = 1
_IDLE_CLASS = 3 << 13
SAVED_S = 0.05
"""Time that was not used and may be made up for."""
OWED_S = 0.5
"""The longest delay for what was used too much."""
QUIET_S = 0.05
"""Files are under way if something happened with one so lately."""
PATIENCE_S = 0.25
"""Beside files, a piece is begun so often."""


class EncodingPace:
    """The pace of one encoding."""

    def __init__(self, processor_share: float, rate_bytes_per_s: float) -> None:
        self._share = processor_share
        self._rate = rate_bytes_per_s
        self._now = time.monotonic()
        self._used_s = time.process_time()
        self._due = self._now
        self._sent_due = self._now
        self._begun = self._now

    def due(self, now: float, files_at: float) -> float:
        """Returns when the next piece may begin; now or before: it may."""
        if self._share:
            used_s = time.process_time()
            self._due = _bounded(self._due + (used_s - self._used_s) / self._share, now)
            self._used_s = used_s
        due = max(self._due, self._sent_due)
        if now - files_at < QUIET_S:
            due = max(due, min(files_at + QUIET_S, self._begun + PATIENCE_S))
        return due

    def began(self, now: float) -> None:
        """Notes that a piece was begun."""
        self._begun = now

    def sent(self, size_bytes: int, now: float) -> None:
        """Notes that bytes were sent."""
        if self._rate:
            self._sent_due = max(self._sent_due, now - SAVED_S) + size_bytes / self._rate


def become_background() -> None:
    """Gives the calling thread the lowest priority, and idle input and output, as far as the system lets it."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LOWEST)
    if (number := _IOPRIO_SET.get(platform.machine())) is not None:
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).syscall(number, _WHO_PROCESS, 0, _IDLE_CLASS)


def _bounded(due: float, now: float) -> float:
    return min(max(due, now - SAVED_S), now + OWED_S)
