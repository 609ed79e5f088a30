"""Decides how large files are copied while a program reads others at the source: so that it loses nothing. Pure."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from enum import Enum

LEAST_TRIAL_S = 1.5
"""The least length of a measurement."""
LEAST_SPRINT_S, SPRINT_AFTER_S = 0.25, 10.0
"""The least length of a measurement of a copy that does not yield, and how long it yields before it is tried so."""
MOST_TAKEN, MOST_SLOWER = 0.5, 1.25
"""The program reads less by at most this share of what is copied; each of its reads takes at most so many times as
long beside a copy that does not yield."""
TRIAL_WAIT_S = 20.0
MOST_DOUBLINGS = 10


@dataclass(frozen=True)
class BytesRead:
    """The bytes that were read at the source up to a moment."""

    at: float
    program_bytes: int
    copied_bytes: int
    movable_bytes: int = 0
    """Those of `program_bytes` that were read from open files that go on with the copy once it is whole."""
    program_s: float = 0.0
    """How long programs were in the calls that read `program_bytes`."""


class PaceBeside(Enum):
    """How a large file is copied while the program reads others at the source."""

    NOT = "not at all"
    YIELDING = "while no program reads the source"
    FULL = "whether programs read or not"


class Beside:
    """Decides how large files are copied while a program reads others at the source: so that it is not slowed down.

    First nothing is copied for a moment, which shows how fast the program reads alone. Then copies yield to it. Where
    the program reads less even so, by more than half of what is copied, copying waits, after each such trial for twice
    as long: the program loses now what it gains later from copies, if ever. Where a copy has yielded for a while, it is
    seen for a moment whether the source has so much to spare that the program's reads take no longer beside a copy that
    does not; if they do, it yields on, after each such moment for twice as long. Where the program's reads are not
    counted, or it read nothing meanwhile, nothing is judged.
    """

    def __init__(self) -> None:
        self.pace = PaceBeside.NOT
        self._alone: BytesRead | None = None
        """What the program reads alone in a second."""
        self._since: BytesRead | None = None
        self._failed: Counter[PaceBeside] = Counter()
        self._wait_until = 0.0
        self._sprint_at = 0.0
        self._least_s = LEAST_TRIAL_S
        """The least length of the next measurement."""

    def look(self, read: BytesRead, *, reads: bool, copies: bool) -> None:
        """Takes the counters of a moment. `reads`: the program has large files open at the source; `copies`: large
        files are being copied."""
        if not reads:
            self._restart()
        elif self.pace is not PaceBeside.NOT:
            self._judge(read, copies)
        elif read.at >= self._wait_until:
            self._measure(read, copies)

    @property
    def is_sprinting(self) -> bool:
        """Whether it is to be seen soon if copies that do not yield slow the program down."""
        return self._least_s == LEAST_SPRINT_S

    def _restart(self) -> None:
        self.pace, self._least_s = PaceBeside.NOT, LEAST_TRIAL_S
        self._alone = self._since = None

    def _measure(self, read: BytesRead, copies: bool) -> None:
        if copies or self._since is None:
            self._since = None if copies else read
        elif read.at - self._since.at >= LEAST_TRIAL_S:
            self._alone = _per_second(self._since, read)
            self._since = None
            self.pace = PaceBeside.YIELDING
            self._sprint_at = read.at + SPRINT_AFTER_S * self._longer(PaceBeside.FULL)

    def _judge(self, read: BytesRead, copies: bool) -> None:
        if not copies or self._since is None:
            self._since = read if copies else None
            if self.is_sprinting and not copies:
                self.pace, self._least_s = PaceBeside.YIELDING, LEAST_TRIAL_S
            return
        if read.at - self._since.at < self._least_s or self._alone is None:
            return
        alone, beside = self._alone, _per_second(self._since, read)
        if self.pace is PaceBeside.FULL and not beside.program_bytes and beside.at < LEAST_TRIAL_S:
            return
        self._since = read
        if self.pace is PaceBeside.FULL:
            self._least_s = LEAST_TRIAL_S
            if beside.program_s * alone.program_bytes > MOST_SLOWER * alone.program_s * beside.program_bytes:
                self.pace = PaceBeside.YIELDING
                self._failed[PaceBeside.FULL] += 1
                self._sprint_at = read.at + SPRINT_AFTER_S * self._longer(PaceBeside.FULL)
        elif alone.program_bytes - beside.program_bytes > MOST_TAKEN * beside.copied_bytes:
            self._restart()
            self._wait_until = read.at + TRIAL_WAIT_S * self._longer(PaceBeside.YIELDING)
            self._failed[PaceBeside.YIELDING] += 1
        elif read.at >= self._sprint_at:
            self.pace, self._least_s = PaceBeside.FULL, LEAST_SPRINT_S

    def _longer(self, pace: PaceBeside) -> int:
        return int(2 ** min(self._failed[pace], MOST_DOUBLINGS))


def _per_second(since: BytesRead, now: BytesRead) -> BytesRead:
    """Returns what was read in a second, on average; `at` is how long that took."""
    length_s = now.at - since.at
    return BytesRead(
        length_s,
        int((now.program_bytes - since.program_bytes) / length_s),
        int((now.copied_bytes - since.copied_bytes) / length_s),
        program_s=(now.program_s - since.program_s) / length_s,
    )
