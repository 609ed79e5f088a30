"""What the queue of a node in a group decides, one by one."""

from __future__ import annotations

from array import array

import pytest

from hpcstage.daemon.queue.freebudget import TemporaryCopies
from hpcstage.daemon.queue.queue import SHORTEST_PEER_WAIT_S, Queue
from hpcstage.daemon.queue.rates import AnswerKind, Limits
from hpcstage.daemon.queue.states import LOOK_LIMIT, SOURCE_WAITS, FileState, NodeShare
from hpcstage.plan.budget import for_temporary
from hpcstage.plan.rule import FileReads
from hpcstage.plan.types import Budget
from hpcstage.protocol.shim import Reason

PLENTY = Budget(1 << 60, 1 << 40)
MANY = 1 << 50


def queue(sizes, share, budget=PLENTY, *, linked=True, read_of=lambda _: 0):
    q = Queue(array("Q", sizes), Limits(budget, shared=True), read_of=read_of)
    q.divide(share)
    q.linked = linked
    return q


def test_each_kind_in_its_order_and_requests_first():
    q = queue([10] * 8, NodeShare([0, 2, 4, 6]))
    q.sequences.push([7, 6, 5])
    assert q.request(3, 0.0).kind is AnswerKind.WAIT
    assert q.request(4, 0.0).kind is AnswerKind.WAIT
    assert q.next(9, 0.0) == [4, 6, 0, 2]
    assert q.next_from_peers(9, MANY, 0.0) == [3, 7, 5, 1]
    assert not q.settled


def test_what_others_ask_for_takes_turns_with_the_order():
    q = queue([10] * 9, NodeShare(range(9)))
    q.turns = 2
    for id_ in (8, 7, 6, 5):
        assert q.asked_for(id_) is AnswerKind.WAIT
    assert q.request(3, 0.0).kind is AnswerKind.WAIT
    assert q.next(9, 0.0) == [3, 8, 7, 0, 6, 5, 1, 2, 4]


def test_asked_for_what_is_here_and_what_never_will_be():
    q = queue([10] * 4, NodeShare([0, 1]))
    assert q.next(1, 0.0) == [0]
    q.done(0, 10, 1.0)
    assert q.asked_for(0) is AnswerKind.READY
    assert q.asked_for(2) is AnswerKind.DIRECT, "another node's: two nodes would wait for each other"
    q.void([1])
    assert q.asked_for(1) is AnswerKind.DIRECT
    q.states.close(Reason.FULL)
    assert q.asked_for(3) is AnswerKind.DIRECT


def test_missed_comes_from_the_source_next():
    q = queue([10] * 6, NodeShare([0, 1]))
    assert q.next_from_peers(2, MANY, 0.0) == [2, 3]
    assert q.asked_for(1) is AnswerKind.WAIT
    q.missed(3, requested=False)
    assert q.request(2, 0.0).kind is AnswerKind.WAIT
    q.missed(2, requested=True)
    assert q.next(9, 0.0) == [2, 1, 3, 0]


def test_without_a_link_requests_come_from_the_source_and_the_rest_waits():
    q = queue([10] * 4, NodeShare([0]), linked=False)
    assert q.next(9, 0.0) == [0]
    assert q.next_from_peers(9, MANY, 0.0) == []
    assert q.request(2, 0.0).kind is AnswerKind.WAIT
    assert q.next(9, 0.0) == [2]
    assert not q.settled
    q.divide(None)
    assert q.next(9, 0.0) == [1, 3]


def test_the_end_of_the_link():
    q = queue([10] * 6, NodeShare([0]))
    assert q.next_from_peers(3, MANY, 0.0) == [1, 2, 3]
    assert q.request(5, 0.0).kind is AnswerKind.WAIT
    q.unlink(lambda id_: id_ == 2)
    assert q.next(9, 0.0) == [2, 5, 0] or q.next(9, 0.0) == []
    q.linked = True
    assert q.next_from_peers(9, MANY, 1.0) == [1, 3, 4], "asked for again, first of all"


