"""The decisions of a job's agents: whatever comes in whatever order, whoever is lost, nothing saved is dropped."""

from __future__ import annotations

import itertools
import json
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import pytest

pytest.importorskip("numpy", reason="needs the extra `checkpoint`")

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from hpcstage.checkpoint.job.coordinator import SETTLE_S, CouncilTerms
from hpcstage.checkpoint.job.council import Council, Do, Say
from hpcstage.checkpoint.job.ledger import (
    EntryState,
    FoundStore,
    JobEntry,
    JobGeneration,
    JobOrder,
    NodeReport,
    OrderKind,
    OrderLane,
    Outcome,
)
from hpcstage.checkpoint.job.naming import arriving
from hpcstage.checkpoint.protection.groups import CodeSize
from hpcstage.jsonform import read

FALLIBLE = (OrderKind.SAVE, OrderKind.PROTECT, OrderKind.PUBLISH, OrderKind.COPY, OrderKind.PLACE)
NAMES = ("step1", "step2", "latest")


def saved_by(generation: JobGeneration, node: str) -> dict[str, str]:
    """What a node has of the entries that a generation has itself."""
    return {name: one.marks[node] for name, one in generation.own.items() if node in one.marks}


def older(generation: JobGeneration) -> dict[str, int]:
    """The entries that an older generation has, and which one."""
    return {name: one.number for name, one in generation.entries.items() if one.number != generation.number}


class Node:
    """A agent without a disk of its own: its council, what it would have committed, and what it is to do."""

    def __init__(self, job: Job, index: int) -> None:
        self.job = job
        self.index = index
        self.name = job.hosts[index]
        self.council = Council(index, job.hosts, CouncilTerms(job.asked, job.drain_every, job.attempt, job.is_elastic))
        self.entries: dict[str, EntryState] = {}
        self.removed: set[str] = set()
        self.restored: set[str] = set()
        self.store: dict[int, tuple[str, dict[str, str]]] = {}
        self.encoded: set[int] = set()
        self.known: dict[int, JobGeneration] = {}
        """Generations that are complete, as orders said."""
        self.todo: deque[Do] = deque()
        self.is_over = self.is_gone = False
        self.council.find(job.found[index], job.target_ns)

    def take(self) -> None:
        for act in self.council.take(self.job.now):
            if isinstance(act, Say):
                data = json.dumps(asdict(act.report))
                self.job.told |= {(self.index, other) for other in act.to}
                for other in act.to:
                    self.job.sent[self.index, other].append(data)
            else:
                self.todo.append(act)

    def see(self) -> None:
        gone = [] if self.is_gone else [name for name in self.restored if name not in self.entries]
        self.council.see(self.entries, sorted(gone), is_gone=self.is_gone)

    def work(self, error: str = "", *, is_soon: bool = False, place: int = 0) -> None:
        """Does the next thing that is to be done, or a later one."""
        if not self.todo:  # it was given up
            return
        act = self.todo[place]
        del self.todo[place]
        order = act.order
        for one in order.ledger.generations:
            self.known[one.number] = one
        facts = {} if error else getattr(self, f"_{order.kind.value}")(order)
        self.council.did(Outcome(order.key, error, is_soon, facts))
        self.is_over = self.council.is_over
        self.take()

    def fail(self, kind: OrderKind, error: str) -> None:
        """Fails to do what is to be done of a kind."""
        self.work(error, place=[act.order.kind for act in self.todo].index(kind))

    def _begin(self, order: JobOrder) -> dict[str, Any]:
        state = order.body["state"]
        if state is None:
            names = set(self.job.target)
        else:
            generation = read(JobGeneration, state["generation"])
            names = {*generation.names, *self.job.target.keys() & set(generation.lacking)}
        self.restored = set(names)
        self.entries = {name: EntryState(f"{self.name}:{name}", is_restored=True) for name in names}
        self.see()
        return {
            "restored": order.body["key"],
            "seen": sorted(names),
            "is_drained": False,
            "floor": 7,
            "after_ns": 70,
            "lines": [],
        }

    def _ready(self, order: JobOrder) -> dict[str, Any]:
        self.council.ready()
        return {}

    def _close(self, order: JobOrder) -> dict[str, Any]:
        for name, one in self.entries.items():
            self.entries[name] = EntryState(one.mark, True, one.is_restored)
        self.see()
        return {}

    def _save(self, order: JobOrder) -> dict[str, Any]:
        made = read(JobGeneration, order.body["generation"])
        assert made.number > max(self.store, default=0), "the number of a generation that is there"
        share = saved_by(made, self.name)
        self.store[made.number] = made.attempt, share
        self.job.made_ns = max(self.job.made_ns, order.body["after_ns"]) + 1
        return {
            "created_ns": self.job.made_ns, "needs": [], "state_bytes": 10 * len(share), "written_bytes": 1,
            "kind": "full", "why": "", "took_s": 0.1,
        }  # fmt: skip

    def _protect(self, order: JobOrder) -> dict[str, Any]:
        assert order.body["number"] in self.store
        assert any(self.name in group for group in order.body["groups"])
        self.encoded.add(order.body["number"])
        return {"seconds": 0.1}

    def _publish(self, order: JobOrder) -> dict[str, Any]:
        assert order.body["generation"]["number"] in self.store
        return {}

    def _place(self, order: JobOrder) -> dict[str, Any]:
        assert order.by == self.index
        if generation := order.body.get("generation"):
            assert generation["number"] in self.store
        self.job.place(order)
        return {"gone": [], "beside": {}, "size_bytes": 1, "lines": []}

    def _copy(self, order: JobOrder) -> dict[str, Any]:
        return {}

    def _drop(self, order: JobOrder) -> dict[str, Any]:
        retained = set(order.body["retained"])
        for number in [n for n in self.store if n not in retained and n < order.body["newest"]]:
            del self.store[number]
        return {}

    def _finish(self, order: JobOrder) -> dict[str, Any]:
        return {}

    _refuse = _finish


