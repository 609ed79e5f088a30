"""What the queue of a node in a group decides, one by one."""

from __future__ import annotations

from array import array

from hpcstage.daemon.queue.freebudget import TemporaryCopies
from hpcstage.daemon.queue.queue import Queue
from hpcstage.daemon.queue.rates import AnswerKind, Limits
from hpcstage.daemon.queue.states import FileState, NodeShare
from hpcstage.plan.budget import for_temporary
from hpcstage.plan.rule import FileReads
from hpcstage.plan.types import Budget
from hpcstage.protocol.shim import Reason

PLENTY = Budget(1 << 60, 1 << 40)
MANY = 1 << 50


def queue(sizes, share, budget=PLENTY, *, linked=True, read_of=lambda _: 0):
    q = Queue(array("Q", sizes), Limits(budget, shared=True), read_of=read_of)
    q.divide(share)
    q.from_peers.linked = linked
    return q


def test_each_kind_in_its_order_and_requests_first():
    q = queue([10] * 8, NodeShare([0, 2, 4, 6]))
    q.sequences.push([7, 6, 5])
    assert q.request(3, 0.0).kind is AnswerKind.WAIT
    assert q.request(4, 0.0).kind is AnswerKind.WAIT
    assert q.source.next(9, 0.0) == [4, 6, 0, 2]
    assert q.from_peers.next(9, MANY, 0.0) == [3, 7, 5, 1]
    assert not q.settled


def test_what_others_ask_for_takes_turns_with_the_order():
    q = queue([10] * 9, NodeShare(range(9)))
    q.source.turns = 2
    for id_ in (8, 7, 6, 5):
        assert q.source.asked(id_) is AnswerKind.WAIT
    assert q.request(3, 0.0).kind is AnswerKind.WAIT
    assert q.source.next(9, 0.0) == [3, 8, 7, 0, 6, 5, 1, 2, 4]


def test_asked_for_what_is_here_and_what_never_will_be():
    q = queue([10] * 4, NodeShare([0, 1]))
    assert q.source.next(1, 0.0) == [0]
    q.done(0, 10, 1.0)
    assert q.source.asked(0) is AnswerKind.READY
    assert q.source.asked(2) is AnswerKind.DIRECT, "another node's: two nodes would wait for each other"
    q.void([1])
    assert q.source.asked(1) is AnswerKind.DIRECT
    q.states.close(Reason.FULL)
    assert q.source.asked(3) is AnswerKind.DIRECT


def test_missed_comes_from_the_source_next():
    q = queue([10] * 6, NodeShare([0, 1]))
    assert q.from_peers.next(2, MANY, 0.0) == [2, 3]
    assert q.source.asked(1) is AnswerKind.WAIT
    q.from_peers.missed(3, requested=False)
    assert q.request(2, 0.0).kind is AnswerKind.WAIT
    q.from_peers.missed(2, requested=True)
    assert q.source.next(9, 0.0) == [2, 1, 3, 0]


def test_without_a_link_requests_come_from_the_source_and_the_rest_waits():
    q = queue([10] * 4, NodeShare([0]), linked=False)
    assert q.source.next(9, 0.0) == [0]
    assert q.from_peers.next(9, MANY, 0.0) == []
    assert q.request(2, 0.0).kind is AnswerKind.WAIT
    assert q.source.next(9, 0.0) == [2]
    assert not q.settled
    q.divide(None)
    assert q.source.next(9, 0.0) == [1, 3]


def test_the_end_of_the_link():
    q = queue([10] * 6, NodeShare([0]))
    assert q.from_peers.next(3, MANY, 0.0) == [1, 2, 3]
    assert q.request(5, 0.0).kind is AnswerKind.WAIT
    q.from_peers.unlink(lambda id_: id_ == 2)
    assert q.source.next(9, 0.0) == [2, 5, 0] or q.source.next(9, 0.0) == []
    q.from_peers.linked = True
    assert q.from_peers.next(9, MANY, 1.0) == [1, 3, 4], "asked for again, first of all"


def test_partition_keeps_its_own_and_lets_the_rest_pass_through():
    temporary = Budget(2 * 4096, 10)
    q = queue([4096] * 6, NodeShare([0, 1], temporary=temporary), Budget(4 * 4096, 100))
    assert q.source.next(9, 0.0) == [0, 1]
    assert q.from_peers.next(9, MANY, 0.0) == [], "on demand only"
    for id_ in (0, 1):
        q.done(id_, 4096, 0.0)
    assert q.settled
    assert q.states.count(FileState.REMOTE) == 4
    for id_ in (2, 3, 4):
        assert q.request(id_, 1.0).kind is AnswerKind.WAIT
        assert q.from_peers.next(9, MANY, 1.0) == [id_]
        assert q.done(id_, 4096, 1.0)
    assert q.budget.temporary.dropped == [2]
    assert q.states.of(2) is FileState.REMOTE
    assert q.states.of(0) is q.states.of(3) is q.states.of(4) is FileState.STORED
    assert q.budget.used_bytes == 4 * 4096


