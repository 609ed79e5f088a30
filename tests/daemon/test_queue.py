"""The queue's decisions one by one, with a clock of our own."""

from __future__ import annotations

import time
from array import array

import pytest

from hpcstage.daemon.queue.beside import BytesRead
from hpcstage.daemon.queue.large import LEAST_BYTES, MOST_TRIES
from hpcstage.daemon.queue.queue import Queue
from hpcstage.daemon.queue.rates import AnswerKind, Limits
from hpcstage.daemon.queue.sourcereads import LET_GO_S
from hpcstage.daemon.queue.states import LOOK_LIMIT, FileState
from hpcstage.plan.types import Budget
from hpcstage.protocol.arriving import Priority
from hpcstage.protocol.shim import Reason

LARGE = 100 << 20
PLENTY = Budget(1 << 60, 1 << 40)


def queue(sizes, order=(), budget=PLENTY, read=None, **options):
    """`read` holds by id the bytes that copiers have read."""
    read_of = (lambda id_: 0) if read is None else read.__getitem__
    return Queue(array("Q", sizes), Limits(budget, **options), array("I", order), read_of=read_of)


def test_stored_is_ready_and_void_never_comes_back():
    q = queue([10, 10])
    q.source.next(2, 0.0)
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
    assert q.source.next(9, 0.0) == [0, 2]
    assert q.states.of(1) is FileState.REFUSED
    assert q.request(1, 0.0).reason is Reason.FULL
    assert q.states.of(3) is FileState.REFUSED
    q.done(0, 4096, 1.0)
    q.done(2, 4096, 1.0)
    assert q.settled
    assert q.request(0, 1.0).kind is AnswerKind.READY, "what is there is served"


def test_inodes_are_counted_with_directories():
    q = queue([1] * 10, budget=Budget(1 << 40, 6), directories=2)
    assert len(q.source.next(99, 0.0)) == 4
    assert q.budget.used_files == 4
    assert q.states.count(FileState.REFUSED) == 6


def test_no_space_stops_admission():
    q = queue([10] * 5)
    q.source.next(2, 0.0)
    q.failed(0, no_space=True)
    assert q.states.of(0) is FileState.REFUSED
    assert q.source.next(9, 1.0) == []
    assert q.request(4, 1.0).reason is Reason.FULL
    assert q.done(1, 10, 1.0)
    assert q.settled


def looks(q, found, *moments):
    """The program has these files open at the source at each moment: the time, and what it has read until then from
    open files that go on with the copy."""
    for now, movable in moments:
        for id_ in found:
            q.large.reads.here(id_, now)
        q.large.looked(found, BytesRead(now, 10 * LARGE, 0, movable))


def given_up(q, ids, now):
    """Copies have begun beside the program, and are given up."""
    assert q.source.next(9, now) == ids
    for id_ in ids:
        q.source.defer(id_, now)
        q.large.hidden(id_)