class Job:
    """The nodes of a job, what is on its way between them, and the world that connects them."""

    def __init__(
        self, count: int, asked: CodeSize | None = None, drain_every: int | None = None,
        found: dict[int, list[FoundStore]] | None = None, target_ns: int = 0, in_target: tuple[str, ...] = (),
        *, is_elastic: bool = True,
    ) -> None:  # fmt: skip
        self.hosts = [f"n{index}" for index in range(count)]
        self.asked, self.drain_every, self.target_ns = asked, drain_every, target_ns
        self.is_elastic = is_elastic
        self.found = {index: (found or {}).get(index, []) for index in range(count)}
        self.now = 0.0
        self.made_ns = 100
        self.drained = 0
        self.spared = list[str]()
        self.target: dict[str, dict[str, str]] = {name: {} for name in in_target}
        """What the target has: by entry the marks of its parts."""
        self.described = dict(self.target)
        """What the newest generation that was brought there has."""
        self.removed_late: dict[str, dict[str, str]] = {}
        """What is to be removed there once no node has a part of it any more."""
        self._attempts = itertools.count(1)
        self.sent: dict[tuple[int, int], deque[str]] = {
            pair: deque() for pair in itertools.permutations(range(count), 2)
        }
        self.told: set[tuple[int, int]] = set()
        """Who ever told whom."""
        self.view, self.members = 0, frozenset[int]()
        self.nodes = {index: Node(self, index) for index in range(count)}
        self.unaware: set[int] = set()

    def attempt(self) -> str:
        return f"{next(self._attempts):032x}"

    def connect(self) -> None:
        """A new world of all that live; what was on its way is lost, and each node hears of it in its own time."""
        self.view += 1
        self.members = frozenset(self.nodes)
        for queue in self.sent.values():
            queue.clear()
        self.unaware = set(self.nodes)

    def learn(self, index: int) -> None:
        self.unaware.discard(index)
        node = self.nodes[index]
        stays = [
            act for act in node.todo if act.order.kind.lane is OrderLane.LOCAL or act.order.kind is OrderKind.PLACE
        ]
        node.todo = deque(stays)  # what else goes on in the target is given up
        node.council.membership(self.view, self.members)
        node.take()

    def deliver(self, pair: tuple[int, int]) -> None:
        sender, to = pair
        report = read(NodeReport, json.loads(self.sent[pair].popleft()))
        if to in self.nodes:
            self.nodes[to].council.heard(sender, report)
            self.nodes[to].take()

    def kill(self, index: int) -> None:
        del self.nodes[index]
        self.unaware.discard(index)
        for pair, queue in self.sent.items():
            if index in pair:
                queue.clear()

    def settle(self, until: Callable[[], bool] = lambda: False) -> None:
        """Until nothing is on its way and nothing to be done, or a condition holds."""
        for _ in range(1000):
            steps: list[Callable[[], object]] = [partial(self.learn, index) for index in self.unaware]
            steps += [partial(self.deliver, pair) for pair, queue in self.sent.items() if queue]
            steps += [node.work for node in self.nodes.values() if node.todo]
            steps += [node.take for node in self.nodes.values()]
            wakes = [at for node in self.nodes.values() if (at := node.council.wake_at()) is not None]
            self.now = max([self.now, *wakes]) if len(steps) == len(self.nodes) else self.now + 0.01
            for step in steps:
                if until():
                    return
                step()
            is_busy = self.unaware or any(self.sent.values()) or any(node.todo for node in self.nodes.values())
            if not is_busy and all(node.council.wake_at() is None for node in self.nodes.values()):
                return
        raise AssertionError("the job does not come to rest")

    def place(self, order: JobOrder) -> None:
        """Brings a generation to the target, and removes there what the program removed, as `gathering` does."""
        if "generation" not in order.body:
            return
        last = read(JobGeneration, order.body["generation"])
        self.drained, self.spared = last.number, order.body["spared"]
        self.target |= {name: last.marks(name) for name in order.body["names"]}
        seen = {*order.ledger.seen, *order.ledger.drained_marks}
        before = self.removed_late | {name: marks for name, marks in self.described.items() if name in seen}
        self.described = {name: last.marks(name) for name in last.names}
        self.removed_late = {name: marks for name, marks in before.items() if name in self.spared}
        for name in before.keys() - last.names - self.removed_late.keys():
            if self.target.get(name) == before[name]:
                del self.target[name]

    def write(self, index: int, name: str, *, is_complete: bool = True) -> None:
        node = self.nodes[index]
        node.entries[name] = EntryState(f"{self.now}-{next(self._attempts)}", is_complete)
        node.see()
        node.take()

    def remove(self, index: int, name: str) -> None:
        node = self.nodes[index]
        node.entries.pop(name, None)
        node.see()
        node.take()

    @property
    def last(self) -> JobGeneration | None:
        return self.nodes[min(self.nodes)].council.ledger.last

    def begun(self) -> Job:
        self.connect()
        self.settle()
        return self

    def end(self, *, is_orderly: bool = True) -> None:
        for index, node in self.nodes.items():
            node.council.end(is_orderly=is_orderly or index > 0)
            node.take()
        self.settle()