def test_partition_keeps_its_own_and_lets_the_rest_pass_through():
    temporary = Budget(2 * 4096, 10)
    q = queue([4096] * 6, NodeShare([0, 1], temporary=temporary), Budget(4 * 4096, 100))
    assert q.next(9, 0.0) == [0, 1]
    assert q.next_from_peers(9, MANY, 0.0) == [], "on demand only"
    for id_ in (0, 1):
        q.done(id_, 4096, 0.0)
    assert q.settled
    assert q.states.count(FileState.REMOTE) == 4
    for id_ in (2, 3, 4):
        assert q.request(id_, 1.0).kind is AnswerKind.WAIT
        assert q.next_from_peers(9, MANY, 1.0) == [id_]
        assert q.done(id_, 4096, 1.0)
    assert q.budget.temporary.dropped == [2]
    assert q.states.of(2) is FileState.REMOTE
    assert q.states.of(0) is q.states.of(3) is q.states.of(4) is FileState.STORED
    assert q.budget.used_bytes == 4 * 4096


def test_a_full_store_does_not_end_what_passes_through():
    q = queue([4096] * 6, NodeShare([0, 1, 2], temporary=Budget(4096, 10)), Budget(3 * 4096, 100))
    assert q.next(9, 0.0) == [0, 1]
    assert q.states.of(2) is FileState.REFUSED
    assert q.request(4, 0.0).kind is AnswerKind.WAIT
    assert q.next_from_peers(9, MANY, 0.0) == [4]


def test_what_is_larger_than_the_share_is_read_directly():
    q = queue([4096, 3 * 4096], NodeShare([0], temporary=Budget(4096, 10)))
    assert q.request(1, 0.0).reason is Reason.FULL
    assert q.states.of(1) is FileState.REMOTE


def test_the_end_of_staging_does_not_count_as_a_lack_of_budget():
    q = queue([4096] * 8, NodeShare([0, 1, 2], unplaced=[7], temporary=Budget(4096, 10)), Budget(3 * 4096, 100))
    assert q.next(9, 0.0) == [0, 1]
    assert q.states.unplaced == q.states.count(FileState.REFUSED) == 2
    q.requeue(1)
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
    assert sorted(q.next(99, 0.0)) == list(range(20))
    assert not q.states.waiting


def test_nodes_begin_at_their_place():
    q = Queue(array("Q", [10] * 8), Limits(PLENTY, shared=True), array("I", range(8)))
    q.sequences.start_at(4)
    q.divide(NodeShare([0, 2, 4, 6]))
    q.linked = True
    assert q.next(9, 0.0) == [4, 6, 0, 2]
    assert q.next_from_peers(9, MANY, 0.0) == [5, 7, 1, 3]


def test_dealt_anew_keeps_what_is_here():
    q = queue([10] * 4, NodeShare([0, 1]))
    q.next(2, 0.0)
    q.done(0, 10, 1.0)
    q.divide(NodeShare([2, 3]))
    assert q.states.of(0) is FileState.STORED
    assert not q.states.is_from_peer(1), "it is being copied"
    assert q.next_from_peers(9, MANY, 1.0) == []
    assert q.next(9, 1.0) == [2, 3]


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
    q.next(9, 0.0)
    q.done(0, 4096, 0.0)
    assert q.states.waits(5)
    q.sequences.push([5, 4, 3, 2, 1, 0], "announced")
    assert q.next_from_peers(2, MANY, 0.0) == [5, 4]
    assert q.next_from_peers(9, MANY, 0.0) == [3]
    assert q.is_stalled
    for id_ in (5, 4, 3):
        q.done(id_, 4096, 1.0)
    assert q.next_from_peers(9, MANY, 1.0) == [], "none of them was read"
    assert q.budget.temporary.oldest_unread(9) == [5, 4, 3]
    q.budget.temporary.read([5])
    assert q.next_from_peers(9, MANY, 1.0) == [2]
    assert q.budget.temporary.dropped == [5]
    assert q.request(9, 1.0).kind is AnswerKind.WAIT
    assert q.next_from_peers(9, MANY, 1.0) == [9], "what is requested goes before what is ahead"
    assert q.states.of(4) is FileState.REMOTE
    assert not q.next_from_peers(9, MANY, 1.0)


LARGE = 100 << 20


