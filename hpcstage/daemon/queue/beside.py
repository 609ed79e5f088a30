"""Decides whether large files are copied while a program reads others at the source: not where that slows it down.

First nothing is copied for a moment, which shows how fast the program reads alone. Then copying is on trial: where the
program reads less by more than half of what is copied, the source has no bandwidth to spare, and the program loses now
what it gains later from copies. Copying waits then, after each failed trial for twice as long. Where the program's
reads are not counted, or it read nothing meanwhile, copying is allowed. Pure: callers pass `now`.
"""

from __future__ import annotations

from dataclasses import dataclass

LEAST_S = 1.5
"""The least length of a measurement."""
MOST_TAKEN = 0.5
WAIT_S = 20.0
MOST_DOUBLINGS = 10


@dataclass(frozen=True)
class Read:
    """The bytes that were read at the source up to a moment."""

    at: float
    program_bytes: int
    copied_bytes: int


class Beside:
    """Decides whether large files may be copied."""

    def __init__(self) -> None:
        self.is_allowed = False
        self._alone: float | None = None
        """The bytes per second that the program reads alone."""
        self._since: Read | None = None
        self._failed = 0
        self._wait_until = 0.0

    def look(self, read: Read, *, reads: bool, copies: bool) -> None:
        """Takes the counters of a moment. `reads`: the program has large files open at the source; `copies`: large
        files are being copied."""
        if not reads:
            self._restart()
        elif self.is_allowed:
            self._judge(read, copies)
        elif read.at >= self._wait_until:
            self._measure(read, copies)

    def _restart(self) -> None:
        self.is_allowed = False
        self._alone = self._since = None

    def _measure(self, read: Read, copies: bool) -> None:
        if copies or self._since is None:
            self._since = None if copies else read
        elif read.at - self._since.at >= LEAST_S:
            self._alone = (read.program_bytes - self._since.program_bytes) / (read.at - self._since.at)
            self._since = None
            self.is_allowed = True

    def _judge(self, read: Read, copies: bool) -> None:
        if not copies or self._since is None:
            self._since = read if copies else None
            return
        length_s = read.at - self._since.at
        if length_s < LEAST_S or self._alone is None:
            return
        beside = (read.program_bytes - self._since.program_bytes) / length_s
        copied = (read.copied_bytes - self._since.copied_bytes) / length_s
        self._since = read
        if self._alone - beside > MOST_TAKEN * copied:
            self._restart()
            self._wait_until = read.at + WAIT_S * 2 ** min(self._failed, MOST_DOUBLINGS)
            self._failed += 1