def test_a_checkpoint_of_one_node_is_a_generation_of_all() -> None:
    job = Job(3).begun()
    job.write(0, "step1")
    job.settle()
    assert job.last is not None
    assert job.last.nodes == ("n0", "n1", "n2")
    assert {name: set(one.marks) for name, one in job.last.entries.items()} == {"step1": {"n0"}}
    assert job.last.size == "2+1"
    assert job.drained == job.last.number
    assert all(node.known[job.last.number] == job.last for node in job.nodes.values())


def test_nodes_tell_the_coordinator_alone() -> None:
    job = Job(4).begun()
    for lead in (0, 1):
        job.settle()
        job.told.clear()
        job.write(3, f"step{lead}")
        job.settle()
        others = [node for node in job.nodes if node != lead]
        assert job.told == {(lead, node) for node in others} | {(node, lead) for node in others}
        assert job.last is not None
        assert f"step{lead}" in job.last.names
        job.kill(lead)
        job.connect()
    job.end()


@pytest.mark.parametrize("count", [1, 2])
def test_states_are_saved_while_the_target_hangs(count: int) -> None:
    job = Job(count).begun()
    node = job.nodes[0]
    for step in range(5):
        job.write(0, f"step{step}")
        while any(act.order.kind.lane is OrderLane.LOCAL for one in job.nodes.values() for act in one.todo) or (
            step > 0 and (job.last is None or f"step{step}" not in job.last.names)
        ):
            for one in job.nodes.values():
                lanes = [act.order.kind.lane for act in one.todo]
                if OrderLane.LOCAL in lanes:
                    one.work(place=lanes.index(OrderLane.LOCAL))
                one.take()
            for pair, queue in job.sent.items():
                if queue:
                    job.deliver(pair)
    assert [act.order.body["generation"]["number"] for act in node.todo] == [job.last.number - 4], (
        "the first one is still to be brought"
    )
    assert node.todo[0].order.body["generation"]["number"] in node.store
    job.settle()
    assert job.drained == job.last.number


def test_an_entry_is_complete_when_it_is_on_all_nodes_that_have_it() -> None:
    job = Job(2).begun()
    job.write(1, "step1", is_complete=False)
    job.settle()
    job.write(0, "step1")
    job.settle()
    assert job.last is None
    job.write(1, "step1")
    job.settle()
    assert job.last is not None
    assert job.last.marks("step1").keys() == {"n0", "n1"}


@pytest.mark.parametrize("lost", [0, 1])
def test_what_a_lost_node_had_stays_that_of_an_older_generation_and_is_drained(lost: int) -> None:
    job = Job(3, drain_every=100).begun()
    job.write(lost, "step1")
    job.write(2, "other")
    job.settle()
    before = job.last
    assert before is not None
    assert job.drained == 0
    job.kill(lost)
    job.connect()
    job.settle()
    assert job.drained == before.number, "the state is copied when a node is lost"
    assert job.last is not None
    assert job.last.number > before.number
    assert older(job.last) == {"step1": before.number}
    assert set(job.last.nodes) == {job.hosts[index] for index in job.nodes}
    assert job.last.size == "1+1"
    assert all(before.number in node.store for node in job.nodes.values()), (
        "it is retained as long as a newer one needs it"
    )
    job.write(2, "step1")
    job.settle()
    assert older(job.last) == {}
    assert "step1" in job.last.share("n2")


@pytest.mark.parametrize("lost", [0, 2])
@pytest.mark.parametrize("is_first_saved", [True, False])
def test_a_state_that_lacks_the_part_of_a_lost_node_is_none(lost: int, is_first_saved: bool) -> None:
    """The last whole one stays in the target, also if the program removes it."""
    job = Job(3, is_elastic=False).begun()
    job.write(lost, "step1", is_complete=is_first_saved)
    job.settle(lambda: "step1" in (job.nodes[0].council._of(lost) or NodeReport()).entries)
    for index in {0, 1, 2} - {lost}:
        job.write(index, "step1")
    job.settle()
    before = job.last
    assert (before is not None) is is_first_saved
    job.kill(lost)
    job.connect()
    job.settle()
    for index in job.nodes:
        job.write(index, "step2")
        if is_first_saved:
            job.remove(index, "step1")
    job.write(1, "latest")
    job.settle()
    named = set() if job.last is None else job.last.names
    assert named == ({"step1"} if is_first_saved else set())
    job.end()
    assert set(job.target) == named
    assert all(node.is_over for node in job.nodes.values())
    order = job.nodes[1].council._own.orders[OrderLane.LOCAL]
    assert order.body["lost"] == [f"n{lost}"]


