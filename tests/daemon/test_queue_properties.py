"""The queue under arbitrary sequences of calls."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from hpcstage.daemon.queue.queue import Queue
from hpcstage.daemon.queue.rates import AnswerKind, Limits
from hpcstage.daemon.queue.states import FINAL, FileState
from hpcstage.plan.blocks import BLOCK_BYTES, blocks_bytes
from hpcstage.plan.types import Budget
from hpcstage.protocol.shim import Reason

SIZES = st.lists(st.integers(0, 5 * BLOCK_BYTES), min_size=1, max_size=30)


class QueueMachine(RuleBasedStateMachine):
    """Drives a queue as an engine would, and keeps its own books."""

    @initialize(
        sizes=SIZES,
        room=st.integers(0, 60),
        inodes=st.integers(0, 40),
        directories=st.integers(0, 3),
        rate=st.one_of(st.none(), st.floats(100, 1e6)),
        data=st.data(),
    )
    def start(self, sizes, room, inodes, directories, rate, data):
        self.sizes = sizes
        self.budget = Budget(room * BLOCK_BYTES, inodes)
        order = data.draw(st.lists(st.sampled_from(range(len(sizes))), unique=True))
        self.directories = directories
        self.queue = Queue(sizes, Limits(self.budget, directories, rate, patience_s=3.0, request_cap_s=8), order)
        self.now = 0.0
        self.grown = False
        self.flying: set[int] = set()
        self.handed: list[int] = []
        self.final: dict[int, FileState] = {}
        self.promoted: list[int] = []
        self.plain = order + [i for i in range(len(sizes)) if i not in order]

    def ids(self):
        return st.sampled_from(range(len(self.sizes)))

    @rule(seconds=st.floats(0, 2))
    def pass_time(self, seconds):
        self.now += seconds

    @rule(free=st.integers(0, 8))
    def hand_out(self, free):
        chosen = self.queue.next(free, self.now)
        assert len(chosen) <= free
        assert not self.flying & set(chosen), "in flight twice"
        assert len(set(chosen)) == len(chosen)
        assert not set(chosen) & self.final.keys(), "handed out after its end"
        requested = [i for i in chosen if i in self.promoted]
        assert chosen[: len(requested)] == requested, "requested ones come first"
        assert requested == [i for i in self.promoted if i in requested], "in the order of the requests"
        rest = chosen[len(requested) :]
        assert rest == [i for i in self.plain if i in set(rest)], "order kept"
        self.promoted = [i for i in self.promoted if self.queue.states.of(i) is FileState.PROMOTED]
        self.flying |= set(chosen)

    @rule(data=st.data())
    def request(self, data):
        id_ = data.draw(self.ids())
        before = self.queue.states.of(id_)
        decision = self.queue.request(id_, self.now)
        if before is FileState.STORED:
            assert decision.kind is AnswerKind.READY
        elif before in FINAL:
            assert decision.kind is AnswerKind.DIRECT
            assert decision.reason is not Reason.NONE
        else:
            assert decision.kind in (AnswerKind.WAIT, AnswerKind.DIRECT)
            if decision.kind is AnswerKind.WAIT:
                assert self.now < decision.deadline <= self.now + 4.0
                assert self.queue.states.of(id_) in (FileState.PROMOTED, FileState.FLYING)
                if before is FileState.WAITING:
                    self.promoted.append(id_)
            else:
                assert decision.reason is Reason.LATER
                assert self.queue.states.of(id_) is before, "stays in its place"

    @precondition(lambda self: self.flying)
    @rule(data=st.data(), size=st.integers(0, 5 * BLOCK_BYTES), same=st.booleans())
    def done(self, data, size, same):
        id_ = data.draw(st.sampled_from(sorted(self.flying)))
        size = self.sizes[id_] if same else size
        self.grown |= size > self.sizes[id_]
        void = self.queue.states.of(id_) is FileState.VOID
        assert self.queue.done(id_, size, self.now) is not void
        self.flying.discard(id_)
        self.final[id_] = FileState.VOID if void else FileState.STORED

    @precondition(lambda self: self.flying)
    @rule(data=st.data(), no_space=st.booleans())
    def failed(self, data, no_space):
        id_ = data.draw(st.sampled_from(sorted(self.flying)))
        self.queue.failed(id_, no_space=no_space)
        self.flying.discard(id_)
        assert self.queue.states.of(id_) in (FileState.FAILED, FileState.REFUSED, FileState.VOID)
        if no_space:
            assert self.queue.next(5, self.now) == []

    @precondition(lambda self: self.flying)
    @rule(data=st.data())
    def requeue(self, data):
        id_ = data.draw(st.sampled_from(sorted(self.flying)))
        void = self.queue.states.of(id_) is FileState.VOID
        self.queue.requeue(id_)
        self.flying.discard(id_)
        if not void:
            self.promoted.insert(0, id_)

    @rule(data=st.data())
    def void(self, data):
        ids = data.draw(st.lists(self.ids(), max_size=4, unique=True))
        flying = self.queue.void(ids)
        assert set(flying) <= self.flying
        for id_ in ids:
            assert self.queue.states.of(id_) is FileState.VOID
            self.final[id_] = FileState.VOID
        self.promoted = [i for i in self.promoted if i not in ids]

    @rule(first=st.integers(0, 30), many=st.integers(0, 30))
    def void_range(self, first, many):
        ids = range(min(first, len(self.sizes)), min(first + many, len(self.sizes)))
        before = [self.queue.states.of(i) for i in ids]
        used = self.queue.budget.used_files, self.queue.budget.used_bytes
        places, flying = self.queue.void_range(ids)
        assert (self.queue.budget.used_files, self.queue.budget.used_bytes) == used, "kept until they are deleted"
        assert set(flying) == {i for i, place in zip(ids, before, strict=True) if place is FileState.FLYING}
        stored = [i for i, place in zip(ids, places, strict=True) if place == FileState.STORED]
        assert stored == [i for i, place in zip(ids, before, strict=True) if place is FileState.STORED]
        self.queue.budget.give_back(sum(blocks_bytes(self.queue.states.size(i)) for i in stored), len(stored))
        self.final.update(dict.fromkeys(ids, FileState.VOID))
        self.promoted = [i for i in self.promoted if i not in ids]

    @rule(data=st.data())
    def reorder(self, data):
        order = data.draw(st.lists(self.ids(), max_size=10))
        self.queue.sequences.push(order)
        first = list(dict.fromkeys(order))
        self.plain = first + [i for i in self.plain if i not in first]

    @rule()
    def finish(self):
        """Whatever happened, the rest comes to an end."""
        for _ in range(200):
            self.now += 1000.0
            self.flying |= set(self.queue.next(4, self.now))
            for id_ in sorted(self.flying):
                self.queue.done(id_, self.sizes[id_], self.now)
            self.flying.clear()
            if self.queue.settled:
                break
        assert self.queue.settled
        assert all(self.queue.states.of(i) in FINAL for i in range(len(self.sizes)))
        assert sum(self.queue.states.count(place) for place in FINAL) == len(self.sizes)
        self.promoted = []
        self.final.update({i: self.queue.states.of(i) for i in range(len(self.sizes))})

    @invariant()
    def counts_agree(self):
        if not hasattr(self, "queue"):
            return
        places = [self.queue.states.of(i) for i in range(len(self.sizes))]
        for place in FileState:
            assert self.queue.states.count(place) == places.count(place)
        assert len(self.queue.flights.started) == len(self.flying)
        stored = [i for i, place in enumerate(places) if place is FileState.STORED]
        assert self.queue.budget.used_files == len(stored) + len(self.flying), "what is void gives its room back"
        if not self.flying:
            assert self.queue.budget.used_bytes == sum(blocks_bytes(self.queue.states.size(i)) for i in stored)
        assert self.queue.states.waiting == places.count(FileState.WAITING) + places.count(FileState.PROMOTED)

    @invariant()
    def within_budget(self):
        if hasattr(self, "queue") and self.queue.budget.used_files and not self.grown:
            assert self.queue.budget.used_bytes <= self.budget.size_bytes
            assert self.queue.budget.used_files + self.directories <= self.budget.inodes

    @invariant()
    def final_stays(self):
        for id_, place in getattr(self, "final", {}).items():
            assert self.queue.states.of(id_) in (place, FileState.VOID)


TestQueue = QueueMachine.TestCase
TestQueue.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