def test_what_another_node_reads_at_the_source_is_not_copied_and_not_waited_for():
    q = queue([LARGE, 10], NodeShare([0, 1]))
    assert q.asked_for(0) is AnswerKind.WAIT
    q.large.read_elsewhere([0, 7], 1, 1.0)
    assert q.is_deferred(0, 1.0), "who asked is told to come again"
    assert q.next(9, 1.0) == [1]
    assert q.next(9, 6.1) == [0], "nobody told that it is still read"
    assert not q.is_deferred(0, 6.1)


def test_a_copy_is_given_up_when_another_node_reads_the_file_unless_it_is_nearly_here():
    read = [0, 0]
    q = queue([LARGE, LARGE], NodeShare([0, 1]), read_of=read.__getitem__)
    assert q.next(9, 0.0) == [0, 1]
    read[:] = LARGE // 10, LARGE * 9 // 10
    q.large.read_elsewhere([0, 1], 1, 3.0)
    assert q.large.given_up(lambda _: FileReads(LARGE), 3.0) == [0]
    assert q.given_up(0, 3.0)
    assert q.is_deferred(0, 3.0)


def test_a_large_file_is_not_asked_for_while_it_is_read():
    q = queue([LARGE, 10, LARGE], NodeShare([]))
    q.large.reads.here(0, 0.0)
    assert q.next_from_peers(9, MANY, 0.0) == [1, 2]
    assert q.large.deferred == {0}
    q.deferred_by_peer(2, 0.0)
    assert q.request(2, 1.0).reason is Reason.LARGE
    assert q.next_from_peers(9, MANY, 5.0) == [0]
    assert q.next_from_peers(9, MANY, 6.1) == [2]
    assert q.done(0, LARGE, 7.0)
    assert not q.large.deferred & {0}


def test_what_is_left_to_programs_and_whether_one_of_this_node_read_it():
    q = queue([LARGE] * 4, NodeShare([3]))
    q.large.reads.here(0, 0.0)
    q.large.read_elsewhere([1, 3], 2, 0.0)
    assert q.next(9, 0.0) == []
    assert q.next_from_peers(9, MANY, 0.0) == [2]
    q.deferred_by_peer(2, 0.1)
    assert q.large.uncopied == {0, 1, 3}, "no program reads the other one"
    assert set(filter(q.large.reads.was_here, q.large.uncopied)) == {0}
    q.large.reads.here(1, 0.0)
    assert q.request(3, 0.0).reason is Reason.LARGE
    assert set(filter(q.large.reads.was_here, q.large.uncopied)) == {0, 3}, "the other may be a program of that node"
    assert sorted(q.next_from_peers(9, MANY, 5.1)) == [0, 1, 2]
    assert q.large.uncopied == {3}, "the copies of the others are under way"
    q.large.reads.here(0, 5.2)
    q.deferred_by_peer(0, 5.2)
    assert q.large.uncopied == {0, 3}
    q.void([3])
    q.states.close(Reason.LATER)
    assert q.large.uncopied == {0}


def test_a_large_copy_of_another_node_is_waited_for_where_it_comes_sooner_than_from_the_source():
    q = queue([LARGE, LARGE], NodeShare([], temporary=Budget(1 << 40, 10)))
    assert q.request(0, 0.0).kind is AnswerKind.WAIT
    assert q.large.reads.untold(0.0) == [0], "who has it says whether it can be had now"
    assert q.next_from_peers(9, MANY, 0.0) == [0]
    q.deferred_by_peer(0, 0.1)
    assert q.states.of(0) is FileState.REMOTE
    assert q.request(0, 0.1).reason is Reason.LARGE
    q.peer_estimates.stream_bytes_per_s = 1e6
    assert q.request(1, 0.1).reason is Reason.LARGE


def test_other_nodes_are_told_now_and_then_what_is_read_here():
    q = queue([LARGE], NodeShare([0]))
    for tenth in range(25):
        q.request(0, tenth / 10)
        assert q.large.reads.untold(tenth / 10) == ([0] if tenth % 10 == 0 else [])


