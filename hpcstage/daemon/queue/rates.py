"""Estimates how long a transfer takes from what the last ones took, caps the rate, and bounds waits. Pure.

Callers pass `now`, monotonic seconds.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from hpcstage.plan.types import Budget
from hpcstage.protocol.shim import REQUEST_CAP_S, Reason

WAIT_FACTOR = 4.0
"""A program waits for at most this many times the time in which its file is expected."""
_SMALL_BYTES = 1 << 20
"""Files up to this size take the same time, that of `Estimates.file_s`."""
_LATEST_WEIGHT = 0.2
"""The weight of the latest transfer in a moving average."""
_FIRST_FILE_S = 0.02
_FIRST_STREAM_BYTES_PER_S = 50e6
_WINDOW_S = 0.5
_BURST_S = 0.25
_AHEAD_S = 0.05
"""Copiers are given transfers ahead for this long, so that they do not wait for the daemon."""


class AnswerKind(Enum):
    """The kind of answer to a request."""

    READY = "ready"
    WAIT = "wait"
    DIRECT = "direct"


@dataclass(frozen=True)
class Decision:
    """The answer to a request; `deadline` is set for WAIT, `reason` for DIRECT."""

    kind: AnswerKind
    deadline: float = 0.0
    reason: Reason = Reason.NONE


@dataclass(frozen=True)
class Limits:
    """The most that a queue may take of the disk and of the source, and how long programs wait."""

    budget: Budget
    directories: int = 0
    """The directories of the datasets, which take a part of the budget."""
    max_rate_bytes_per_s: float | None = None
    patience_s: float = 5.0
    """A program that would have to wait longer reads the source."""
    request_cap_s: float = REQUEST_CAP_S
    """The longest time that a program waits for the daemon; the daemon answers in half of it."""
    shared: bool = False
    """Whether other nodes stage the same datasets."""
    programs_wait: bool = False
    """Whether programs may wait for files: then no more transfers go on than the source rewards."""

    def decide(self, expected_s: float, least_s: float, now: float) -> Decision:
        """Returns the answer to a request whose file is expected in `expected_s`; a wait lasts `least_s` or longer."""
        if expected_s > self.patience_s:
            return Decision(AnswerKind.DIRECT, reason=Reason.LATER)
        longest_s = min(max(least_s, WAIT_FACTOR * expected_s), self.request_cap_s / 2)
        return Decision(AnswerKind.WAIT, deadline=now + longest_s)


class Bucket:
    """A token bucket in bytes: a transfer starts while the balance is positive, and may take it below zero.

    The debt keeps the long-run average at the rate whatever the sizes of the files.
    """

    def __init__(self, bytes_per_s: float | None) -> None:
        self._rate = bytes_per_s
        self._burst = (bytes_per_s or 0.0) * _BURST_S
        self._balance = self._burst
        self._at: float | None = None

    def open(self, now: float) -> bool:
        """Returns whether a transfer may start."""
        return not self._rate or not self.delay_s(now)

    def take(self, size_bytes: int) -> None:
        """Takes the bytes of a transfer that starts from the balance."""
        self._balance -= max(size_bytes, 1) if self._rate else 0

    def delay_s(self, now: float) -> float:
        """Returns the seconds until a transfer may start; 0 if it may now."""
        if not self._rate:
            return 0.0
        if self._at is not None:
            self._balance = min(self._burst, self._balance + (now - self._at) * self._rate)
        self._at = now
        return 0.0 if self._balance > 0 else (1 - self._balance) / self._rate


class Estimates:
    """Moving averages: seconds per small file, bytes per second of one large transfer and of all together."""

    def __init__(self) -> None:
        self.file_s = _FIRST_FILE_S
        self.stream_bytes_per_s = _FIRST_STREAM_BYTES_PER_S
        self.all_bytes_per_s = _FIRST_STREAM_BYTES_PER_S
        self.all_files_per_s: float | None = None
        self._window_start: float | None = None
        self._window_bytes = 0
        self._window_files = 0

    def transfer_s(self, size_bytes: int) -> float:
        """Returns the seconds that one transfer of this size should take."""
        return self.file_s + max(size_bytes - _SMALL_BYTES, 0) / self.stream_bytes_per_s

    def drain_s(self, size_bytes: float) -> float:
        """Returns the seconds that this many bytes take with all transfers together."""
        return size_bytes / max(self.all_bytes_per_s, 1.0)

    def ahead(self, mean_bytes: float, least: int, most: int) -> int:
        """Returns how many transfers to give the copiers ahead, at least `least`, at most `most`. A transfer that was
        given cannot be put into another order any more, so a slow source gets few, and a new order counts at once."""
        files_per_s = self.all_files_per_s
        if files_per_s is None:
            files_per_s = self.all_bytes_per_s / max(mean_bytes, 1.0)
        return min(most, max(least, int(files_per_s * _AHEAD_S)))

    def finished(self, size_bytes: int, took_s: float, now: float) -> None:
        """Takes a transfer that ended into the averages."""
        if size_bytes <= _SMALL_BYTES:
            self.file_s += _LATEST_WEIGHT * (took_s - self.file_s)
        else:
            rate = size_bytes / max(took_s, 1e-6)
            self.stream_bytes_per_s += _LATEST_WEIGHT * (rate - self.stream_bytes_per_s)
        if self._window_start is None:
            self._window_start = now
        self._window_bytes += size_bytes
        self._window_files += 1
        length_s = now - self._window_start
        if length_s >= _WINDOW_S:
            self.all_bytes_per_s += 0.5 * (self._window_bytes / length_s - self.all_bytes_per_s)
            files_per_s, before = self._window_files / length_s, self.all_files_per_s
            self.all_files_per_s = files_per_s if before is None else (files_per_s + before) / 2
            self._window_start, self._window_bytes, self._window_files = now, 0, 0