def test_a_full_store_does_not_end_what_passes_through():
    q = queue([4096] * 6, NodeShare([0, 1, 2], temporary=Budget(4096, 10)), Budget(3 * 4096, 100))
    assert q.source.next(9, 0.0) == [0, 1]
    assert q.states.of(2) is FileState.REFUSED
    assert q.request(4, 0.0).kind is AnswerKind.WAIT
    assert q.from_peers.next(9, MANY, 0.0) == [4]


def test_what_is_larger_than_the_share_is_read_directly():
    q = queue([4096, 3 * 4096], NodeShare([0], temporary=Budget(4096, 10)))
    assert q.request(1, 0.0).reason is Reason.FULL
    assert q.states.of(1) is FileState.REMOTE


def test_the_end_of_staging_does_not_count_as_a_lack_of_budget():
    q = queue([4096] * 8, NodeShare([0, 1, 2], unplaced=[7], temporary=Budget(4096, 10)), Budget(3 * 4096, 100))
    assert q.source.next(9, 0.0) == [0, 1]
    assert q.states.unplaced == q.states.count(FileState.REFUSED) == 2
    q.source.requeue(1)
    q.states.close(Reason.LATER)
    assert q.states.count(FileState.REFUSED) == 3
    assert q.request(1, 0.0).reason is Reason.LATER
    q.void([1, 2, 7])
    assert q.states.unplaced == 2


def test_what_other_nodes_keep_is_not_forgotten_after_many_orders():
    q = queue([4096] * 20, NodeShare([0, 1], temporary=Budget(1 << 20, 10)))
    for start in range(15):
        q.sequences.push([start])
    q.divide(None)
    assert sorted(q.source.next(99, 0.0)) == list(range(20))
    assert not q.states.waiting


def test_nodes_begin_at_their_place():
    q = Queue(array("Q", [10] * 8), Limits(PLENTY, shared=True), array("I", range(8)))
    q.sequences.start_at(4)
    q.divide(NodeShare([0, 2, 4, 6]))
    q.from_peers.linked = True
    assert q.source.next(9, 0.0) == [4, 6, 0, 2]
    assert q.from_peers.next(9, MANY, 0.0) == [5, 7, 1, 3]


def test_dealt_anew_keeps_what_is_here():
    q = queue([10] * 4, NodeShare([0, 1]))
    q.source.next(2, 0.0)
    q.done(0, 10, 1.0)
    q.divide(NodeShare([2, 3]))
    assert q.states.of(0) is FileState.STORED
    assert not q.states.is_from_peer(1), "it is being copied"
    assert q.from_peers.next(9, MANY, 1.0) == []
    assert q.source.next(9, 1.0) == [2, 3]


def test_temporary_share():
    assert for_temporary(Budget(100 << 30, 10**6)).size_bytes == 10 << 30
    assert for_temporary(Budget(512 << 20, 10**6)).size_bytes == 64 << 20
    assert for_temporary(Budget(8 << 20, 100)) == Budget(2 << 20, 25)
    temporary = TemporaryCopies()
    temporary.limit = Budget(100, 2)
    temporary.take(1, 60)
    assert not temporary.fits(60)
    temporary.landed(1, ahead=False)
    assert temporary.fits(60)
    temporary.take(2, 60)
    assert temporary.surplus() == 1
    assert temporary.give_back(1)
    assert temporary.surplus() is None
    assert not temporary.give_back(1)


def test_ahead_of_a_program_that_said_what_it_reads():
    q = queue([4096] * 10, NodeShare([0], temporary=Budget(3 * 4096, 10)))
    q.source.next(9, 0.0)
    q.done(0, 4096, 0.0)
    assert q.states.waits(5)
    q.sequences.push([5, 4, 3, 2, 1, 0], "announced")
    assert q.from_peers.next(2, MANY, 0.0) == [5, 4]
    assert q.from_peers.next(9, MANY, 0.0) == [3]
    assert q.from_peers.is_stalled
    for id_ in (5, 4, 3):
        q.done(id_, 4096, 1.0)
    assert q.from_peers.next(9, MANY, 1.0) == [], "none of them was read"
    assert q.budget.temporary.oldest_unread(9) == [5, 4, 3]
    q.budget.temporary.read([5])
    assert q.from_peers.next(9, MANY, 1.0) == [2]
    assert q.budget.temporary.dropped == [5]
    assert q.request(9, 1.0).kind is AnswerKind.WAIT
    assert q.from_peers.next(9, MANY, 1.0) == [9], "what is requested goes before what is ahead"
    assert q.states.of(4) is FileState.REMOTE
    assert not q.from_peers.next(9, MANY, 1.0)


