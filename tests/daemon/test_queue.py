"""The queue's decisions one by one, with a clock of our own."""

from __future__ import annotations

import time
from array import array

import pytest

from hpcstage.daemon.queue.queue import Queue
from hpcstage.daemon.queue.rates import WAIT_FACTOR, AnswerKind, Limits
from hpcstage.daemon.queue.states import LOOK_LIMIT, FileState
from hpcstage.plan.types import Budget
from hpcstage.protocol.shim import Reason

LARGE = 100 << 20
PLENTY = Budget(1 << 60, 1 << 40)


def queue(sizes, order=(), budget=PLENTY, read=None, **options):
    """`read` holds by id the bytes that copiers have read."""
    read_of = (lambda id_: 0) if read is None else read.__getitem__
    return Queue(array("Q", sizes), Limits(budget, **options), array("I", order), read_of=read_of)


def test_stored_is_ready_and_void_never_comes_back():
    q = queue([10, 10])
    q.next(2, 0.0)
    assert q.done(0, 10, 1.0)
    assert q.request(0, 1.0).kind is AnswerKind.READY
    assert q.void([0, 1]) == [1]
    assert q.request(0, 1.0).reason is Reason.VOID
    assert not q.done(1, 10, 2.0), "published too late: the copy has to go"
    assert q.states.of(1) is FileState.VOID
    assert q.budget.used_bytes == 0
    assert q.settled


def test_full_store_refuses_what_does_not_fit_and_goes_on():
    q = queue([4096, 3 * 4096, 4096, 4096], budget=Budget(2 * 4096, 100))
    assert q.next(9, 0.0) == [0, 2]
    assert q.states.of(1) is FileState.REFUSED
    assert q.request(1, 0.0).reason is Reason.FULL
    assert q.states.of(3) is FileState.REFUSED
    q.done(0, 4096, 1.0)
    q.done(2, 4096, 1.0)
    assert q.settled
    assert q.request(0, 1.0).kind is AnswerKind.READY, "what is there is served"


def test_a_full_store_ends_admission_at_once():
    q = queue([4096] * 3, budget=Budget(4096, 100))
    assert q.next(9, 0.0) == [0]
    assert q.states.closed is Reason.FULL


def test_inodes_are_counted_with_directories():
    q = queue([1] * 10, budget=Budget(1 << 40, 6), directories=2)
    assert len(q.next(99, 0.0)) == 4
    assert q.budget.used_files == 4
    assert q.states.count(FileState.REFUSED) == 6


def test_no_space_stops_admission():
    q = queue([10] * 5)
    q.next(2, 0.0)
    q.failed(0, no_space=True)
    assert q.is_disk_full
    assert q.states.of(0) is FileState.REFUSED
    assert q.next(9, 1.0) == []
    assert q.request(4, 1.0).reason is Reason.FULL
    assert q.done(1, 10, 1.0)
    assert q.settled


def test_a_request_waits_longer_in_a_node_group():
    assert queue([10]).request(0, 0.0).deadline < 1.0
    assert queue([10], shared=True).request(0, 0.0).deadline >= 2.0


def test_deadline_follows_from_size_and_rate():
    q = queue([10_000_000, 1000], request_cap_s=60, patience_s=20)
    q.estimates.stream_bytes_per_s = 10e6
    fast = q.request(1, 0.0).deadline
    slow = q.request(0, 0.0).deadline
    assert slow > 3
    assert fast < slow


def test_deadline_stays_below_half_the_cap():
    q = queue([10_000_000], request_cap_s=4, patience_s=20)
    q.estimates.stream_bytes_per_s = 10e6
    assert q.request(0, 10.0).deadline == pytest.approx(12.0)


def test_requeued_goes_first():
    """Also before what the program waits for since: it has waited longer."""
    q = queue([10] * 5)
    q.next(2, 0.0)
    q.request(3, 0.0)
    q.request(4, 0.0)
    q.requeue(1)
    assert q.next(9, 0.0) == [1, 3, 4, 2]


def test_rate_cap_holds_over_time():
    q = queue([1000] * 1000, max_rate_bytes_per_s=10_000.0)
    now, handed = 0.0, 0
    while now < 20:
        for id_ in q.next(50, now):
            handed += 1
            q.done(id_, 1000, now)
        now += max(q.wake_after(now) or 0.0, 0.001)
    assert handed * 1000 == pytest.approx(10_000 * 20, rel=0.05)


