"""What is done in turn is done in order, errors are those of the first sample, and threads end."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("torch")
from hpcstage.torch.loader import threads
from hpcstage.torch.loader.threads import ThreadedDataset, turn

pytestmark = pytest.mark.torch
WAIT_S = 120.0


class Loads:
    """A dataset of functions."""

    def __init__(self, *loads: Callable[[], Any]) -> None:
        self._loads = loads

    def __getitem__(self, index: int) -> Any:
        return self._loads[index]()


def collected(*loads: Callable[[], Any], count: int = 4) -> list[Any]:
    return ThreadedDataset(Loads(*loads), count).__getitems__(range(len(loads)))


@settings(deadline=None, max_examples=60)
@given(st.lists(st.lists(st.sampled_from(["free", "turn", "error", "turn, error"]), max_size=7), max_size=5),
       st.integers(1, 5))  # fmt: skip
def test_as_one_thread_would(plan: list[list[str]], count: int) -> None:
    log: list[tuple[int, int]] = []

    class Planned:
        def __getitem__(self, index: tuple[int, int]) -> tuple[int, int]:
            kind = plan[index[0]][index[1]]
            if "turn" in kind:
                turn()
                log.append(index)
                turn()
            if "error" in kind:
                raise ValueError(*index)
            return index

    dataset, expected_log = ThreadedDataset(Planned(), count), []
    for b, kinds in enumerate(plan):
        first = next((p for p, kind in enumerate(kinds) if "error" in kind), len(kinds))
        expected_log += [(b, p) for p, kind in enumerate(kinds[: first + 1]) if "turn" in kind]
        indices = [(b, p) for p in range(len(kinds))]
        if first == len(kinds):
            assert dataset.__getitems__(indices) == indices
        else:
            with pytest.raises(ValueError, match=rf"\({b}, {first}\)"):
                dataset.__getitems__(indices)
    assert log == expected_log


def test_samples_overlap() -> None:
    together = threading.Barrier(4)
    assert sorted(collected(*[lambda: together.wait(WAIT_S)] * 4)) == [0, 1, 2, 3]


def test_a_batch_given_up_unwinds() -> None:
    reached, unwound = threading.Event(), threading.Event()

    def fails() -> None:
        assert reached.wait(WAIT_S)
        raise KeyError

    def waits() -> None:
        try:
            reached.set()
            turn()
        finally:
            unwound.set()

    with pytest.raises(KeyError):
        collected(fails, waits)
    assert unwound.wait(WAIT_S)


def test_a_lock_held_over_a_turn(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
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
        assert collected(first, careless, lambda: 3) == [1, 2, 3]
    assert log == [1, 2]
    assert "draw outside the lock" in caplog.text


def test_threads_end_with_the_dataset_also_those_that_wait() -> None:
    def is_over() -> bool:
        gc.collect()
        return not [thread for thread in threading.enumerate() if thread.name.startswith("hpcstage-loader")]

    assert collected(lambda: 7) == [7]
    deadline = threading.Event()
    for _ in range(200):
        if is_over():
            return
        deadline.wait(0.1)
    assert is_over()


def test_outside_of_a_loader_it_is_always_ones_turn() -> None:
    turn()