def test_what_others_ask_for_comes_though_the_order_is_at_its_end():
    q = queue([10] * 3, NodeShare(range(3)))
    q.turns = 0
    assert q.asked_for(2) is AnswerKind.WAIT
    while q.sequences.pop(SOURCE_WAITS) is not None:
        pass
    assert q.next(9, 0.0) == [2]


def test_asked_for_twice_is_read_once():
    q = queue([10] * 4, NodeShare(range(4)))
    q.turns = 2
    assert q.asked_for(3) is q.asked_for(3) is AnswerKind.WAIT
    assert q.request(3, 0.0).kind is AnswerKind.WAIT
    assert q.asked_for(3) is AnswerKind.WAIT
    assert q.next(9, 0.0) == [3, 0, 1, 2]


def test_nobody_is_told_to_wait_for_what_is_refused_later():
    q = queue([10] * 2, NodeShare([0], unplaced=[1], temporary=Budget(4096, 10)))
    assert q.next(9, 0.0) == [0]
    q.states.close(Reason.LATER)
    assert q.asked_for(0) is AnswerKind.DIRECT, "it may come to nothing"


def test_what_passes_through_is_not_asked_for_by_others():
    q = queue([10] * 2, NodeShare([0], temporary=Budget(4096, 10)))
    q.states.fetch_here(1)
    assert q.states.of(1) is FileState.REMOTE
    assert q.asked_for(1) is AnswerKind.DIRECT


def test_as_many_bytes_are_asked_for_as_may_be_and_a_larger_file_alone():
    q = queue([10, 10, 10, 50, 10], NodeShare([]))
    assert q.next_from_peers(9, 25, 0.0) == [0, 1]
    assert q.next_from_peers(9, 10, 0.0) == [2]
    assert q.next_from_peers(9, 40, 0.0) == [], "others are on their way"
    for id_ in (0, 1, 2):
        q.done(id_, 10, 1.0)
    assert q.next_from_peers(9, 40, 1.0) == [3], "it keeps its turn"


def test_a_requested_file_that_has_to_wait_stays_the_first():
    q = queue([10, 10, 50, 10], NodeShare([]))
    assert q.next_from_peers(1, MANY, 0.0) == [0]
    assert q.request(2, 0.0).kind is AnswerKind.WAIT
    assert q.request(3, 0.0).kind is AnswerKind.WAIT
    assert q.next_from_peers(9, 40, 0.0) == []
    assert list(q.peer_promoted.ids) == [2, 3]
    assert q.next_from_peers(9, MANY, 0.0) == [2, 3, 1]


def test_what_passes_through_waits_for_those_on_their_way():
    q = queue([4096] * 3, NodeShare([], temporary=Budget(4096, 10)))
    for id_ in (1, 2):
        assert q.request(id_, 0.0).kind is AnswerKind.WAIT
    assert q.next_from_peers(9, MANY, 0.0) == [1]
    assert q.next_from_peers(9, MANY, 0.0) == []
    q.done(1, 4096, 1.0)
    assert q.next_from_peers(9, MANY, 1.0) == [2]


def announced(count):
    """Other nodes keep all files, and the program said that it reads them from the first to the last."""
    q = queue([4096] * count, NodeShare([], temporary=Budget(4 * 4096, 10)))
    q.sequences.push(range(count), "announced")
    return q


def test_a_copy_that_a_program_waited_for_is_no_unread_one():
    q = announced(8)
    assert q.next_from_peers(2, MANY, 0.0) == [0, 1]
    assert q.request(0, 0.0).kind is AnswerKind.WAIT
    for id_ in (0, 1):
        q.done(id_, 4096, 1.0)
    assert q.budget.temporary.oldest_unread(9) == [1]


def test_a_copy_is_unread_once():
    q = announced(8)
    assert q.next_from_peers(1, MANY, 0.0) == [0]
    q.done(0, 4096, 0.0)
    q.budget.temporary.read([0])
    assert q.next_from_peers(4, MANY, 0.0) == [1, 2, 3, 4]
    assert q.budget.temporary.dropped == [0]
    q.missed(1, requested=True)
    assert q.request(0, 0.0).kind is AnswerKind.WAIT
    assert q.next_from_peers(4, MANY, 0.0) == [0]
    q.done(0, 4096, 0.0)
    assert q.budget.temporary.oldest_unread(9) == [], "the program waited for it this time"


