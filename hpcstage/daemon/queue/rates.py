"""Bounds waits, caps the rate, estimates how long a transfer takes from what the last ones took, and finds how many at
a time the source rewards. Pure.

A source that is limited by its bandwidth serves its requests in turn: with dozens in flight, a file that a program
waits for comes after dozens of others, and no file comes sooner for it. A source that is limited by its latency gives
more the more it is asked for. Which of them it is shows only in the rate: the width is doubled as long as files and
bytes come faster for it.

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
FIRST_TRANSFERS = 4
"""The width to begin with."""
LEAST_GAIN_FACTOR = 1.05
"""The least gain, in times of the rate before, for which a width is kept: little, since less than a source gives is
worse than a file that comes late."""
LEAST_FILES = 16
LEAST_TURNS = 2
"""A rate is measured over LEAST_FILES or more, and over LEAST_TURNS times as many files as are in flight."""
SEARCH_S, TRIAL_S, HELD_S = 0.05, 1.0, 3.0
"""The least seconds over which a rate is measured: in the search for the first width that pays, later while a larger
width is on trial, and between trials. There are trials all the time, since a source that other jobs load later rewards
more requests."""
QUICK_S = 0.1
"""All transfers go on where that many files take no longer than this: a file then waits little for the others."""
LARGE_MEAN_BYTES = 4 << 20
"""Files that are larger in the mean come too rarely for their rate to be measured soon: all transfers go on."""


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


@dataclass(frozen=True)
class Rate:
    """The rate at which transfers ended."""

    files_per_s: float
    bytes_per_s: float

    def pays(self, before: Rate) -> bool:
        """Returns whether this rate is larger: files and bytes count alike, since of files of different sizes chance
        raises the one and lowers the other."""
        gained = self.files_per_s * self.bytes_per_s
        return gained >= LEAST_GAIN_FACTOR**2 * before.files_per_s * before.bytes_per_s


class RateWindow:
    """Measures the rate over transfers that end, after the first `skipped` ones, which began under other terms."""

    def __init__(self, skipped: int, turn: int, least_s: float) -> None:
        """`turn` transfers go on at a time. A source may have them end all at once, so the window is of whole turns."""
        self._skipped = max(1, skipped)
        self._turn = turn
        self._least_s = least_s
        self._files = 0
        self._bytes = 0
        self._since = 0.0

    def took(self, size_bytes: int, now: float) -> Rate | None:
        """Takes a transfer that ended. Returns the rate once it has been measured."""
        if self._skipped:
            self._skipped -= 1
            self._since = now
            return None
        self._files += 1
        self._bytes += size_bytes
        length_s = now - self._since
        least_files = max(LEAST_FILES, LEAST_TURNS * self._turn)
        if self._files % self._turn or self._files < least_files or length_s < self._least_s:
            return None
        return Rate(self._files / length_s, self._bytes / length_s)


class Width:
    """Owns the number of transfers that go on at a time beside those that programs wait for.

    The search ends at the first width that gave little more than half of it, which is kept: the rest of what a source
    gives lies within one doubling. Later trials that do not pay end at the width before.
    """

    def __init__(self, first: int, most: int) -> None:
        """`first` transfers go on at a time in the beginning, and `most` if they pay."""
        self.transfers = min(first, most)
        """The number that go on at a time now."""
        self.is_searching = self.transfers < most
        """Whether a larger width may pay that was not tried yet."""
        self._most = most
        self._paid = self.transfers
        """The largest width that is known to pay."""
        self._before: Rate | None = None
        """The rate at the width that is known to pay, while a larger one is on trial."""
        self._window = self._open(0)

    @classmethod
    def begin(cls, most: int, mean_bytes: float, *, programs_wait: bool) -> Width:
        """Returns the width to begin with: a small one where programs may wait for files, of `mean_bytes` in the
        mean."""
        return cls(FIRST_TRANSFERS if programs_wait and mean_bytes <= LARGE_MEAN_BYTES else most, most)

    @property
    def is_whole(self) -> bool:
        """Whether nothing is held back, and nothing is on trial."""
        return self.transfers >= self._most and self._before is None

    def _open(self, skipped: int) -> RateWindow:
        later_s = HELD_S if self._before is None else TRIAL_S
        return RateWindow(skipped, self.transfers, SEARCH_S if self.is_searching else later_s)

    def filled(self, flying: int) -> None:
        """Takes how many transfers go on for which no program waits. A rate says nothing if these are fewer than may,
        since something else limits them."""
        if not self.is_whole and flying < self.transfers:
            self._window = self._open(flying)

    def took(self, size_bytes: int, now: float) -> None:
        """Takes a transfer that ended."""
        if self.is_whole:
            return
        rate = self._window.took(size_bytes, now)
        if rate is not None:
            before = self.transfers
            self._judge(rate)
            self._window = self._open(before if self.transfers != before else 0)

    def _judge(self, rate: Rate) -> None:
        if rate.files_per_s * QUICK_S >= self._most:
            self._settle(self._most)
        elif self._before is not None and not rate.pays(self._before):
            self._settle(self.transfers if self.is_searching else self._paid)
        elif self.transfers >= self._most:
            self._settle(self._most)
        else:
            self._try_more(rate)

    def _try_more(self, rate: Rate) -> None:
        """Puts twice the width on trial."""
        self._paid = self.transfers
        self._before = rate
        self.transfers = min(2 * self.transfers, self._most)

    def _settle(self, transfers: int) -> None:
        self.transfers = self._paid = transfers
        self._before = None
        self.is_searching = False