LARGE = 100 << 20


def test_what_another_node_reads_at_the_source_is_not_copied_and_not_waited_for():
    q = queue([LARGE, 10], NodeShare([0, 1]))
    assert q.source.asked(0) is AnswerKind.WAIT
    q.large.read_elsewhere([0, 7], 1, 1.0)
    assert q.from_peers.is_deferred(0, 1.0), "who asked is told to come again"
    assert q.source.next(9, 1.0) == [1]
    assert q.source.next(9, 6.1) == [0], "nobody told that it is still read"
    assert not q.from_peers.is_deferred(0, 6.1)


def test_a_copy_is_given_up_when_another_node_reads_the_file_unless_it_is_nearly_here():
    read = [0, 0]
    q = queue([LARGE, LARGE], NodeShare([0, 1]), read_of=read.__getitem__)
    assert q.source.next(9, 0.0) == [0, 1]
    read[:] = LARGE // 10, LARGE * 9 // 10
    q.large.read_elsewhere([0, 1], 1, 3.0)
    assert q.large.given_up(lambda _: FileReads(LARGE), 3.0) == [0]
    assert q.source.given_up(0, 3.0)
    assert q.from_peers.is_deferred(0, 3.0)


def test_a_large_file_is_not_asked_for_while_it_is_read():
    q = queue([LARGE, 10, LARGE], NodeShare([]))
    q.large.reads.here(0, 0.0)
    assert q.from_peers.next(9, MANY, 0.0) == [1, 2]
    assert q.large.deferred == {0}
    q.from_peers.deferred_by_peer(2, 0.0)
    assert q.request(2, 1.0).reason is Reason.LARGE
    assert q.from_peers.next(9, MANY, 5.0) == [0]
    assert q.from_peers.next(9, MANY, 6.1) == [2]
    assert q.done(0, LARGE, 7.0)
    assert not q.large.deferred & {0}


def test_what_is_left_to_programs_and_whether_one_of_this_node_read_it():
    q = queue([LARGE] * 4, NodeShare([3]))
    q.large.reads.here(0, 0.0)
    q.large.read_elsewhere([1, 3], 2, 0.0)
    assert q.source.next(9, 0.0) == []
    assert q.from_peers.next(9, MANY, 0.0) == [2]
    q.from_peers.deferred_by_peer(2, 0.1)
    assert q.large.uncopied == {0, 1, 3}, "no program reads the other one"
    assert set(filter(q.large.reads.was_here, q.large.uncopied)) == {0}
    q.large.reads.here(1, 0.0)
    assert q.request(3, 0.0).reason is Reason.LARGE
    assert set(filter(q.large.reads.was_here, q.large.uncopied)) == {0, 3}, "the other may be a program of that node"
    assert sorted(q.from_peers.next(9, MANY, 5.1)) == [0, 1, 2]
    assert q.large.uncopied == {3}, "the copies of the others are under way"
    q.large.reads.here(0, 5.2)
    q.from_peers.deferred_by_peer(0, 5.2)
    assert q.large.uncopied == {0, 3}
    q.void([3])
    q.states.close(Reason.LATER)
    assert q.large.uncopied == {0}


def test_a_large_copy_of_another_node_is_waited_for_where_it_comes_sooner_than_from_the_source():
    q = queue([LARGE, LARGE], NodeShare([], temporary=Budget(1 << 40, 10)))
    assert q.request(0, 0.0).kind is AnswerKind.WAIT
    assert q.large.reads.untold(0.0) == [0], "who has it says whether it can be had now"
    assert q.from_peers.next(9, MANY, 0.0) == [0]
    q.from_peers.deferred_by_peer(0, 0.1)
    assert q.states.of(0) is FileState.REMOTE
    assert q.request(0, 0.1).reason is Reason.LARGE
    q.from_peers.estimates.stream_bytes_per_s = 1e6
    assert q.request(1, 0.1).reason is Reason.LARGE


def test_other_nodes_are_told_now_and_then_what_is_read_here():
    q = queue([LARGE], NodeShare([0]))
    for tenth in range(25):
        q.request(0, tenth / 10)
        assert q.large.reads.untold(tenth / 10) == ([0] if tenth % 10 == 0 else [])
