"""Finds how many transfers at a time the source rewards, as one more than that only makes all of them slower. Pure.

A source that is limited by its bandwidth serves its requests in turn: with dozens in flight, a file that a program
waits for comes after dozens of others, and no file comes sooner for it. A source that is limited by its latency gives
more the more it is asked for. Which of them it is shows only in the rate: the width is doubled as long as files and
bytes come faster for it.

Callers pass `now`, monotonic seconds.
"""

from __future__ import annotations

from dataclasses import dataclass

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


def begin(most: int, mean_bytes: float, *, programs_wait: bool) -> Width:
    """Returns the width to begin with: a small one where programs may wait for files, of `mean_bytes` in the mean."""
    return Width(FIRST_TRANSFERS if programs_wait and mean_bytes <= LARGE_MEAN_BYTES else most, most)


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