def test_the_rate_cap_keeps_back_nothing_that_a_program_waits_for():
    """The program would read it itself, at once; what is copied so counts."""
    q = queue([1000] * 1000, max_rate_bytes_per_s=10_000.0)
    copied_ahead = len(q.next(50, 0.0))
    assert 0 < copied_ahead < 10
    assert q.next(50, 0.0) == []
    assert q.request(900, 0.0).kind is AnswerKind.WAIT
    assert q.next(50, 0.0) == [900]
    wanted = [q.request(id_, 0.1) for id_ in range(500, 600)]
    assert {decision.kind for decision in wanted} == {AnswerKind.WAIT}, "though the cap would admit the last in 10 s"
    assert q.next(500, 0.1) == [*range(500, 600)]
    assert q.next(50, 9.9) == [], "the program has had what might be copied until now"
    assert q.next(50, 10.4) != []


def test_a_large_file_that_was_waited_for_is_deferred_under_a_cap_too():
    q = queue([1000, LARGE], max_rate_bytes_per_s=10_000.0)
    assert q.next(9, 0.0) == [0, 1]
    q.large.reads.here(1, 0.1)
    q.requeue(1)
    assert q.next(9, 0.1) == [], "the program reads it at the source"


def test_passing_over_is_bounded():
    q = queue([8 * 4096] * (3 * LOOK_LIMIT) + [1], budget=Budget(4 * 4096, 1 << 30))
    rounds = 0
    while not (chosen := q.next(1, 0.0)):
        rounds += 1
        assert q.states.waiting
    assert chosen == [3 * LOOK_LIMIT]
    assert rounds == 3


def test_a_million_ids_quickly():
    count = 1_000_000
    start = time.process_time()
    q = queue(array("Q", [100_000]) * count, array("I", range(count - 1, -1, -1)))
    for _ in range(200):
        for id_ in q.next(100, 0.0):
            q.done(id_, 100_000, 0.1)
    for id_ in range(0, 100_000, 5):
        q.request(id_, 0.2)
    assert time.process_time() - start < 3
    assert q.states.count(FileState.STORED) == 20_000


def test_what_the_program_has_read_at_the_source_is_copied_last():
    q = queue([LARGE] * 6)
    for id_ in (0, 1):
        q.request(id_, 0.0)
    found = []
    for now in (2.0, 7.1):
        found += (ids := q.next(9, now))
        for id_ in ids:
            q.done(id_, LARGE, now)
    assert found == [2, 3, 4, 5, 0, 1]


def test_a_file_that_keeps_the_source_busy_for_a_moment_is_large():
    q = queue([80_000_000])
    q.estimates.all_bytes_per_s = 200e6
    assert q.request(0, 0.0).reason is Reason.LARGE


def test_a_transfer_that_takes_longer_than_expected_is_expected_for_a_while_yet():
    q = queue([10_000_000], request_cap_s=60, patience_s=20)
    q.estimates.stream_bytes_per_s = 1e6
    assert q.next(1, 0.0) == [0]
    begun, late = q.request(0, 1.0).deadline - 1.0, q.request(0, 100.0).deadline - 100.0
    assert begun > 20.0
    assert 1.0 < late < 10.0


def test_a_requested_file_waits_for_half_of_those_that_are_requested():
    q = queue([10_000_000] * 10, request_cap_s=60, patience_s=20)
    waits = [q.request(id_, 0.0).deadline for id_ in range(10)]
    assert waits == sorted(waits)
    assert q.request(0, 0.0).deadline == pytest.approx(WAIT_FACTOR * (q.estimates.transfer_s(10_000_000) + 1.0))


def test_the_rate_cap_wakes_nobody_when_nothing_waits():
    q = queue([1000, 1000], max_rate_bytes_per_s=1000.0)
    assert q.next(9, 0.0) == [0]
    assert q.wake_after(0.0) == pytest.approx(0.75, abs=0.01)
    assert q.next(9, 1.0) == [1]
    assert q.wake_after(1.0) is None


def test_the_rate_cap_keeps_back_what_was_deferred():
    q = queue([LARGE, 10_000], max_rate_bytes_per_s=1000.0)
    q.large.reads.here(0, 0.0)
    assert q.next(9, 0.0) == [1]
    assert q.next(9, 6.0) == [], "nobody reads it any more"
    assert q.next(9, 11.0) == [0]
