"""When a node begins with its part of a file that is divided, and what programs are told of such a file."""

from __future__ import annotations

from hpcstage.daemon.queue.queue import Queue
from hpcstage.daemon.queue.rates import AnswerKind, Limits
from hpcstage.daemon.queue.sourcereads import LET_GO_S
from hpcstage.daemon.queue.states import FileState, NodeShare
from hpcstage.plan.types import Budget
from hpcstage.protocol.arriving import Priority
from hpcstage.protocol.shim import Reason

MB = 1 << 20
ROOM = 90 * MB
SMALL, LARGE = 0, 1


def queue_of(own: tuple[int, ...] = (SMALL,), budget: int = 130 * MB, *, is_divided: bool = True) -> Queue:
    queue = Queue((1000, 120 * MB), Limits(Budget(budget, 100), shared=True))
    queue.divide(share(own, is_divided=is_divided))
    return queue


def share(own: tuple[int, ...] = (SMALL,), *, is_divided: bool = True) -> NodeShare:
    unplaced, rooms = ((), {LARGE: ROOM}) if is_divided else ((LARGE,), {})
    return NodeShare(own, (), unplaced, Budget(30 * MB, 20), rooms, 1, 2)


def test_it_begins_when_nothing_else_waits() -> None:
    queue = queue_of()
    divided = queue.divided
    assert divided.next(0.0) == []
    assert (queue.source.next(10, 0.0), queue.settled) == ([SMALL], False)
    assert queue.done(SMALL, 1000, 1.0)
    assert not queue.settled, "it will begin"
    used = queue.budget.used_bytes
    assert divided.next(1.0) == [LARGE]
    assert queue.budget.used_bytes - used == ROOM
    assert (divided.place, divided.nodes) == (1, 2)
    assert divided.next(1.0) == []
    assert not queue.settled
    divided.whole(LARGE, 60 * MB)
    assert queue.settled
    assert queue.states.count(FileState.REFUSED) == 0


def test_it_begins_when_a_program_reads_it() -> None:
    for here in (True, False):
        queue = queue_of()
        if here:
            decision = queue.request(LARGE, 0.0)
            assert (decision.kind, decision.reason) == (AnswerKind.DIRECT, Reason.LARGE)
            assert queue.large.reads.untold(0.0) == [LARGE], "other nodes hear of that"
        else:
            queue.large.read_elsewhere((LARGE,), 0, 0.0)
        assert queue.divided.next(0.0) == [LARGE]
        assert queue.divided.priority(LARGE, 0.0) is (Priority.BELOW_PROGRAMS if here else Priority.BELOW_OTHER_NODES)
        assert queue.divided.priority(LARGE, LET_GO_S) is Priority.FULL


def test_it_needs_room() -> None:
    queue = queue_of((), budget=ROOM + 29 * MB)
    assert queue.divided.next(0.0) == []
    assert queue.settled, "nothing will come"
    assert queue.request(LARGE, 0.0).kind is AnswerKind.DIRECT


def test_what_is_not_divided_is_as_before() -> None:
    queue = queue_of(is_divided=False)
    assert queue.divided.next(0.0) == []
    assert queue.states.of(LARGE) is FileState.REFUSED
    assert queue.request(LARGE, 0.0).reason is Reason.FULL


def test_a_write_ends_it() -> None:
    queue = queue_of(())
    used = queue.budget.used_bytes
    assert queue.divided.next(0.0) == [LARGE]
    assert queue.void((LARGE,)) == [LARGE], "its transfer is to be cancelled"
    assert queue.request(LARGE, 0.0).reason is Reason.VOID
    assert queue.divided.end(LARGE)
    assert queue.budget.used_bytes == used
    assert (queue.divided.next(0.0), queue.settled) == ([], True)
    again = queue_of(())
    assert again.divided.next(0.0) == [LARGE]
    assert again.void_range(range(2))[1] == [LARGE]


def test_what_has_begun_goes_on_whoever_is_there() -> None:
    queue = queue_of(())
    assert queue.divided.next(0.0) == [LARGE]
    for later in (None, share((), is_divided=False), share((SMALL, LARGE), is_divided=False), share(())):
        queue.divide(later)
        assert queue.states.of(LARGE) is FileState.REMOTE
        assert LARGE not in queue.source.next(10, 0.0)
        assert queue.request(LARGE, 0.0).reason is Reason.LARGE
    assert (queue.divided.place, queue.divided.nodes) == (1, 2)


def test_without_a_group_nothing_is_divided() -> None:
    queue = queue_of(())
    queue.divide(None)
    assert queue.divided.next(0.0) == []
    assert queue.states.of(LARGE) is FileState.WAITING
    assert LARGE in queue.source.next(10, 0.0) or queue.states.of(LARGE) is FileState.REFUSED


def test_what_was_lost_begins_again_and_what_failed_does_not() -> None:
    queue = queue_of(())
    assert queue.divided.next(0.0) == [LARGE]
    assert queue.divided.end(LARGE)
    assert not queue.divided.end(LARGE)
    assert queue.divided.next(0.0) == [LARGE]
    queue.divided.leave_out(LARGE)
    assert queue.divided.next(0.0) == []
    assert queue.settled