def test_a_program_that_asks_for_what_is_not_here_has_read_the_oldest_copies():
    q = announced(8)
    assert q.next_from_peers(9, MANY, 0.0) == [0, 1, 2, 3]
    for id_ in range(4):
        q.done(id_, 4096, 0.0)
    assert q.request(7, 0.0).kind is AnswerKind.WAIT
    assert q.budget.temporary.oldest_unread(9) == [1, 2, 3]


def test_a_late_copy_is_taken_in_and_no_longer_doubtful():
    q = queue([10] * 3, NodeShare([]))
    assert q.next_from_peers(2, MANY, 0.0) == [0, 1]
    for id_ in (0, 1):
        q.missed(id_, requested=False, doubtful=True)
    assert q.came_late(0, 10)
    assert q.void([0, 1]) == [1], "its copy may still come"
    assert not q.came_late(1, 10)
    assert q.void([1]) == []
    assert q.states.of(0) is FileState.VOID


def test_a_doubtful_file_is_told_once():
    q = queue([10] * 4, NodeShare([3]))
    assert q.next_from_peers(3, MANY, 0.0) == [0, 1, 2]
    for id_ in (0, 1):
        q.missed(id_, requested=True, doubtful=True)
    assert q.next(1, 0.0) == [1]
    assert q.void_range(range(2))[1] == [1, 0]
    assert q.void([1]) == [], "the transfer that is under way has been told"
    assert q.void_range(range(2, 4))[1] == [2]


def test_a_late_copy_is_of_use_after_the_end_of_staging():
    q = queue([10], NodeShare([]))
    assert q.next_from_peers(1, MANY, 0.0) == [0]
    q.missed(0, requested=False, doubtful=True)
    q.states.close(Reason.LATER)
    assert q.states.of(0) is FileState.REFUSED
    assert q.came_late(0, 10)
    assert q.request(0, 0.0).kind is AnswerKind.READY


def test_what_was_asked_for_in_vain_does_not_wait_for_the_order():
    q = queue([10] * 4, NodeShare([1, 2]))
    q.sequences.push([1, 2, 3, 0])
    assert q.next_from_peers(1, MANY, 0.0) == [3]
    q.missed(3, requested=False)
    assert q.next(9, 0.0) == [3, 1, 2]


def test_a_request_is_moved_to_the_source_once_no_node_can_be_asked():
    q = queue([10] * 3, NodeShare([0]))
    assert q.request(2, 0.0).kind is AnswerKind.WAIT
    q.linked = False
    assert q.request(2, 0.0).kind is AnswerKind.WAIT
    assert q.next(9, 0.0) == [2, 0]


def test_requests_stay_the_first_when_the_files_are_dealt_anew():
    q = queue([10] * 6, NodeShare([0, 1, 2]))
    for id_ in (2, 5):
        assert q.request(id_, 0.0).kind is AnswerKind.WAIT
    q.divide(NodeShare([3, 4, 5]))
    assert q.next(9, 0.0) == [5, 3, 4]
    assert q.next_from_peers(9, MANY, 0.0) == [2, 0, 1]


def test_what_was_asked_for_before_the_link_ended_has_its_place_in_the_order_when_files_are_dealt_anew():
    q = queue([10] * 4, NodeShare([]))
    assert q.next_from_peers(1, MANY, 0.0) == [0]
    q.unlink(lambda _: False)
    q.divide(NodeShare([]))
    q.sequences.push([3, 0])
    q.linked = True
    assert q.next_from_peers(9, MANY, 0.0) == [3, 0, 1, 2]


def test_temporary_copies_of_what_a_node_keeps_from_now_on_stay():
    q = queue([4096] * 4, NodeShare([0], temporary=Budget(4096, 10)))
    assert q.request(1, 0.0).kind is AnswerKind.WAIT
    assert q.next_from_peers(1, MANY, 0.0) == [1]
    q.done(1, 4096, 0.0)
    q.divide(NodeShare([0], [1], temporary=Budget(4096, 10)))
    assert q.request(2, 0.0).kind is AnswerKind.WAIT
    assert q.next_from_peers(9, MANY, 0.0) == [2]
    q.done(2, 4096, 0.0)
    assert q.budget.temporary.dropped == []