def test_what_other_nodes_alone_write_is_saved_without_a_lost_one() -> None:
    job = Job(3, is_elastic=False).begun()
    job.write(0, "step1")
    job.settle()
    job.kill(2)
    job.connect()
    job.write(0, "step2")
    job.settle()
    assert set(job.target) == {"step1", "step2"}
    job.write(1, "step3")
    job.kill(0)
    job.connect()
    job.settle()
    assert set(job.target) == {"step1", "step2"}, "the first node may have had a part of it"


def test_the_program_removes_a_checkpoint_on_one_node() -> None:
    job = Job(2).begun()
    for index in (0, 1):
        job.write(index, "step1")
    job.settle()
    job.remove(0, "step1")
    job.write(0, "step2")
    job.settle()
    assert job.last is not None
    assert job.last.names == {"step2"}
    job.write(0, "step3")
    job.settle()
    assert job.last.names == {"step2", "step3"}, "the part that is left on the other node does not count"
    job.write(1, "step1")
    job.settle()
    assert job.last.names == {"step1", "step2", "step3"}


def test_no_generation_grows_by_the_part_of_one_node_before_those_of_the_others() -> None:
    job = Job(3, is_elastic=False).begun()
    job.write(0, "step1")
    job.settle()
    job.write(1, "step1")
    job.write(0, "best")
    job.settle(lambda: job.last is not None and "best" in job.last.names)
    assert job.last is not None
    assert job.last.marks("step1").keys() == {"n0"}
    job.write(2, "step1")
    job.settle()
    assert job.last.marks("step1").keys() == {"n0", "n1", "n2"}
    assert job.now < SETTLE_S


@pytest.mark.parametrize("is_lost", [True, False])
def test_no_generation_has_an_entry_before_the_nodes_that_shared_such_ones_have_their_parts(is_lost: bool) -> None:
    job = Job(3, is_elastic=False).begun()
    for index in range(3):
        job.write(index, "step1")
    job.settle()
    for index in range(2):
        job.write(index, "step2")
        job.write(index, f"rank{index}-1")
    job.settle(lambda: job.last is not None and "rank1-1" in job.last.names)
    assert job.last is not None
    assert job.last.names == {"step1", "rank0-1", "rank1-1"}
    assert job.now < SETTLE_S, "what each node names by itself waits for nobody"
    if is_lost:
        job.kill(2)
        job.connect()
    else:
        job.write(2, "step2")
    job.settle()
    assert ("step2" in job.target) is not is_lost


def rewritten_by_the_first_of_two() -> tuple[Job, dict[str, str]]:
    """Both nodes have a part of step1, and the first one has a new one; the marks of the old ones."""
    job = Job(2).begun()
    for index in (0, 1):
        job.write(index, "step1")
    job.settle()
    assert job.last is not None
    before = job.last.marks("step1")
    assert len(before) == 2
    job.write(0, "step1")
    job.write(0, "best")
    job.settle(lambda: job.last is not None and "best" in job.last.names)
    return job, before


def test_no_generation_has_a_new_part_of_an_entry_beside_old_ones_that_are_being_rewritten() -> None:
    job, before = rewritten_by_the_first_of_two()
    assert job.last is not None
    assert job.last.marks("step1") == before, "it is the old entry"
    assert "step1" in older(job.last)
    job.write(1, "step1")
    job.settle(lambda: job.last is not None and not older(job.last))
    marks = job.last.marks("step1")
    assert marks == {node.name: node.entries["step1"].mark for node in job.nodes.values()}
    assert not set(marks.values()) & set(before.values())
    assert job.now < SETTLE_S


def test_a_part_that_one_node_alone_writes_anew_is_taken_after_a_while() -> None:
    job, before = rewritten_by_the_first_of_two()
    job.settle()
    assert job.last is not None
    assert job.last.marks("step1") == {"n0": job.nodes[0].entries["step1"].mark, "n1": before["n1"]}
    assert job.now >= SETTLE_S


@pytest.mark.parametrize("is_orderly", [True, False])
def test_what_is_half_rewritten_at_the_end_counts_after_an_orderly_one(is_orderly: bool) -> None:
    job, before = rewritten_by_the_first_of_two()
    job.end(is_orderly=is_orderly)
    assert job.last is not None
    assert (job.last.marks("step1") == before) is not is_orderly
    assert job.drained == job.last.number


def left_by(member: str, number: int, *names: str) -> JobGeneration:
    """A generation of a run on one node."""
    entries = {name: JobEntry(number, {member: ""}) for name in names}
    return JobGeneration(number, f"{number:032x}", 10 * number, (member,), entries)


