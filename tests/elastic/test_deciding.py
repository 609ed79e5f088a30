"""When a membership changes, who is in the next one, and what ends the wait: tables, and random histories."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcstage.elastic import FailStop, KeepBatch, MinMax, WaitFor
from hpcstage.elastic.membership.deciding import (
    APART_S,
    SETTLE_S,
    Decider,
    Proposal,
    SeenNode,
    change_of,
    is_complete,
)
from hpcstage.elastic.membership.values import GONE, Beat, Generation, Node, Times
from hpcstage.elastic.policy import AskedPolicy, Host

TIMES = Times(wait_limit_s=60)


def node(name: str) -> Node:
    return Node(f"id-{name}", name, name)


def seen(name: str, state: str = "ready", generation: int = 0, silent_s: float = 0.0) -> SeenNode:
    return SeenNode(Beat(node(name), 1, state, generation), silent_s)


def generation(names: str, number: int = 1) -> Generation:
    return Generation(number, 1, tuple(map(node, names)), "start")


def trains(names: str, number: int = 1, silent_s: float = 0.0) -> list[SeenNode]:
    return [seen(name, "training", number, silent_s) for name in names]


@pytest.mark.parametrize(
    ("current", "there", "kind", "lost", "failed", "stay", "join"),
    [
        ("", [], None, "", "", "", ""),
        ("", [seen("a"), seen("b")], "start", "", "", "", "ab"),
        ("", [seen("a"), seen("b", silent_s=2)], "start", "", "", "", "a"),
        ("ab", trains("ab"), None, "", "", "ab", ""),
        ("ab", [*trains("a"), *trains("b", silent_s=1.9)], None, "", "", "ab", ""),
        ("ab", [*trains("a"), *trains("b", silent_s=2)], "loss", "b", "", "a", ""),
        ("ab", trains("b"), "loss", "a", "", "b", ""),
        ("ab", [*trains("a"), seen("b", "left", 1)], "loss", "b", "", "a", ""),
        ("ab", [*trains("ab"), seen("c")], "join", "", "", "ab", "c"),
        ("ab", [*trains("a"), seen("b", "finished", 1, 9), seen("c")], None, "", "", "", ""),
        ("abc", [*trains("a"), seen("b", "finished", 1)], "loss", "c", "", "a", ""),
        ("ab", [*trains("ab"), seen("c", silent_s=3)], None, "", "", "", ""),
        ("ab", [*trains("a"), seen("c")], "loss", "b", "", "a", "c"),
        ("ab", [*trains("a"), seen("b", "ready", 1)], "failure", "", "b", "ab", ""),
        ("ab", [*trains("a"), seen("b", "ready", 0)], None, "", "", "", ""),  # it has yet to hear of the generation
        ("ab", [seen("a", "ready", 1), *trains("b", silent_s=2)], "loss", "b", "a", "a", ""),
        ("ab", [seen("c")], "start", "ab", "", "", "c"),
        ("ab", [], "start", "ab", "", "", ""),
        ("ab", [*trains("ab"), seen("c", "training", 7)], None, "", "", "", ""),  # of an older generation: not ready
    ],
)
def test_what_differs(
    current: str, there: list[SeenNode], kind: str | None, lost: str, failed: str, stay: str, join: str
) -> None:
    change = change_of(generation(current) if current else None, there, 2)
    assert (change.kind if change else None) == kind
    if change:
        groups = (change.lost, change.failed, change.stay, change.join)
        assert ["".join(found.host for found in group) for group in groups] == [lost, failed, stay, join]


class Play:
    """A training whose policy is asked, and whose hosts obey at once."""

    def __init__(self, policy: object, most: int = 4) -> None:
        self.asked = AskedPolicy(policy, type(policy).__name__)
        self.decider = Decider(most, self.asked.most, TIMES)
        self.current: Generation | None = None
        self.now_s = 0.0
        self.line = ""

    def until(self, there: Sequence[SeenNode], limit_s: float = 30, step_s: float = 0.25) -> float | None:
        """Passes time until a generation is agreed or the training ends; returns how long that took."""
        began_s = self.now_s
        while self.now_s <= began_s + limit_s:
            is_over, proposal = self.decider.look(self.now_s, self.current, there)
            self.is_over = is_over
            if proposal and self._answered(proposal):
                return self.now_s - began_s
            self.now_s += step_s
        return None

    def _answered(self, proposal: Proposal) -> bool:
        answer = self.asked.ask(proposal.facts)
        end = self.decider.answered(self.now_s, proposal, answer, self.asked.name)
        self.line = end.line if end else ""
        if answer == "ok":
            self.current = proposal.generation(self.current.number + 1 if self.current else 1, 1)
        return bool(self.line) or answer == "ok"

    @property
    def hosts(self) -> str:
        return "".join(found.host for found in self.current.nodes) if self.current else ""


def test_the_start_waits_for_more_hosts_while_there_is_room() -> None:
    play = Play(MinMax(2, 4))
    assert play.until([seen("a")], limit_s=20) is None, "the policy says wait"
    assert play.until([seen("a"), seen("b")]) == 5.0
    assert play.hosts == "ab"
    play = Play(MinMax(2, 4))
    assert play.until(list(map(seen, "abcde"))) == 0, "nobody else could join"
    assert play.hosts == "abcd"


def test_hosts_that_join_together_are_one_change_and_ranks_stay() -> None:
    play = Play(MinMax(1, 4))
    play.until(list(map(seen, "ba")))
    assert play.until(trains("ba"), limit_s=5) is None
    assert play.until([*trains("ba"), seen("c")], limit_s=0.25) is None
    assert play.until([*trains("ba"), seen("c"), seen("d")]) == 0.5
    assert (play.hosts, play.current.joined, play.current.kind) == ("bacd", ("c", "d"), "join")


def test_a_lost_host_is_replaced_by_a_spare_and_spares_do_not_disturb() -> None:
    play = Play(FailStop(2))
    play.until(list(map(seen, "abc")))
    assert play.until([*trains("ab"), seen("c")], limit_s=5) is None
    assert not play.is_over
    assert play.until([*trains("a"), *trains("b", silent_s=2.5), seen("c")]) == 0.5
    assert (play.hosts, play.current.lost, play.current.joined, play.current.silent_s) == ("ac", ("b",), ("c",), 2.5)


def test_nobody_trains_on_after_a_loss_while_the_policy_waits() -> None:
    play = Play(WaitFor(2, 20))
    play.until(list(map(seen, "ab")))
    assert play.until([seen("a", "ready", 1)], limit_s=10) is None
    assert play.is_over
    assert play.until([seen("a", "ready", 1), seen("c")]) == 0.5
    assert play.hosts == "ac"
    assert play.until([seen("c", "ready", 2)]) == pytest.approx(20, abs=1.5), "the policy's own limit"
    assert play.line.startswith("policy WaitFor said fail for c without a: the training ends")


def test_joins_to_a_policy_that_waits_leave_the_training_alone() -> None:
    play = Play(WaitFor(2, 10))
    play.until(list(map(seen, "ab")))
    assert play.until([*trains("ab"), seen("c")], limit_s=9) is None
    assert not play.is_over
    assert play.until([*trains("ab"), seen("c"), seen("d")]) == pytest.approx(1, abs=1.5), "since the first of them"
    assert play.hosts == "abcd"


def test_processes_that_end_on_one_host_wait_for_the_others_to_be_lost_or_end() -> None:
    play = Play(MinMax(1, 4))
    play.until(list(map(seen, "ab")))
    there = [seen("a", "ready", 1), *trains("b", silent_s=1)]
    assert play.until(there, limit_s=2) is None
    assert play.until([seen("a", "ready", 1), *trains("b", silent_s=2)]) == 0.5
    assert (play.hosts, play.current.kind) == ("a", "loss")
    play = Play(MinMax(1, 4))
    play.until(list(map(seen, "ab")))
    assert play.until([seen("a", "ready", 1), seen("b", "ready", 1)]) == 0.5, "all have ended"
    assert play.until([seen("a", "ready", 2), *trains("b", 2)]) == 3.0, "the other one goes on without end"
    assert (play.hosts, play.current.kind) == ("ab", "failure")


@pytest.mark.parametrize("policy", [MinMax(3, 4), KeepBatch(1, 1, 2)])
def test_a_wait_for_ever_ends(policy: object) -> None:
    play = Play(policy)
    assert play.until(list(map(seen, "ab")), limit_s=100) == pytest.approx(60, abs=2)
    assert "said wait for 60 s" in play.line


STATES = st.tuples(
    st.sampled_from("abcde"), st.sampled_from(["ready", "training", "left", "finished"]), st.integers(0, 3)
)
HISTORY = st.lists(
    st.lists(st.tuples(STATES, st.sampled_from([0.0, 1.0, 2.5])), max_size=5, unique_by=lambda entry: entry[0][0]),
    min_size=1,
    max_size=6,
)


@given(HISTORY, st.integers(1, 3), st.integers(3, 5))
def test_whatever_happens_a_generation_has_only_hosts_that_live_and_not_too_many(
    history: list[list[tuple[tuple[str, str, int], float]]], least: int, most: int
) -> None:
    play = Play(MinMax(least, most), most)
    for entries in history:
        there = [seen(name, state, number, silent_s) for (name, state, number), silent_s in entries]
        before = play.current
        if play.until(there, limit_s=8, step_s=0.5) is None or play.line:
            continue
        alive = {found.beat.node.id for found in there if found.silent_s < 2 and found.beat.state not in GONE}
        assert play.current is not None
        ids = [found.id for found in play.current.nodes]
        assert set(ids) <= alive
        assert least <= len(ids) == len(set(ids)) <= most
        if before:
            assert play.current.number == before.number + 1
            kept = [found.id for found in before.nodes if found.id in ids]
            assert ids[: len(kept)] == kept, "who stays keeps its order, in front of who joins"


@pytest.mark.parametrize(
    ("there", "complete"),
    [
        (trains("ab"), False),
        ([seen("a", "finished", 1), *trains("b")], False),
        ([seen("a", "finished", 1), *trains("b", silent_s=2)], True),
        ([seen("a", "finished", 1, 9), seen("b", "left", 1)], True),
        ([seen("a", "left", 1), seen("b", "left", 1)], False),
        ([*trains("ab"), seen("c", "finished", 1)], False),
        ([seen("c", "finished", 1)], False),
    ],
)
def test_a_training_is_complete_when_one_has_finished_and_nobody_trains(there: list[SeenNode], complete: bool) -> None:
    assert is_complete(generation("ab"), there, 2) == complete
    assert not is_complete(None, there, 2)


def test_a_host_without_room_is_none() -> None:
    assert AskedPolicy(MinMax(1, 2), "p").most([Host("a")] * 5) == 2


def test_a_program_that_ends_again_and_again_ends_the_training() -> None:
    decider = Decider(2, AskedPolicy(MinMax(1, 2), "minmax").most, TIMES)
    ends = []
    now_s = 0.0
    for number in range(1, 8):
        failed = [seen(name, "ready", number) for name in "ab"]
        proposals = [decider.look(now_s + after, generation("ab", number), failed)[1] for after in (0.0, 1.0)]
        assert proposals[1] is not None
        ends.append(decider.answered(now_s + 1.0, proposals[1], "ok", "minmax"))
        now_s += 400.0 if number == 2 else 10.0
    assert [end is not None for end in ends] == [False, False, False, False, False, False, True]
    assert ends[-1] is not None
    assert ends[-1].exit_code == 1


def test_the_loss_of_the_store_s_host_is_decided_on_when_all_others_have_spoken() -> None:
    """Those that trained, and a spare; nothing else waits for `settle_s` in vain. A loss after that settles again."""
    awaited = frozenset(node(name).id for name in "bcd")
    decider = Decider(3, AskedPolicy(MinMax(1, 3), "minmax").most, TIMES, 3, awaited)
    lost, unspoken = trains("a", silent_s=2), SeenNode(Beat(node("c"), 0, "training", 1), 0.0)
    is_over, proposal = decider.look(0.0, generation("abc"), [*lost, *trains("b"), unspoken, seen("d")])
    assert (is_over, proposal) == (True, None)
    assert decider.again_s < SETTLE_S
    _, proposal = decider.look(0.1, generation("abc"), [*lost, *trains("bc")])
    assert proposal is None
    _, proposal = decider.look(0.2, generation("abc"), [*lost, *trains("bc"), seen("d")])
    assert proposal is not None
    assert [found.host for found in proposal.nodes] == ["b", "c", "d"]
    assert decider.answered(0.2, proposal, "ok", "minmax") is None
    loss = [*trains("b", 2), *trains("c", 2), *trains("d", 2, silent_s=2)]
    assert decider.look(0.4, generation("bcd", 2), loss) == (True, None)
    assert decider.again_s == pytest.approx(SETTLE_S)


@pytest.mark.parametrize(
    ("step", "a", "b", "recoverable"),
    [
        (5, True, False, True),
        (5, False, False, False),
        (5, None, False, None),
        (5, None, None, None),
        (0, False, False, None),  # there is nothing to recover
        (0, True, False, True),  # a checkpoint of a run before
        (None, False, False, False),  # the lost host had one, that is all that is known
        (None, True, False, True),
        (None, None, False, None),
    ],
)
def test_a_policy_is_told_whether_training_can_go_on(
    step: int | None, a: bool | None, b: bool | None, recoverable: bool | None
) -> None:
    """What a lost host has is not counted; what it has said of the progress is."""
    decider = Decider(3, AskedPolicy(MinMax(1, 3), "minmax").most, TIMES, 3)
    there = [SeenNode(Beat(node(name), 1, "ready", 1, {}, has), 0.0) for name, has in (("a", a), ("b", b))]
    progress = {} if step is None else {"step": float(step)}
    there.append(SeenNode(Beat(node("c"), 1, "training", 1, progress, True), 2.0))
    decider.look(0.0, generation("abc"), there)
    _, proposal = decider.look(1.0, generation("abc"), there)
    assert proposal is not None
    assert proposal.facts.recoverable is recoverable


def test_processes_that_end_after_a_loss_do_not_put_the_decision_off() -> None:
    decider = Decider(3, AskedPolicy(MinMax(1, 3), "minmax").most, TIMES, 3)
    lost = trains("c", silent_s=2)
    assert decider.look(0.0, generation("abc"), [*trains("ab"), *lost]) == (True, None)
    assert decider.look(0.2, generation("abc"), [seen("a", "ready", 1), *trains("b"), *lost]) == (True, None)
    _, proposal = decider.look(0.5, generation("abc"), [seen("a", "ready", 1), seen("b", "ready", 1), *lost])
    assert proposal is not None


def cut(name: str, unreached: str, number: int = 1) -> SeenNode:
    others = tuple(node(other).id for other in unreached)
    return SeenNode(Beat(node(name), 1, "training", number, unreached=others), 0.0)


@pytest.mark.parametrize(
    ("members", "there", "left"),
    [
        ("abc", [*trains("ab"), cut("c", "b")], "ab"),  # of two the one with the higher rank goes
        ("abc", [*trains("a"), cut("b", "c"), cut("c", "b")], "ab"),
        ("abcd", [*trains("acd"), cut("b", "cd")], "acd"),  # and as few as possible
        ("abc", [cut("a", "b"), cut("b", "a"), *trains("c")], "ac"),
        ("abc", [*trains("ab"), cut("c", "c")], None),  # it is there
        ("abc", [*trains("ab"), cut("c", "b", 7)], None),  # of another generation
        ("abc", [*trains("a"), cut("b", "d"), *trains("c"), seen("d", "left", 1)], None),  # who has gone is not reached
    ],
)
def test_who_does_not_reach_others_is_left_out(members: str, there: list[SeenNode], left: str | None) -> None:
    decider = Decider(len(members), AskedPolicy(MinMax(1, 4), "minmax").most, TIMES, 3)
    before = generation(members)
    is_over, _ = decider.look(0.0, before, there)
    _, proposal = decider.look(0.5, before, there)
    assert is_over is (left is not None)
    assert (proposal and "".join(found.host for found in proposal.nodes)) == left
    assert bool(decider.apart.told) is (left is not None)


def test_who_was_left_out_is_taken_again_after_a_time() -> None:
    decider = Decider(3, AskedPolicy(MinMax(1, 3), "minmax").most, TIMES, 3)
    decider.look(0.0, generation("abc"), [*trains("ab"), cut("c", "b")])
    later = generation("ab", 2)
    there = [*trains("ab", 2), seen("c", "ready", 1)]
    asked = {now_s: decider.look(now_s, later, there)[1] for now_s in (1.0, APART_S - 1, APART_S, APART_S + 1)}
    assert [now_s for now_s, proposal in asked.items() if proposal] == [APART_S + 1]
    assert decider.apart.told == [("c", "b")], "it is said once"
    decider.look(APART_S + 2, later, [*trains("a", 2), seen("b", silent_s=2), seen("c", "ready", 1)])
    decider.look(0.0, generation("abc"), [*trains("ab"), cut("c", "b")])
    alone = [*trains("a", 2), seen("b", "training", 2, silent_s=2), seen("c", "ready", 1)]
    decider.look(1.0, later, alone)
    _, proposal = decider.look(1.5, later, alone)
    assert proposal is not None
    assert [found.host for found in proposal.nodes] == ["a", "c"], "whom it did not reach is lost"


def test_a_host_that_does_not_come_to_a_new_store_is_waited_for_to_a_limit() -> None:
    awaited = frozenset({node("b").id, node("c").id})
    decider = Decider(3, AskedPolicy(MinMax(1, 3), "minmax").most, TIMES, 3, awaited)
    there = [*trains("a", silent_s=2), *trains("b"), SeenNode(Beat(node("c"), 0, "training", 1), 0.0)]
    times_s = [0.0, 0.5, 0.9, 1.0]
    asked = [decider.look(now_s, generation("abc"), there)[1] is not None for now_s in times_s]
    assert asked == [False, False, False, True]


def test_the_policy_is_told_what_the_furthest_node_says() -> None:
    decider = Decider(2, AskedPolicy(MinMax(1, 2), "minmax").most, TIMES, 2)
    told = [{"step": 7, "share": 0.5, "batch_per_process": 4, "process_s_left": 9.0}, {"step": 6, "share": 0.4}]
    there = [
        SeenNode(Beat(node(name), 1, "training", 1, progress), silent_s)
        for name, progress, silent_s in zip("ab", told, (9.0, 0.0), strict=True)
    ]
    decider.look(0.0, generation("ab"), there)
    _, proposal = decider.look(1.0, generation("ab"), there)
    assert proposal is not None
    progress = proposal.facts.progress
    assert (progress.step, progress.share, progress.batch_per_process, progress.process_s_left) == (7, 0.5, 4, 9.0)
    assert progress.hosts_at_start == 2
