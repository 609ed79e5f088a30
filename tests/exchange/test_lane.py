"""Work on files: at once while it is quick, in a thread when it is not, always one after the other."""

from __future__ import annotations

import select
import threading
import time

import pytest

from hpcstage.exchange.lane import Lane, Wake
from hpcstage.exchange.transport.buffers import BufferPool


def collect_all(lane: Lane, wake: Wake) -> None:
    deadline = time.monotonic() + 10
    while lane.pending:
        assert time.monotonic() < deadline
        if not lane.collect():
            select.select([wake], [], [], 1.0)
            wake.clear()


def test_quick_work_is_done_by_who_submits_it():
    wake, done = Wake(), []
    lane = Lane("test", wake, slow_s=60.0)
    for number in range(5):
        lane.submit(lambda n=number: (n, threading.current_thread()), done.append)
    assert done == []
    assert lane.collect()
    assert [number for number, _ in done] == list(range(5))
    assert {thread for _, thread in done} == {threading.current_thread()}
    assert lane.pending == 0


def test_slow_work_is_done_by_the_thread_in_order():
    wake, done = Wake(), []
    lane = Lane("test", wake, slow_s=1e-9)
    lane.submit(lambda: threading.current_thread().name, done.append)
    for number in range(200):
        lane.submit(lambda n=number: (n, threading.current_thread().name), done.append)
    collect_all(lane, wake)
    first, *others = done
    assert first == threading.current_thread().name
    assert others == [(number, "test") for number in range(200)]


def test_order_holds_while_the_lane_changes():
    wake, done = Wake(), []
    lane = Lane("test", wake, slow_s=50e-6)
    gate = threading.Event()
    for number in range(300):
        lane.submit(lambda n=number: (gate.wait(200e-6) if n % 7 == 0 else None) or n, done.append)
        if number % 50 == 0:
            lane.collect()
    collect_all(lane, wake)
    assert done == list(range(300))


@pytest.mark.parametrize("slow_s", [60.0, 0.0])
def test_what_work_raises_is_raised_where_it_is_collected(slow_s):
    wake = Wake()
    lane = Lane("test", wake, slow_s=slow_s)
    lane.submit(lambda: 1 // 0, lambda _: None)
    with pytest.raises(ZeroDivisionError):
        collect_all(lane, wake)


def test_a_pool_gives_the_last_buffer_first_and_no_more_than_it_has():
    pool = BufferPool(2)
    one, two = pool.take(), pool.take(users=2)
    assert not pool.has_some
    with pytest.raises(LookupError):
        pool.take()
    pool.give(one)
    pool.give(two)
    assert pool.take() is one
    assert not pool.has_some
    pool.give(two)
    assert pool.take() is two