def test_what_was_put_there_at_the_start_is_rewritten_by_all_or_not_at_all() -> None:
    state = FoundStore("r", "m0", "a", (left_by("m0", 3, "last"),))
    job = Job(3, found={0: [state]}).begun()
    assert job.last is not None
    before = job.last.marks("last")
    assert len(before) == 1, "all nodes have it, and one saves it"
    for index in range(2):
        job.write(index, "last")
        job.write(index, f"other{index}")
        job.settle(lambda index=index: f"other{index}" in job.last.names)  # type: ignore[misc, union-attr]
        assert job.last.marks("last") == before
    job.write(2, "last")
    job.settle(lambda: job.last is not None and not older(job.last))
    assert job.last.marks("last") == {node.name: node.entries["last"].mark for node in job.nodes.values()}
    assert job.now < SETTLE_S
    job.write(0, "last")
    job.write(0, "other2")
    job.settle(lambda: job.last is not None and "other2" in job.last.names)
    assert "last" in older(job.last)


def test_what_came_from_the_target_stays_there_while_one_node_alone_has_rewritten_it() -> None:
    job = Job(2, target_ns=31, in_target=("last",)).begun()
    job.write(0, "last")
    job.write(0, "step1")
    job.end(is_orderly=False)
    assert job.last is not None
    assert job.last.names == {"step1"}
    assert job.spared == ["last"], "the one in the target is not taken for one that the program removed"


def test_what_nobody_has_any_more_since_its_nodes_are_gone_stays_in_the_target() -> None:
    """It was being written anew, so no generation has it, and the program did not remove it."""
    job = Job(3, target_ns=31, in_target=("last",)).begun()
    job.write(0, "last", is_complete=False)
    job.write(0, "step1")
    job.settle(lambda: any(one.order.kind is OrderKind.DROP for node in job.nodes.values() for one in node.todo))
    assert job.last is not None
    assert job.last.names == {"step1"}
    for lost in (0, 1):
        job.kill(lost)
        job.connect()
    job.nodes[2].is_gone, job.nodes[2].entries = True, {}
    job.nodes[2].see()
    job.settle()
    job.end()
    assert "last" in job.target


def test_a_part_that_is_left_of_a_removed_entry_is_none_of_the_one_that_is_made_anew() -> None:
    job = Job(2).begun()
    for index in (0, 1):
        job.write(index, "step1")
    job.settle()
    job.remove(0, "step1")
    job.write(0, "step2")
    job.settle()
    job.write(0, "step1")
    job.settle()
    assert job.last is not None
    assert job.last.marks("step1") == {"n0": job.nodes[0].entries["step1"].mark}
    job.write(0, "step3")
    job.settle()
    assert set(job.last.marks("step1")) == {"n0"}, "nor of later ones"
    job.write(1, "step1")
    job.settle()
    assert set(job.last.marks("step1")) == {"n0", "n1"}


def test_a_state_that_changes_is_tried_again_with_another_number_and_in_full() -> None:
    job = Job(2).begun()
    job.write(0, "step1")
    job.settle(lambda: bool(job.nodes[1].todo))
    first = job.nodes[1].todo[0].order
    assert first.kind is OrderKind.SAVE
    assert first.body["full_why"] == "it is the first of this run"
    job.nodes[1].work("step1 changed", is_soon=True)
    job.settle()
    assert job.last is not None
    assert job.last.number > first.body["generation"]["number"]
    assert job.nodes[0].store.keys() == {job.last.number}, "the half of a generation is dropped"


def test_without_room_complete_entries_are_copied_as_they_are() -> None:
    job = Job(2).begun()
    job.write(0, "step1")
    job.settle(lambda: bool(job.nodes[1].todo))
    job.nodes[1].work("no room")
    job.settle(lambda: any(one.order.kind is OrderKind.COPY for node in job.nodes.values() for one in node.todo))
    job.settle()
    ledger = job.nodes[0].council.ledger
    assert ledger.copied
    assert any("no room" in line for line in ledger.lines)
    assert ledger.last is not None, "it is tried again later"


def test_a_drain_that_failed_is_tried_again_at_the_end() -> None:
    job = Job(2).begun()
    job.write(0, "step1")
    job.settle(lambda: any(one.order.kind is OrderKind.PUBLISH for one in job.nodes[1].todo))
    job.nodes[1].fail(OrderKind.PUBLISH, "the target is away")
    job.settle()
    assert job.drained == 0
    assert "the target is away" in job.nodes[0].council.ledger.undrained_why
    job.end()
    assert job.last is not None
    assert job.drained == job.last.number
    assert not job.nodes[0].council.ledger.undrained_why


def protected(nodes: int, writer: int) -> tuple[Job, JobGeneration]:
    """A job that drains nothing by itself, and its first generation, which is protected: one node wrote `step1`."""
    job = Job(nodes, drain_every=100).begun()
    job.write(writer, "step1")
    job.settle()
    assert job.last is not None
    assert job.last.size == f"{nodes - 1}+1"
    return job, job.last


