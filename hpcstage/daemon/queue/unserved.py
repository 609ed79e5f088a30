"""Decides when copying pauses because only programs without the shim read the datasets, which use no copies. Pure.

Copying pauses once several files were seen to be read like that, or one for a moment. It goes on as soon as a process
with the shim opens a file, or when no such reading was seen for a while, which doubles with each further pause.
Callers pass `now`.
"""

from __future__ import annotations

from collections.abc import Collection

LEAST_FILES = 3
LEAST_S = 0.5
"""Fewer files are enough, too, if this much time lies between the first and the last look that showed one."""
QUIET_S = 10.0
MOST_DOUBLINGS = 10


class Unserved:
    """Owns what was seen of such reading, and the pause."""

    def __init__(self) -> None:
        self.files: set[int] = set()
        """The files that programs without the shim were seen to read when copying paused."""
        self._paused_s = 0.0
        self._paused_at: float | None = None
        self._pauses = 0
        self._recent: set[int] = set()
        self._first = self._last = 0.0

    @property
    def is_paused(self) -> bool:
        """Whether nothing is to be copied now."""
        return self._paused_at is not None

    def paused_s(self, now: float) -> float:
        """Returns how long copying has paused in all."""
        return self._paused_s + (now - self._paused_at if self._paused_at is not None else 0.0)

    def saw(self, files: Collection[int], now: float) -> None:
        """Notes the files that a look has shown to be read."""
        if files:
            self._first = self._first if self._recent else now
            self._last = now
            self._recent.update(files)
        elif self._recent and now - self._last >= QUIET_S * 2 ** min(max(self._pauses - 1, 0), MOST_DOUBLINGS):
            self.served(now)
        if not self.is_paused and self._is_enough():
            self._paused_at = now
            self._pauses += 1
        if self.is_paused:
            self.files |= self._recent

    def _is_enough(self) -> bool:
        return len(self._recent) >= LEAST_FILES or (bool(self._recent) and self._last - self._first >= LEAST_S)

    def served(self, now: float) -> None:
        """Notes that copies are of use, or may be: copying goes on."""
        self._recent.clear()
        self._paused_s = self.paused_s(now)
        self._paused_at = None