def test_a_range_with_a_temporary_copy_is_given_back_as_a_whole():
    q = queue([4096] * 4, NodeShare([0], temporary=Budget(4096, 10)))
    assert q.request(1, 0.0).kind is AnswerKind.WAIT
    assert q.next_from_peers(1, MANY, 0.0) == [1]
    q.done(1, 4096, 0.0)
    q.void_range(range(4))
    q.budget.give_back(4096, 1)
    assert (q.budget.used_bytes, q.budget.temporary.used_bytes) == (0, 0)


def test_how_soon_a_file_comes_from_another_node_is_learnt_from_requested_ones():
    q = queue([10] * 3, NodeShare([2]))
    before = q.peer_estimates.file_s
    q.next_from_peers(1, MANY, 0.0)
    q.done(0, 10, 9.0)
    assert q.peer_estimates.file_s == before, "it lay in a queue behind others, and nobody waited"
    q.request(1, 9.0)
    q.next_from_peers(1, MANY, 9.0)
    q.done(1, 10, 18.0)
    assert q.peer_estimates.file_s > before
    assert q.estimates.file_s == before


def test_answers_that_took_long_do_not_end_the_asking():
    q = queue([10] * 2, NodeShare([0]))
    q.peer_estimates.file_s = 100.0
    decision = q.request(1, 0.0)
    assert decision.kind is AnswerKind.WAIT
    assert decision.deadline == SHORTEST_PEER_WAIT_S


def test_requests_of_this_node_do_not_delay_what_comes_from_another():
    q = queue([10, 10], NodeShare([0]))
    q.states.promoted_bytes = 1 << 40
    assert q.request(1, 0.0).kind is AnswerKind.WAIT
    assert q.request(0, 0.0).reason is Reason.LATER


def test_passing_over_what_other_nodes_have_is_bounded():
    q = queue([2 * 4096] * (2 * LOOK_LIMIT) + [1], NodeShare([]), Budget(4096, 1 << 30))
    assert q.next_from_peers(1, MANY, 0.0) == []
    assert q.states.waiting
    assert q.next_from_peers(1, MANY, 0.0) == []
    assert q.next_from_peers(1, MANY, 0.0) == [2 * LOOK_LIMIT]


def test_nothing_is_stalled_without_budget_for_what_passes_through():
    q = queue([10] * 2, NodeShare([], temporary=Budget(0, 0)))
    q.sequences.push([0, 1], "announced")
    assert q.next_from_peers(9, MANY, 0.0) == []
    assert not q.is_stalled


def test_what_runs_ahead_of_a_program_passes_over_a_large_file_that_is_read():
    q = queue([LARGE, 10], NodeShare([], temporary=Budget(1 << 40, 10)))
    q.sequences.push([0, 1], "announced")
    q.large.reads.here(0, 0.0)
    assert q.next_from_peers(9, MANY, 0.0) == [1]


def test_a_large_file_that_a_program_waits_for_is_asked_for_though_another_reads_it():
    q = queue([LARGE], NodeShare([], temporary=Budget(1 << 40, 10)))
    assert q.request(0, 0.0).kind is AnswerKind.WAIT
    q.large.reads.here(0, 0.0)
    assert q.next_from_peers(9, MANY, 0.0) == [0]


@pytest.mark.parametrize("why", ["no link", "no space", "the source is faster", "staging has ended"])
def test_when_no_program_waits_for_a_large_copy_of_another_node(why):
    space = Budget(4096 if why == "no space" else 1 << 40, 10)
    q = queue([LARGE], NodeShare([], temporary=space), linked=why != "no link")
    if why == "the source is faster":
        q.estimates.stream_bytes_per_s = 1e9
    if why == "staging has ended":
        q.states.close(Reason.LATER)
    assert q.request(0, 0.0).reason is (Reason.LATER if why == "staging has ended" else Reason.LARGE)
    assert q.states.of(0) is FileState.REMOTE