def write_and_fail(job: Job, name: str, kind: OrderKind) -> None:
    """The first node writes an entry, and the order of a kind that follows fails on the second."""
    job.write(0, name)
    job.settle(lambda: any(one.order.kind is kind for one in job.nodes[1].todo))
    job.nodes[1].fail(kind, "no space")
    job.settle()


def test_the_newest_that_is_protected_stays_until_a_newer_one_is() -> None:
    job, first = protected(2, writer=0)
    for name in ("step2", "step3", "step4"):
        write_and_fail(job, name, OrderKind.PROTECT)
        assert job.last is not None
        assert job.last.size == ""
        for node in job.nodes.values():
            assert node.store.keys() == {first.number, job.last.number}, "and no more than two take space"
    lines = job.nodes[0].council.ledger.lines
    assert any(f"state {first.number} stays" in line for line in lines)
    job.write(0, "step5")
    job.settle()
    assert job.last is not None
    assert job.last.size == "1+1"
    assert all(first.number not in node.store for node in job.nodes.values())


def test_what_is_in_the_target_needs_no_protected_one_before_it() -> None:
    job = Job(2).begun()
    job.write(0, "step1")
    job.settle()
    for name in ("step2", "step3"):
        write_and_fail(job, name, OrderKind.PROTECT)
    assert job.last is not None
    assert job.drained == job.last.number
    assert all(node.store.keys() == {job.last.number - 1, job.last.number} for node in job.nodes.values())


def test_what_a_lost_node_had_is_read_from_a_protected_generation_that_has_the_same() -> None:
    """The newest is not protected when a node is lost, and cannot be rebuilt; an older one has the entry, too."""
    job, safe = protected(3, writer=1)
    write_and_fail(job, "step2", OrderKind.PROTECT)
    write_and_fail(job, "step3", OrderKind.PROTECT)
    assert job.last is not None
    newest = job.last.number
    job.kill(1)
    job.connect()
    job.settle()
    assert job.last is not None
    assert older(job.last)["step1"] == safe.number
    assert all(safe.number in node.store for node in job.nodes.values())
    assert "step3" in job.last.names
    assert job.last.number > newest


def test_what_is_being_written_again_is_read_from_a_protected_generation_that_has_the_same() -> None:
    """A node may be lost before it is complete again."""
    job, safe = protected(3, writer=1)
    write_and_fail(job, "step2", OrderKind.PROTECT)
    job.write(1, "step1", is_complete=False)
    job.settle()
    job.write(0, "step3")
    job.settle()
    assert job.last is not None
    assert older(job.last)["step1"] == safe.number
    job.kill(1)
    job.connect()
    job.settle()
    assert older(job.last)["step1"] == safe.number
    assert all(safe.number in node.store for node in job.nodes.values())


def why_full(job: Job) -> str:
    """Why the next generation is stored in full, of which the first node has the order."""
    job.settle(lambda: any(one.order.kind is OrderKind.SAVE for one in job.nodes[0].todo))
    return str(job.nodes[0].todo[0].order.body["full_why"])


def test_why_a_generation_is_stored_in_full_is_said() -> None:
    job = Job(3, drain_every=100).begun()
    job.write(0, "step1")
    assert why_full(job) == "it is the first of this run"
    job.settle()
    job.write(0, "step2")
    assert why_full(job) == ""
    job.nodes[0].work("no room")
    assert why_full(job) == "a try before was not saved by all nodes"
    job.settle()
    write_and_fail(job, "step3", OrderKind.PROTECT)
    job.write(0, "step4")
    assert why_full(job) == "the generation before is not protected"
    job.settle()
    job.kill(2)
    job.connect()
    assert why_full(job) == "the nodes are not those of the generation before"


def earlier(number: int, created_ns: int, members: int = 2) -> JobGeneration:
    return JobGeneration(
        number,
        f"{number:032x}",
        created_ns,
        tuple(f"m{i}" for i in range(members)),
        {f"e{number}-{i}": JobEntry(number, {f"m{i}": ""}) for i in range(members)},
    )


def test_the_start_takes_the_newest_that_can_be_restored() -> None:
    both = (earlier(3, 30), earlier(4, 40))
    job = Job(2, found={0: [FoundStore("r", "m0", "a", both)], 1: [FoundStore("r", "m1", "b", both[:1])]})
    job.connect()
    job.settle(lambda: any(node.todo for node in job.nodes.values()))
    order = next(node for node in job.nodes.values() if node.todo).todo[0].order
    assert order.body["state"]["generation"]["number"] == 4
    job.settle(lambda: bool(job.nodes[0].todo))
    job.nodes[0].work("too many parts are gone")
    job.settle()
    assert all(node.restored == {"e3-0", "e3-1"} for node in job.nodes.values())
    ledger = job.nodes[0].council.ledger
    assert any("too many parts are gone" in line for line in ledger.lines)
    assert ledger.last is not None, "what is only on the local disks is saved anew, and protected"
    assert ledger.last.number > 7
    assert job.drained == ledger.last.number
    assert {name: len(one.marks) for name, one in ledger.last.entries.items()} == {"e3-0": 1, "e3-1": 1}


