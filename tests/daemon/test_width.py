"""How many transfers at a time a source rewards: found on simulated sources of several kinds."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from heapq import heappop, heappush

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcstage.daemon.queue.rates import FIRST_TRANSFERS, LARGE_MEAN_BYTES, Width

MOST = 32
PIECE_BYTES = 128 << 10


class Source:
    """Serves requests for pieces of files first come, first served, beside those of other jobs, and takes a latency for
    each besides. It copies files as an engine does, so many at a time as a width says."""

    def __init__(self, bytes_per_s: float, latency_s: float, others: Callable[[float], int] = lambda now: 0) -> None:
        self.bytes_per_s = bytes_per_s
        self.latency_s = latency_s
        self.others = others
        self.took_s: list[float] = []
        """The time that each file took, in the order in which they ended."""
        self.widths: list[tuple[float, int]] = [(0.0, 0)]
        """The widths that were used, each with the time from which it was."""
        self._asking: list[tuple[float, int]] = []
        self._line: deque[int] = deque()
        self._left: dict[int, int] = {}
        self._began: dict[int, float] = {}

    def copy(self, sizes: list[int], most: Width) -> float:
        """Copies files. Returns the seconds that it took."""
        waiting, now = deque(enumerate(sizes)), 0.0
        self._fill(waiting, most, now)
        while self._left:
            if not any(id_ >= 0 for id_ in self._line):
                now = max(now, self._asking[0][0])
            while self._asking and self._asking[0][0] <= now:
                self._line.append(heappop(self._asking)[1])
            self._line.extend([-1] * (self.others(now) - self._line.count(-1)))
            id_ = self._line.popleft()
            piece = PIECE_BYTES if id_ < 0 else min(PIECE_BYTES, self._left[id_])
            now += piece / self.bytes_per_s
            if id_ < 0:
                continue
            self._left[id_] -= piece
            if self._left[id_]:
                heappush(self._asking, (now + self.latency_s, id_))
                continue
            del self._left[id_]
            self.took_s.append(now - self._began[id_])
            most.took(sizes[id_], now)
            self._fill(waiting, most, now)
        return now

    def _fill(self, waiting: deque[tuple[int, int]], most: Width, now: float) -> None:
        while waiting and len(self._left) < most.transfers:
            id_, size = waiting.popleft()
            self._left[id_], self._began[id_] = size, now
            heappush(self._asking, (now + 2 * self.latency_s, id_))
        most.filled(len(self._left))
        if self.widths[-1][1] != most.transfers:
            self.widths.append((now, most.transfers))

    def time_at(self, least: int) -> float:
        """Returns when so many transfers first went on."""
        return next(at for at, transfers in self.widths if transfers >= least)


def _sizes(files: int, mean_bytes: int, spread: float) -> list[int]:
    chance = random.Random(files)
    return [int(mean_bytes * chance.uniform(1 - spread, 1 + spread)) for _ in range(files)]


def _both(make: Callable[[], Source], sizes: list[int]) -> tuple[float, Source, Source]:
    """Returns the time in times of that with all transfers in flight, and both sources."""
    found, whole = make(), make()
    return found.copy(sizes, Width(FIRST_TRANSFERS, MOST)) / whole.copy(sizes, Width(MOST, MOST)), found, whole


@pytest.mark.parametrize("spread", [0.0, 0.5])
def test_a_source_that_bandwidth_limits_is_as_fast_and_a_file_comes_sooner(spread: float) -> None:
    times, found, whole = _both(lambda: Source(8.4e6, 0.001), _sizes(800, 250_000, spread))
    assert times < 1.01
    usual, before = sorted(found.took_s)[400], sorted(whole.took_s)[400]
    assert usual < before / 2
    assert max(transfers for _, transfers in found.widths) <= 4 * FIRST_TRANSFERS


def test_a_source_of_both_kinds_is_as_fast() -> None:
    times, _, _ = _both(lambda: Source(40e6, 0.005), _sizes(2000, 250_000, 0.5))
    assert times < 1.01


def test_a_source_that_latency_limits_soon_gets_all_transfers() -> None:
    times, found, _ = _both(lambda: Source(2e9, 0.002), _sizes(20_000, 100_000, 0.5))
    assert times < 1.03
    assert found.time_at(MOST) < 0.2


def test_a_slow_source_that_latency_limits_gets_all_transfers_step_by_step() -> None:
    times, found, _ = _both(lambda: Source(1e9, 0.1), _sizes(3000, 200_000, 0.5))
    assert found.time_at(MOST) < 5.0
    assert times < 1.1


@pytest.mark.parametrize("others", [4, 32])
def test_a_source_that_others_load_gets_as_many_as_pay(others: int) -> None:
    times, found, _ = _both(lambda: Source(40e6, 0.001, lambda now: others), _sizes(2000, 250_000, 0.0))
    assert times < 1.1
    assert found.widths[-1][1] == MOST


def test_once_others_load_the_source_more_transfers_are_tried_soon() -> None:
    source = Source(20e6, 0.001, lambda now: 0 if now < 10 else 64)
    source.copy(_sizes(2000, 250_000, 0.0), Width(FIRST_TRANSFERS, MOST))
    assert max(transfers for at, transfers in source.widths if at < 10) <= 4 * FIRST_TRANSFERS
    assert source.time_at(MOST) < 25


def test_where_something_else_limits_nothing_is_learnt() -> None:
    beside = Width(FIRST_TRANSFERS, MOST)
    for number in range(1000):
        beside.took(100_000, number * 1e-5)
        beside.filled(FIRST_TRANSFERS - 1)
    assert beside.transfers == FIRST_TRANSFERS
    assert beside.is_searching


def test_only_small_files_for_which_programs_may_wait_are_deferred() -> None:
    assert Width.begin(MOST, 1e5, programs_wait=True).transfers == FIRST_TRANSFERS
    assert Width.begin(2, 1e5, programs_wait=True).is_whole
    for mean_bytes, programs_wait in ((1e5, False), (LARGE_MEAN_BYTES + 1, True)):
        beside = Width.begin(MOST, mean_bytes, programs_wait=programs_wait)
        assert beside.is_whole
        assert not beside.is_searching


@settings(max_examples=60, deadline=None, derandomize=True)  # one of some thousand cases is slower by more
@given(
    st.floats(5e6, 200e6), st.floats(0.0, 0.02), st.integers(0, 8), st.integers(50_000, 1_000_000), st.floats(0.0, 0.9)
)
def test_it_is_hardly_ever_slower(
    bytes_per_s: float, latency_s: float, others: int, mean_bytes: int, spread: float
) -> None:
    sizes = _sizes(1000, mean_bytes, spread)
    times, found, whole = _both(lambda: Source(bytes_per_s, latency_s, lambda now: others), sizes)
    assert times < 1.18 + 0.2 / max(whole.widths[-1][0], sum(whole.took_s) / MOST)
    assert all(FIRST_TRANSFERS <= transfers <= MOST for _, transfers in found.widths[1:])
