"""Which large files are copied while programs read large files at the source."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence

import pytest

from hpcstage.daemon.queue.large import MOST_TRIES
from hpcstage.daemon.queue.queue import Queue
from hpcstage.daemon.queue.rates import AnswerKind, Limits
from hpcstage.daemon.queue.sourcereads import LET_GO_S
from hpcstage.daemon.queue.states import FileState, NodeShare
from hpcstage.plan.blocks import LARGE_BYTES
from hpcstage.plan.rule import FOLLOWED_BYTES, FileReads, Front
from hpcstage.plan.types import Budget
from hpcstage.protocol.arriving import Priority

MB = 1 << 20
LARGE = 100 * MB
Reads = Mapping[int, FileReads]


def queue(sizes: Sequence[int], read_of: Callable[[int], int] = lambda _: 0, share: NodeShare | None = None) -> Queue:
    limits = Limits(Budget(1 << 50, 1 << 40), shared=share is not None)
    q = Queue(array("Q", sizes), limits, read_of=read_of)
    if share is not None:
        q.divide(share)
        q.linked = True
    return q


def looks(q: Queue, reads: Reads, now: float) -> None:
    """Programs have these files open at the source, and have read so much of them."""
    for id_ in reads:
        q.large.reads.here(id_, now)
    q.large.look(of(reads), now)


def of(reads: Reads) -> Callable[[int], FileReads]:
    return lambda id_: reads.get(id_, FileReads(LARGE))


def begin(q: Queue, now: float) -> list[int]:
    """Begins what may begin, as an engine does that has a row for each."""
    found = q.next(9, now)
    q.large.shown.update(found)
    return found


def at(place: int, run: int, **more: int) -> FileReads:
    return FileReads(LARGE, read_bytes=run, fronts=(Front(place, run),), **more)


NOTHING, BLOCK = FileReads(LARGE), FileReads(LARGE, read_bytes=MB // 2)
FOLLOWED = at(FOLLOWED_BYTES + 1, FOLLOWED_BYTES + 1)


def test_of_large_files_only_what_programs_read_is_copied_and_only_from_a_block_on() -> None:
    q = queue([LARGE, LARGE, 10])
    looks(q, {0: NOTHING}, 1.0)
    assert begin(q, 1.0) == [2]
    looks(q, {0: FileReads(LARGE, read_bytes=MB // 2 - 1)}, 2.0)
    assert begin(q, 2.0) == []
    looks(q, {0: BLOCK}, 3.0)
    assert begin(q, 3.0) == [0]
    assert q.large.priority(0, 3.0) is Priority.ASIDE
    assert not q.large.is_worth_waiting(0, 3.0)
    assert q.large.given_up(of({0: BLOCK}), 3.0) == []
    q.done(0, LARGE, 4.0)
    q.large.hidden(0)
    q.large.look(of({}), 4.0)
    assert begin(q, 4.0) == [1], "nobody reads the source any more"
    assert q.large.priority(1, 4.0) is Priority.FULL


def test_one_file_at_a_time_stands_aside_and_followed_ones_come_besides() -> None:
    read = [0, 0, 0]
    q = queue([LARGE] * 3, read.__getitem__)
    reads = {0: BLOCK, 1: FileReads(LARGE, read_bytes=4 * MB), 2: FOLLOWED}
    looks(q, dict.fromkeys(reads, NOTHING), 0.0)
    assert begin(q, 0.0) == []
    reads[2] = at(FOLLOWED_BYTES + 1, FOLLOWED_BYTES + 1)
    looks(q, reads, 1.0)
    assert begin(q, 1.0) == [2]
    assert q.large.priority(2, 1.0) is Priority.ASIDE, "it has most credit"
    read[2] = 2 * FOLLOWED_BYTES + 2
    looks(q, reads, 2.0)
    assert begin(q, 2.0) == [1]
    assert [q.large.priority(id_, 2.0) for id_ in (1, 2)] == [Priority.ASIDE, Priority.FOLLOWS]
    read[1] = 8 * MB
    looks(q, reads, 3.0)
    assert q.large.aside == 0


def test_what_came_before_programs_read_is_no_debt() -> None:
    read = [0]
    q = queue([LARGE], read.__getitem__)
    assert begin(q, 0.0) == [0]
    read[0] = 50 * MB
    q.large.look(of({}), 1.0)
    assert q.request(0, 1.5).kind is AnswerKind.DIRECT
    looks(q, {0: BLOCK}, 2.0)
    assert q.large.given_up(of({0: BLOCK}), 2.0) == []
    assert q.large.priority(0, 2.0) is Priority.ASIDE
    read[0] = 51 * MB
    looks(q, {0: BLOCK}, 3.0)
    assert q.large.priority(0, 3.0) is Priority.FOLLOWS, "now it has none"


def test_a_copy_that_is_under_way_beside_its_reader_is_not_taken_for_one_that_comes() -> None:
    q = queue([LARGE, LARGE])
    assert begin(q, 0.0) == [0, 1]
    assert q.large.uncopied == set()
    looks(q, {0: NOTHING}, 1.0)
    assert q.large.uncopied == {0}
    q.large.look(of({}), 1.0 + LET_GO_S)
    assert q.large.uncopied == set()


def test_transfers_of_what_nobody_reads_are_given_up_and_begin_again() -> None:
    read = [0, 0]
    q = queue([LARGE, LARGE], read.__getitem__)
    assert begin(q, 0.0) == [0, 1]
    assert q.request(0, 1.0).kind is AnswerKind.DIRECT
    looks(q, {0: NOTHING}, 1.0)
    assert q.large.given_up(of({0: NOTHING}), 1.0) == [1]
    assert q.given_up(1, 1.0)
    q.large.hidden(1)
    assert begin(q, 1.0) == []
    assert q.large.uncopied == {0}, "no program reads the other one"
    q.large.look(of({}), 1.0 + LET_GO_S)
    assert begin(q, 1.0 + LET_GO_S) == [1]


def test_a_copy_goes_on_while_what_was_read_allows_it_though_the_program_has_closed_the_file() -> None:
    read = [0, 0]
    q = queue([LARGE, LARGE], read.__getitem__)
    reads = {0: at(20 * MB, 20 * MB)}
    looks(q, reads, 0.0)
    assert begin(q, 0.0)[0] == 0
    looks(q, {1: NOTHING}, LET_GO_S)
    q.large.look(of(reads), LET_GO_S)
    assert q.large.given_up(of(reads), LET_GO_S) == []
    assert q.large.priority(0, LET_GO_S) is Priority.ASIDE
    read[0] = 40 * MB
    assert q.large.given_up(of(reads), LET_GO_S) == [0]


def test_what_follows_a_reader_goes_on_in_the_next_files_of_the_order() -> None:
    q = queue([LARGE, 20 * MB, 10, 20 * MB, 50 * MB, LARGE])
    q.estimates.all_bytes_per_s = 1e6
    looks(q, {0: at(90 * MB, 90 * MB)}, 1.0)
    assert begin(q, 1.0) == [0, 1, 2, 3, 4], "54 MB beyond the end"
    assert q.large.ahead == {1: 20 * MB, 3: 20 * MB, 4: 14 * MB}
    assert q.large.given_up(of({0: at(90 * MB, 90 * MB)}), 1.0) == []
    looks(q, {0: at(100 * MB, 100 * MB)}, 2.0)
    assert q.large.ahead == {1: 20 * MB, 3: 20 * MB, 4: 24 * MB}
    looks(q, {0: FileReads(LARGE, read_bytes=LARGE, jumped_bytes=LARGE, fronts=(Front(5, 5),))}, 3.0)
    assert q.large.ahead == {1: 0, 3: 0, 4: 0}, "a jump"
    assert q.large.given_up(of({}), 3.0) == [], "they are only paused"


def test_what_has_come_makes_room_for_the_next_ones_of_the_order() -> None:
    q = queue([LARGE] * 4)
    looks(q, {0: at(90 * MB, 90 * MB)}, 1.0)
    assert begin(q, 1.0) == [0, 1]
    q.done(1, LARGE, 2.0)
    q.large.hidden(1)
    looks(q, {0: at(100 * MB, 100 * MB)}, 2.0)
    assert begin(q, 2.0) == [2]
    assert q.large.ahead == {2: 64 * MB}


def test_what_is_refused_takes_nothing_of_what_follows_a_reader() -> None:
    q = Queue(array("Q", [LARGE, LARGE, 20 * MB]), Limits(Budget(LARGE + 30 * MB, 1 << 40)))
    q.estimates.all_bytes_per_s = 1e6
    looks(q, {0: at(90 * MB, 90 * MB)}, 1.0)
    assert begin(q, 1.0) == [0, 2]
    assert q.large.ahead == {2: 20 * MB}


def test_a_question_of_another_node_takes_nothing_of_what_follows_a_reader() -> None:
    q = queue([LARGE] * 2)
    looks(q, {0: at(90 * MB, 90 * MB)}, 1.0)
    assert not q.is_deferred(1, 1.0)
    assert q.large.ahead == {}


def test_no_more_transfers_than_threads_can_stay_with() -> None:
    q = queue([LARGE] * 5)
    q.large.most_beside = 2
    looks(q, dict.fromkeys(range(5), FOLLOWED), 1.0)
    assert begin(q, 1.0) == [0, 1]


def test_what_has_no_row_is_not_copied_beside_programs() -> None:
    q = queue([LARGE])
    tries = 0
    for now in range(10):
        looks(q, {0: FOLLOWED}, now)
        tries += len(q.next(9, now))
        assert q.large.given_up(of({0: FOLLOWED}), now) == ([0] if tries <= MOST_TRIES and q.flights.started else [])
        q.given_up(0, now)
    assert tries == MOST_TRIES


def test_what_is_nearly_there_is_waited_for() -> None:
    read = [12345]
    q = queue([LARGE], read.__getitem__)
    begin(q, 0.0)
    read[0] += LARGE * 9 // 10
    assert q.request(0, 9.0).kind is AnswerKind.WAIT
    assert q.request(0, 18.0).kind is AnswerKind.DIRECT, "a tenth takes two seconds at this pace"


def test_what_is_not_large_is_copied_whatever_programs_read() -> None:
    q = queue([LARGE, LARGE_BYTES])
    looks(q, {0: NOTHING, 1: NOTHING}, 1.0)
    assert begin(q, 1.0) == [1]


def test_what_comes_in_stripes_and_is_not_large_comes_at_full_width() -> None:
    q = queue([LARGE, 20 * MB])
    q.estimates.all_bytes_per_s = 100e6
    looks(q, {0: BLOCK}, 1.0)
    assert begin(q, 1.0) == [0, 1]
    assert [q.large.priority(id_, 1.0) for id_ in (0, 1)] == [Priority.ASIDE, Priority.FULL]
    assert q.large.beside == 1


# ---- several nodes


def test_no_other_large_file_is_copied_while_programs_of_other_nodes_alone_read_one() -> None:
    """What they lose by it is not known here. What is asked of other nodes goes on: they know."""
    q = queue([LARGE] * 4, share=NodeShare([0, 1, 2, 3]))
    assert q.next(2, 0.0) == [0, 1]
    q.large.read_elsewhere([0], 3, 0.1)
    q.large.look(of({}), 0.2)
    assert q.large.given_up(of({}), 0.3) == [0, 1]
    q.flights.asked[1] = False
    assert q.large.given_up(of({}), 0.3) == [0]
    assert q.next(9, 0.3) == []
    assert q.next(9, 0.2 + LET_GO_S) == [2, 3], "nobody told that it is still read"


def test_what_a_daemon_sees_of_programs_of_another_virtual_node_is_not_judged_by() -> None:
    """Both say that the file is read; here no program has opened it."""
    q = together([LARGE] * 3, NodeShare([0, 1, 2]))
    q.large.read_elsewhere([0], 0, 0.0)
    looks(q, {0: FOLLOWED}, 2.0)
    assert q.next(9, 2.0) == []
    q.large.reads.opened(0, 2.0)
    looks(q, {0: FOLLOWED}, 4.0)
    assert q.next(9, 4.0) == [0]


def together(sizes: Sequence[int], share: NodeShare | None = None, present: Sequence[int] = (0, 1, 4)) -> Queue:
    q = queue(sizes, share=share or NodeShare([]))
    q.large.joint.own, q.large.joint.present = 1, present
    return q


def test_a_file_that_is_followed_all_nodes_bring() -> None:
    q = together([10, 10, LARGE])
    looks(q, {2: FOLLOWED}, 0.0)
    assert begin(q, 1.0) == [2], "at once, and not what other nodes read"
    assert q.large.joint.nodes(2) == (0, 1, 4)
    assert dict(q.large.joint.untold()) == {2: (0, 1, 4)}
    assert not q.large.joint.untold(), "they are told once"
    assert q.large.given_up(of({2: FOLLOWED}), 1.0) == []
    assert q.large.priority(2, 1.0) is Priority.ASIDE
    q.large.hidden(2)
    assert q.large.joint.nodes(2) == ()
    assert q.given_up(2, 1.0)
    looks(q, {2: FOLLOWED}, 2.0)
    assert not q.large.joint.untold(), "once"


def test_a_copy_under_way_begins_anew_where_several_nodes_are_to_bring_it() -> None:
    q = together([LARGE], NodeShare([0]))
    assert begin(q, 0.0) == [0]
    looks(q, {0: NOTHING}, 1.0)
    assert q.large.given_up(of({0: NOTHING}), 1.0) == []
    looks(q, {0: FOLLOWED}, 2.0)
    assert q.large.given_up(of({0: FOLLOWED}), 2.0) == [0]
    assert q.given_up(0, 2.0)
    q.large.hidden(0)
    looks(q, {0: FOLLOWED}, 2.1)
    assert begin(q, 2.1) == [0]
    assert q.large.joint.nodes(0) == (0, 1, 4)
    assert q.large.given_up(of({0: FOLLOWED}), 2.1) == []


def test_a_node_that_is_told_brings_its_share_though_its_program_reads_nothing() -> None:
    q = together([10, 10, LARGE], NodeShare([0, 1]))
    q.large.read_elsewhere([2], 0, 0.0)
    q.large.together_with(2, (0, 1))
    assert q.next(1, 0.0) == [2], "the next one, whatever is before it"
    assert q.large.priority(2, 0.0) is Priority.FOLLOWS, "what the others ask for"
    assert q.large.priority(2, LET_GO_S) is Priority.FULL
    assert q.large.given_up(of({}), 3.0) == []
    assert not q.large.joint.untold()
    q.large.reads.opened(2, 3.0)
    assert q.large.given_up(of({}), 3.0) == [], "it goes on beside a program that has the file open"
    assert q.large.priority(2, 3.0) is Priority.FOLLOWS


def test_a_node_that_is_told_while_it_copies_the_file_alone_joins_once_it_has_given_that_up() -> None:
    q = together([LARGE], NodeShare([0]), present=(0, 1))
    assert q.next(1, 0.0) == [0]
    q.large.together_with(0, (0, 1))
    q.large.read_elsewhere([0], 0, 0.2)
    assert (q.large.joint.nodes(0), q.large.given_up(of({}), 0.2)) == ((), [0])
    q.large.hidden(0)
    assert q.given_up(0, 0.3)
    assert q.large.joint.nodes(0) == (0, 1)
    assert q.next(1, 0.3) == [0]
    assert q.large.given_up(of({}), 0.4) == []


def test_a_node_that_is_told_while_it_asks_for_the_file_joins_once_that_is_deferred() -> None:
    q = together([LARGE], present=(0, 1))
    assert q.next_from_peers(1, 2 * LARGE, 0.0) == [0]
    q.large.together_with(0, (0, 1))
    q.large.read_elsewhere([0], 0, 0.2)
    q.deferred_by_peer(0, 0.3)
    assert q.large.joint.nodes(0) == (0, 1)
    assert q.next(1, 0.3) == [0]


def test_a_file_that_is_read_in_any_order_is_brought_by_those_who_read_it() -> None:
    q = together([LARGE])
    q.large.reads.here(0, 0.0)
    q.large.reads.opened(0, 0.0)
    q.large.read_elsewhere([0], 4, 0.0)
    looks(q, {0: FileReads(LARGE, faults_bytes=LARGE)}, 1.0)
    assert begin(q, 1.0) == [0]
    assert q.large.joint.nodes(0) == (1, 4)
    assert q.large.priority(0, 1.0) is Priority.ASIDE


def test_a_file_is_brought_alone_where_no_other_node_reads_it() -> None:
    q = together([LARGE, 10], NodeShare([1]))
    assert q.next(9, 0.0) == [1]
    looks(q, {0: BLOCK}, 0.0)
    assert q.large.joint.nodes(0) == ()
    assert not q.large.joint.untold()
    assert q.next(9, 1.0) == [0], "though another node was to read it"


@pytest.mark.parametrize("why", ["no group", "not one of them", "under way", "here", "small", "unknown"])
def test_who_takes_no_part(why: str) -> None:
    q = together([10 if why == "small" else LARGE], NodeShare([0]), present=() if why == "no group" else (0, 1))
    id_ = 7 if why == "unknown" else 0
    if why in ("under way", "here"):
        assert q.next(9, 0.0) == [0]
    if why == "here":
        q.done(0, LARGE, 0.0)
    q.large.together_with(id_, (0, 4) if why == "not one of them" else (0, 1))
    assert q.large.joint.nodes(id_) == ()
    assert not q.large.joint.untold()


def test_a_single_state_is_final() -> None:
    q = queue([LARGE])
    looks(q, {0: FOLLOWED}, 0.0)
    assert begin(q, 0.0) == [0]
    q.failed(0)
    q.large.hidden(0)
    looks(q, {0: FOLLOWED}, 1.0)
    assert begin(q, 1.0) == []
    assert q.states.of(0) is FileState.FAILED


def test_a_copy_that_nobody_reads_may_be_given_up_as_often_as_need_be() -> None:
    q = queue([LARGE])
    for number in range(2 * MOST_TRIES):
        assert q.next(1, number) == [0]
        assert q.given_up(0, number)
