"""The pool: what is done in turn is done in order, errors are those of the first sample, and it ends."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("torch")
from hpcstage.torch import threads
from hpcstage.torch.threads import LoadingThreads, turn

pytestmark = pytest.mark.torch
WAIT_S = 20.0


@pytest.fixture
def pool() -> Iterator[LoadingThreads]:
    made = LoadingThreads(4)
    yield made
    made.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("hpcstage-loader")]


@settings(deadline=None, max_examples=60)
@given(st.lists(st.lists(st.sampled_from(["free", "turn", "error", "turn, error"]), max_size=7), max_size=5),
       st.integers(1, 5))  # fmt: skip
def test_as_one_thread_would(plan: list[list[str]], count: int) -> None:
    log: list[tuple[int, int]] = []

    def load(batch: int, place: int, kind: str) -> tuple[int, int]:
        if "turn" in kind:
            turn()
            log.append((batch, place))
            turn()
        if "error" in kind:
            raise ValueError(batch, place)
        return batch, place

    pool = LoadingThreads(count)
    try:
        announced = [
            pool.announce([lambda b=b, p=p, kind=kind: load(b, p, kind) for p, kind in enumerate(kinds)])
            for b, kinds in enumerate(plan)
        ]
        expected_log = []
        for b, (batch, kinds) in enumerate(zip(announced, plan, strict=True)):
            first = next((p for p, kind in enumerate(kinds) if "error" in kind), len(kinds))
            expected_log += [(b, p) for p, kind in enumerate(kinds[: first + 1]) if "turn" in kind]
            if first == len(kinds):
                assert pool.collect(batch) == [(b, p) for p in range(len(kinds))]
            else:
                with pytest.raises(ValueError, match=rf"\({b}, {first}\)"):
                    pool.collect(batch)
        assert log == expected_log
    finally:
        pool.close()


def test_samples_overlap_within_and_over_batches(pool: LoadingThreads) -> None:
    together = threading.Barrier(4)
    batches = [pool.announce([lambda: together.wait(WAIT_S)] * 2) for _ in range(2)]
    assert sorted(pool.collect(batches[0]) + pool.collect(batches[1])) == [0, 1, 2, 3]


def test_no_turn_before_the_batch_is_waited_for(pool: LoadingThreads) -> None:
    reached, passed = threading.Event(), []

    def load() -> None:
        reached.set()
        turn()
        passed.append(True)

    batch = pool.announce([load])
    assert reached.wait(WAIT_S)
    assert not passed
    pool.collect(batch)
    assert passed


def test_a_batch_given_up_unwinds(pool: LoadingThreads) -> None:
    reached, unwound = threading.Event(), threading.Event()

    def load() -> None:
        try:
            reached.set()
            turn()
        finally:
            unwound.set()

    batch = pool.announce([load])
    assert reached.wait(WAIT_S)
    pool.give_up(batch)
    assert unwound.wait(WAIT_S)
    assert pool.collect(pool.announce([lambda: 7])) == [7]


def test_more_is_asked_for_while_a_thread_is_idle(pool: LoadingThreads) -> None:
    go = threading.Event()
    assert pool.collect(pool.announce([lambda: go.wait(WAIT_S)]), go.set) == [True]


def test_a_lock_held_over_a_turn(
    pool: LoadingThreads, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The second sample waits for its turn with a lock that the first needs: it gives way, and is loaded again."""
    monkeypatch.setattr(threads, "STALL_S", 0.05)
    lock, taken = threading.Lock(), threading.Event()
    log: list[int] = []

    def second() -> int:
        with lock:
            taken.set()
            turn()
            log.append(2)
            return 2

    def first() -> int:
        assert taken.wait(WAIT_S)
        with lock:
            turn()
            log.append(1)
            return 1

    def careless() -> int:
        """Catches everything, as programs do."""
        try:
            return second()
        except:  # noqa: E722
            return -1

    with caplog.at_level("WARNING"):
        assert pool.collect(pool.announce([first, careless, lambda: 3])) == [1, 2, 3]
    assert log == [1, 2]
    assert "one by one" in caplog.text
    assert pool.collect(pool.announce([lambda: 4, lambda: 5])) == [4, 5]
    with pytest.raises(KeyError):
        pool.collect(pool.announce([lambda: {}["x"]]))


def test_closing_ends_those_that_wait(pool: LoadingThreads) -> None:
    reached = [threading.Event() for _ in range(3)]

    def load(number: int) -> Callable[[], Any]:
        return lambda: (reached[number].set(), turn())

    pool.announce([load(number) for number in range(3)])
    assert all(event.wait(WAIT_S) for event in reached)
    pool.close()


def test_outside_of_a_loader_it_is_always_ones_turn() -> None:
    turn()