def test_a_newer_state_in_the_target_is_taken_and_is_not_saved_anew() -> None:
    job = Job(2, found={0: [FoundStore("r", "m0", "a", (earlier(3, 30),))]}, target_ns=31).begun()
    assert job.nodes[1].council.ledger.restored == "target"
    assert job.last is None


def test_a_target_that_cannot_be_restored_refuses() -> None:
    job = Job(2)
    job.connect()
    job.settle(lambda: bool(job.nodes[1].todo))
    job.nodes[1].work("no space")
    job.settle()
    assert all(node.is_over for node in job.nodes.values())
    order = job.nodes[0].council._own.orders[OrderLane.LOCAL]
    assert order.kind is OrderKind.REFUSE
    assert "no space" in order.body["why"]


def test_the_end_is_orderly_if_the_first_node_says_so() -> None:
    job = Job(2).begun()
    job.write(1, "step1", is_complete=False)
    job.end(is_orderly=False)
    assert all(node.is_over for node in job.nodes.values())
    assert not job.nodes[1].council.ledger.is_orderly


@settings(max_examples=50, stateful_step_count=40, deadline=None)
class Disorder(RuleBasedStateMachine):
    """Messages, losses and new worlds in any order."""

    @initialize(
        count=st.integers(1, 4),
        asked=st.sampled_from([None, CodeSize(2, 1), CodeSize(1, 2)]),
        drain_every=st.sampled_from([None, 3, 100]),
        in_target=st.lists(st.sampled_from(NAMES), unique=True),
        left=st.lists(st.sampled_from(NAMES), unique=True),
        at=st.integers(0, 3),
    )
    def begin(
        self,
        count: int,
        asked: CodeSize | None,
        drain_every: int | None,
        in_target: list[str],
        left: list[str],
        at: int,
    ) -> None:
        """`left` is what a killed run left on node `at`: before it saved that, it had saved one entry."""
        lacking = tuple(name for name in in_target if name not in left)
        states = [
            left_by("m", 3, NAMES[0]),
            replace(left_by("m", 4, *left), lacking=lacking),
        ]
        found = {at % count: [FoundStore("r", "m", "a", tuple(states))]} if left else {}
        self.job = Job(count, asked, drain_every, found, 20 if in_target else 0, tuple(in_target))
        self.job.connect()
        self.were_in_target: set[str] = set(in_target)
        self.program_removed: set[str] = set()
        self.whole: dict[int, JobGeneration] = {}
        self.lost: set[str] = set()
        self.is_ended = False
        self.failed_at_end: set[OrderKind] = set()

    @rule(data=st.data(), most=st.integers(1, 6))
    def deliver(self, data: st.DataObject, most: int) -> None:
        for _ in range(most):
            waiting = [pair for pair, queue in self.job.sent.items() if queue]
            if waiting:
                self.job.deliver(data.draw(st.sampled_from(waiting)))

    @rule(until=st.sampled_from([OrderKind.SAVE, OrderKind.PROTECT, OrderKind.DROP, OrderKind.PUBLISH]))
    def go_on(self, until: OrderKind) -> None:
        """Until a node has such an order before it, or there is rest."""
        self.job.settle(lambda: any(a.order.kind is until for node in self.job.nodes.values() for a in node.todo))

    @rule(data=st.data(), what=st.sampled_from(["well", "well", "well", "changed", "failed"]))
    def work(self, data: st.DataObject, what: str) -> None:
        busy = [node for node in self.job.nodes.values() if node.todo]
        if busy:
            node = data.draw(st.sampled_from(busy))
            lanes = [act.order.kind.lane for act in node.todo]
            place = data.draw(st.sampled_from(sorted({lanes.index(lane) for lane in lanes})))
            order = node.todo[place].order
            kind = order.kind
            is_from_disks = kind is OrderKind.BEGIN and order.body["state"] is not None
            can_fail = kind in FALLIBLE if node.council.ledger.is_begun else is_from_disks
            if can_fail and what == "failed" and node.council.ledger.is_closed:
                self.failed_at_end.add(kind)
            is_changed = what == "changed" and kind is OrderKind.SAVE
            node.work(what if can_fail and (is_changed or what == "failed") else "", is_soon=is_changed, place=place)

    @rule(data=st.data())
    def learn(self, data: st.DataObject) -> None:
        if self.job.unaware:
            self.job.learn(data.draw(st.sampled_from(sorted(self.job.unaware))))

    @rule()
    def some_time(self) -> None:
        self.job.now += 1.0
        for node in self.job.nodes.values():
            node.take()

    @rule(data=st.data(), name=st.sampled_from(NAMES), is_complete=st.booleans())
    def write(self, data: st.DataObject, name: str, is_complete: bool) -> None:
        node = data.draw(st.sampled_from(sorted(self.job.nodes)))
        has_directory = self.job.nodes[node].council._own.is_ready and not self.job.nodes[node].is_gone
        if not self.is_ended and has_directory:
            self.job.write(node, name, is_complete=is_complete)

    @rule(data=st.data(), name=st.sampled_from(NAMES))
    def remove(self, data: st.DataObject, name: str) -> None:
        node = data.draw(st.sampled_from(sorted(self.job.nodes)))
        if not self.is_ended and name in self.job.nodes[node].entries:
            self.program_removed.add(name)
            self.job.remove(node, name)

    @rule(data=st.data())
    def wipe(self, data: st.DataObject) -> None:
        """The directory of a node goes; nothing that was in it counts as removed by the program."""
        node = self.job.nodes[data.draw(st.sampled_from(sorted(self.job.nodes)))]
        if not self.is_ended and node.council._own.is_ready:
            node.is_gone, node.entries = True, {}
            node.see()
            node.take()

    @precondition(lambda self: len(self.job.nodes) > 1)
    @rule(data=st.data())
    def lose(self, data: st.DataObject) -> None:
        index = data.draw(st.sampled_from(sorted(self.job.nodes)))
        is_over = all(node.is_over for node in self.job.nodes.values())
        if not is_over and all(node.council._own.is_ready for node in self.job.nodes.values()):
            self.lost.add(self.job.hosts[index])
            self.job.kill(index)
            self.job.connect()

    @rule()
    def world_dies(self) -> None:
        self.job.connect()

    @rule(is_orderly=st.booleans())
    def end(self, is_orderly: bool) -> None:
        if all(node.council._own.is_ready for node in self.job.nodes.values()):
            self.is_ended = True
            for node in self.job.nodes.values():
                node.council.end(is_orderly=is_orderly)
                node.take()

    @invariant()
    def one_number_is_one_generation(self) -> None:
        for node in self.job.nodes.values():
            for number, one in node.known.items():
                before = self.whole.setdefault(number, one)
                assert (before.attempt, before.nodes, before.entries) == (one.attempt, one.nodes, one.entries)

    @invariant()
    def the_newest_that_is_known_is_there(self) -> None:
        known = [one for node in self.job.nodes.values() for one in node.known.values()]
        newest = max(known, key=lambda one: one.number, default=None)
        if newest is None:
            return
        for node in self.job.nodes.values():
            if node.name in newest.nodes:
                assert node.store.get(newest.number) == (newest.attempt, saved_by(newest, node.name))
        for number in newest.numbers:
            holders = self.whole[number].nodes if number in self.whole else ()
            assert all(number in n.store for n in self.job.nodes.values() if n.name in holders)

    @invariant()
    def the_newest_protected_one_stays_until_a_newer_one_is_safe(self) -> None:
        known = [one for node in self.job.nodes.values() for one in node.known.values() if one.size]
        safe = max(known, key=lambda one: one.number, default=None)
        if safe is not None and self.job.drained < safe.number:
            for node in self.job.nodes.values():
                assert node.name not in safe.nodes or safe.number in node.store

    @invariant()
    def nothing_goes_in_the_target_but_what_the_program_removed(self) -> None:
        assert self.were_in_target <= self.job.target.keys() | self.program_removed
        self.were_in_target |= self.job.target.keys()

    def half_rewritten(self, last: JobGeneration) -> set[str]:
        """The entries of which some nodes have an old part, of a generation or of the start, and others another one."""
        found = set()
        for name in last.names.union(*(node.entries for node in self.job.nodes.values())):
            marks = last.marks(name)
            nodes = [node for node in self.job.nodes.values() if name in node.entries]
            if name in last.put or name not in last.names:  # all have it since the start, and one node saved it
                is_old = {node.entries[name].is_restored for node in nodes}
            else:
                is_old = {node.entries[name].mark == marks[node.name] for node in nodes if node.name in marks}
            if len(is_old) == 2:
                found.add(name)
        return found

    def teardown(self) -> None:
        if not hasattr(self, "job"):
            return
        job = self.job
        job.settle()
        reports = {n.index: n for n in job.nodes.values()}
        if not all(node.council._own.is_ready for node in reports.values()):
            return
        if not self.is_ended:
            job.end()
        assert all(node.is_over for node in reports.values())
        last = job.last
        complete = {name for node in reports.values() for name in node.entries}
        if last is None or not complete:  # the last checkpoint is never given up
            return
        if set(last.nodes) != {node.name for node in reports.values()}:  # none is made where all is in the target
            assert job.drained == last.number
        else:
            half = set() if reports[min(reports)].council.ledger.is_orderly else self.half_rewritten(last)
            for node in reports.values():
                for name, mark in saved_by(last, node.name).items():
                    found = node.entries.get(name)  # None: it was removed, and the last checkpoint is never given up
                    assert found is None or found.mark == mark or name in half
            missing = complete - last.names - set(last.dropped)
            if not reports[min(reports)].council.ledger.is_orderly:  # the parts of other nodes do not come any more
                missing -= arriving({node.name: node.council._own for node in reports.values()}, last)
            assert missing & half <= job.target.keys() | set(last.lacking), "the old ones stay where they are"
            missing -= half
            assert not missing or OrderKind.SAVE in self.failed_at_end
            ledger = reports[min(reports)].council.ledger
            assert job.drained == last.number or (
                self.failed_at_end & {OrderKind.PUBLISH, OrderKind.PLACE} and ledger.undrained_why
            )


TestDisorder = Disorder.TestCase