def test_a_file_of_which_much_was_read_is_copied_as_long_as_the_program_reads_on():
    q = queue([LARGE])
    looks(q, [0], (0.0, 50), (2.0, 49 + LARGE // 8))
    assert q.source.next(9, 2.0) == []
    looks(q, [0], (2.5, 50 + LARGE // 8))
    assert q.large.priority(0, 2.5) is Priority.BELOW_CALLS
    assert not q.large.is_read_in_order(0)
    assert q.source.next(9, 2.5) == [0]
    q.large.followed.look(lambda _: (0, 0), BytesRead(4.0, LARGE // 2, LARGE // 2))
    assert q.large.read_meanwhile(4.0) == [], "it is too early to say"
    q.large.followed.look(lambda _: (0, 0), BytesRead(5.6, LARGE, LARGE // 2))
    assert q.large.read_meanwhile(5.6) == []
    q.large.followed.look(lambda _: (0, 0), BytesRead(7.2, LARGE, LARGE // 2))
    looks(q, [0], (7.2, LARGE // 2))
    assert q.large.read_meanwhile(7.2) == [0], "the program read nothing more, and nothing was copied"


def test_what_the_program_reads_is_copied_before_what_nobody_reads():
    q = queue([LARGE, LARGE])
    looks(q, [0], (0.0, 0), (2.0, 0))
    assert q.source.next(9, 2.0) == [1], "it is copied beside the program"
    looks(q, [0], (2.5, LARGE // 8))
    assert q.source.next(9, 2.5) == [0], "the program does not wait for the copy of a file that it may never read"
    assert q.large.slowing(2.5) == [1]
    q.source.take_back(1)
    assert (q.source.next(9, 2.6), q.large.slowing(2.6)) == ([], [])
    q.done(0, LARGE, 3.0)
    q.large.hidden(0)
    looks(q, [], (9.0, LARGE))
    assert q.source.next(9, 9.0) == [1]


def test_a_file_of_which_much_was_read_in_page_faults_is_copied_and_nobody_waits_for_that():
    read = [0] * 3
    q = queue([LARGE, LEAST_BYTES, 10], read=read)
    looks(q, [0, 1], (0.0, 0), (2.0, 0))
    assert q.large.may_be_led(2.0) == [0], "it is read at the source, and large"
    q.large.read_by_faults(0, 2.0)
    assert (q.large.may_be_led(2.0), q.large.priority(0, 2.0)) == ([], Priority.BELOW_CALLS)
    assert q.source.next(9, 2.0) == [0, 1, 2]
    assert q.large.followed.yielding == {0}
    read[0] = LARGE - 1
    assert not q.large.is_worth_waiting(0, 2.5), "it waits for who waits"
    q.large.followed.look(lambda _: (0, 0), BytesRead(9.0, 0, 10))
    looks(q, [0, 1], (9.0, 0))
    assert 0 not in q.large.read_meanwhile(9.0)


def test_on_several_nodes_no_file_is_copied_beside_who_has_it_mapped():
    q = queue([LARGE], shared=True)
    looks(q, [0], (0.0, 0), (2.0, 0))
    assert q.large.may_be_led(2.0) == []


def test_a_file_that_the_program_reads_again_is_copied():
    q = queue([LARGE])
    looks(q, [0], (0.0, 50), (2.0, LARGE // 2))
    given_up(q, [0], 2.0)
    looks(q, [0], (4.0, 50 + LARGE - 1))
    assert q.source.next(9, 4.0) == [], "the program has not read all of it"
    looks(q, [0], (5.0, 50 + LARGE))
    assert q.source.next(9, 5.0) == [0]
    assert q.large.priority(0, 5.0) is Priority.FULL, "now it is copied whether the program reads or not"
    assert list(q.large.read_again) == [0]
    assert q.large.read_meanwhile(5.0) == []
    assert 0 not in q.large.deferred


def test_a_file_that_the_program_reads_in_order_is_copied_once_as_long_as_that_pays():
    q = queue([LARGE, LARGE])
    looks(q, [0, 1], (0.0, 0), (1.0, 0))
    q.large.read_in_order(0, LARGE // 8 - 1)
    assert q.source.next(9, 1.0) == []
    q.large.read_in_order(0, LARGE // 8)
    assert q.source.next(9, 1.0) == [0]
    looks(q, [0, 1], (2.0, 0))
    assert (q.large.read_meanwhile(2.0), q.large.slowing(2.0)) == ([], [])
    q.large.followed.look(lambda _: (0, 100), BytesRead(2.9, 0, 0))
    assert set(q.large.followed.ids) == {0}, "it has to overtake the program first"
    q.large.followed.look(lambda _: (0, 100), BytesRead(3.1, 0, 0))
    looks(q, [0, 1], (3.1, 0))
    assert (q.large.read_meanwhile(3.1), q.large.followed.yielding) == ([], {0})
    q.large.followed.look(lambda _: (0, 200), BytesRead(4.7, 0, 0))
    looks(q, [0, 1], (4.7, 0))
    assert q.large.read_meanwhile(4.7) == [0]
    q.source.defer(0, 4.7)
    q.large.hidden(0)
    q.large.read_in_order(0, LARGE // 2)
    assert q.source.next(9, 4.7) == [], "not again"


def test_of_several_open_files_none_is_read_again_before_all_could_have_been():
    q = queue([LARGE, LARGE, 10])
    looks(q, [0, 1], (0.0, 0), (2.0, LARGE // 4 - 1))
    assert q.source.next(9, 2.0) == [2]
    looks(q, [0, 1], (3.0, LARGE // 4))
    given_up(q, [0, 1], 3.0)
    looks(q, [0, 1], (4.0, 2 * LARGE - 1))
    assert q.source.next(9, 4.0) == []
    looks(q, [0, 1], (5.0, 2 * LARGE))
    assert q.source.next(9, 5.0) == [0, 1]
    looks(q, [1], (6.0, 2 * LARGE))
    looks(q, [0, 1], (7.0, 2 * LARGE))
    assert q.large.read_meanwhile(7.0) == [0], "it was opened anew"


def test_a_copy_under_way_is_given_up_when_the_program_opens_the_file():
    read = [0, 0]
    q = queue([LARGE, LARGE], read=read)
    assert q.source.next(9, 0.0) == [0, 1]
    read[:] = [LARGE // 2] * 2
    assert q.request(0, 3.0).kind is AnswerKind.DIRECT
    assert q.large.read_meanwhile(3.0) == [0]
    assert q.source.defer(0, 3.0)
    assert not q.source.defer(0, 3.0)
    assert q.states.of(0) is FileState.WAITING
    assert q.budget.used_bytes == LARGE, "the other one's"
    assert q.source.next(9, 3.0) == []


def test_what_is_nearly_there_is_waited_for():
    read = [12345]
    q = queue([LARGE], read=read)
    q.source.next(1, 0.0)
    read[0] += LARGE * 9 // 10
    assert q.request(0, 9.0).kind is AnswerKind.WAIT
    assert q.request(0, 18.0).kind is AnswerKind.DIRECT, "a tenth takes two seconds at this pace"


def test_no_more_is_copied_ahead_than_is_read_at_the_source():
    q = queue([LARGE] * 5)
    looks(q, [0], (0.0, 0), (2.0, 0))
    assert q.source.next(9, 2.0) == [1]
    assert q.done(1, LARGE, 5.0)
    q.large.reads.here(0, 6.0)
    assert q.source.next(9, 6.0) == [], "nobody has opened the copy"
    q.large.ahead.discard(1)
    assert q.source.next(9, 6.0) == [2]
    assert q.done(2, LARGE, 11.0)
    assert q.source.next(9, 11.1) == [3], "nothing is read at the source any more: as many at a time as were read so"


def test_a_large_file_is_tried_a_few_times_only():
    q = queue([LARGE])
    tries = 0
    for now in range(0, 100, 10):
        tries += len(q.source.next(1, now))
        q.request(0, now)
        q.source.defer(0, now)
    assert tries == MOST_TRIES


def test_no_other_large_file_is_copied_while_programs_of_other_nodes_alone_read_one():
    """What they lose by it is not known here. What is asked of other nodes goes on: they know."""
    q = queue([LARGE] * 4, shared=True)
    assert q.source.next(2, 0.0) == [0, 1]
    q.large.read_elsewhere([0], 3, 0.1)
    looks(q, [], (0.2, 0), (3.0, 0))
    assert (q.large.read_meanwhile(0.3), q.large.slowing(0.3)) == ([0], [1])
    q.flights.asked[1] = False
    assert q.large.slowing(0.3) == []
    assert q.source.next(9, 0.3) == []
    assert q.source.next(9, 0.2 + LET_GO_S) == [2, 3], "nobody told that it is still read"


def test_what_a_daemon_sees_of_programs_of_another_virtual_node_is_not_judged_by():
    """Both say that the file is read; here no program has opened it, and none reads what is counted."""
    q = queue([LARGE] * 3, shared=True)
    q.large.read_elsewhere([0], 1, 0.0)
    looks(q, [0], (0.0, 0), (2.0, 0))
    assert q.source.next(9, 2.0) == []
    q.large.reads.opened(0, 2.0)
    looks(q, [0], (2.0, 0), (4.0, 0))
    assert q.source.next(9, 4.0) == [1]


def test_a_request_waits_longer_in_a_node_group():
    assert queue([10]).request(0, 0.0).deadline < 1.0
    assert queue([10], shared=True).request(0, 0.0).deadline >= 2.0


def test_deadline_follows_from_size_and_rate():
    q = queue([10_000_000, 1000], request_cap_s=60, patience_s=20)
    q.source.estimates.stream_bytes_per_s = 10e6
    fast = q.request(1, 0.0).deadline
    slow = q.request(0, 0.0).deadline
    assert slow > 3
    assert fast < slow


def test_deadline_stays_below_half_the_cap():
    q = queue([10_000_000], request_cap_s=4, patience_s=20)
    q.source.estimates.stream_bytes_per_s = 10e6
    assert q.request(0, 10.0).deadline == pytest.approx(12.0)


def test_requeued_goes_first():
    """Also before what the program waits for since: it has waited longer."""
    q = queue([10] * 5)
    q.source.next(2, 0.0)
    q.request(3, 0.0)
    q.request(4, 0.0)
    q.source.requeue(1)
    assert q.source.next(9, 0.0) == [1, 3, 4, 2]


def test_rate_cap_holds_over_time():
    q = queue([1000] * 1000, max_rate_bytes_per_s=10_000.0)
    now, handed = 0.0, 0
    while now < 20:
        for id_ in q.source.next(50, now):
            handed += 1
            q.done(id_, 1000, now)
        now += max(q.source.wake_after(now) or 0.0, 0.001)
    assert handed * 1000 == pytest.approx(10_000 * 20, rel=0.05)


def test_the_rate_cap_keeps_back_nothing_that_a_program_waits_for():
    """The program would read it itself, at once; what is copied so counts."""
    q = queue([1000] * 1000, max_rate_bytes_per_s=10_000.0)
    copied_ahead = len(q.source.next(50, 0.0))
    assert 0 < copied_ahead < 10
    assert q.source.next(50, 0.0) == []
    assert q.request(900, 0.0).kind is AnswerKind.WAIT
    assert q.source.next(50, 0.0) == [900]
    wanted = [q.request(id_, 0.1) for id_ in range(500, 600)]
    assert {decision.kind for decision in wanted} == {AnswerKind.WAIT}, "though the cap would admit the last in 10 s"
    assert q.source.next(500, 0.1) == [*range(500, 600)]
    assert q.source.next(50, 9.9) == [], "the program has had what might be copied until now"
    assert q.source.next(50, 10.4) != []


def test_a_large_file_that_was_waited_for_is_deferred_under_a_cap_too():
    q = queue([1000, LARGE], max_rate_bytes_per_s=10_000.0)
    assert q.source.next(9, 0.0) == [0, 1]
    q.large.reads.here(1, 0.1)
    q.source.requeue(1)
    assert q.source.next(9, 0.1) == [], "the program reads it at the source"


def test_passing_over_is_bounded():
    q = queue([8 * 4096] * (3 * LOOK_LIMIT) + [1], budget=Budget(4 * 4096, 1 << 30))
    rounds = 0
    while not (chosen := q.source.next(1, 0.0)):
        rounds += 1
        assert q.states.waiting
    assert chosen == [3 * LOOK_LIMIT]
    assert rounds == 3


def test_a_million_ids_quickly():
    count = 1_000_000
    start = time.process_time()
    q = queue(array("Q", [100_000]) * count, array("I", range(count - 1, -1, -1)))
    for _ in range(200):
        for id_ in q.source.next(100, 0.0):
            q.done(id_, 100_000, 0.1)
    for id_ in range(0, 100_000, 5):
        q.request(id_, 0.2)
    assert time.process_time() - start < 3
    assert q.states.count(FileState.STORED) == 20_000


def test_what_the_program_has_read_at_the_source_is_copied_last():
    q = queue([LARGE] * 6)
    for id_ in (0, 1):
        q.request(id_, 0.0)
    looks(q, [0, 1], (0.0, 0), (2.0, 0))
    found = []
    for now in (2.0, 7.1, 12.2):
        found += (ids := q.source.next(9, now))
        for id_ in ids:
            q.done(id_, LARGE, now)
    assert found == [2, 3, 4, 5, 0, 1]


def test_a_file_that_keeps_the_source_busy_for_a_moment_is_large():
    q = queue([80_000_000])
    q.source.estimates.all_bytes_per_s = 200e6
    assert q.request(0, 0.0).reason is Reason.LARGE
