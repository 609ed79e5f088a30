"""The queue of a node in a group under arbitrary sequences of calls."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from hpcstage.daemon.queue.queue import Queue
from hpcstage.daemon.queue.rates import AnswerKind, Limits
from hpcstage.daemon.queue.states import FINAL, FileState, NodeShare
from hpcstage.plan.blocks import BLOCK_BYTES, blocks_bytes
from hpcstage.plan.types import Budget
from hpcstage.protocol.shim import Reason

SIZES = st.lists(st.integers(0, 3 * BLOCK_BYTES), min_size=1, max_size=24)
PLENTY = Budget(1 << 40, 1 << 30)


class GroupQueueMachine(RuleBasedStateMachine):
    """Drives a queue as engine and peers would, and keeps its own books of what flies where."""

    @initialize(sizes=SIZES, room=st.one_of(st.none(), st.integers(4, 60)), data=st.data())
    def start(self, sizes, room, data):
        self.sizes = list(sizes)
        self.budget = PLENTY if room is None else Budget(room * BLOCK_BYTES, 1 << 30)
        self.queue = Queue(sizes, Limits(self.budget, patience_s=1e9, request_cap_s=8, shared=True))
        self.now = 0.0
        self.source: set[int] = set()
        self.peer: set[int] = set()
        self.requested: set[int] = set()
        self.ended: set[int] = set()
        self.divide(data)

    def ids(self):
        return st.sampled_from(range(len(self.sizes)))

    def some(self, data):
        return data.draw(st.lists(self.ids(), unique=True, max_size=len(self.sizes)))

    @rule(data=st.data())
    def divide(self, data):
        own = self.some(data)
        rest = [i for i in range(len(self.sizes)) if i not in own]
        temporary = data.draw(st.one_of(st.none(), st.integers(0, 12)))
        if temporary is None:
            self.queue.divide(NodeShare(own))
            self.expected = {i: "source" if i in own else "peer" for i in range(len(self.sizes))}
        else:
            unplaced = [i for i in rest if data.draw(st.integers(0, 5)) == 0]
            others = [i for i in rest if i not in unplaced and data.draw(st.booleans())]
            self.queue.divide(NodeShare(own, others, unplaced, Budget(temporary * BLOCK_BYTES, 6)))
        for id_ in self.peer:
            assert id_ in self.queue.flights.asked, "a request is not forgotten when files are dealt anew"

    @rule()
    def adopt(self):
        self.unlink()
        self.queue.divide(None)
        assert self.queue.states.count(FileState.REMOTE) == 0
        assert not any(self.queue.states.is_from_peer(i) for i in range(len(self.sizes)))

    @rule()
    def link(self):
        self.queue.linked = True

    @rule()
    def unlink(self):
        before = {i for i in self.peer if i in self.requested}
        self.queue.unlink(self.requested.__contains__)
        self.peer.clear()
        assert len(self.queue.flights.asked) == 0
        for id_ in before:
            assert self.queue.states.of(id_) in {FileState.PROMOTED, FileState.REFUSED, *FINAL}
            assert not self.queue.states.is_from_peer(id_)

    @rule(free=st.integers(0, 6))
    def hand_out(self, free):
        self.now += 1.0
        chosen = self.queue.next(free, self.now)
        assert len(chosen) <= free
        assert len(set(chosen)) == len(chosen)
        for id_ in chosen:
            assert id_ not in self.source | self.peer, "in flight twice"
            assert not self.queue.states.is_from_peer(id_), "what another node reads"
            assert id_ not in self.ended
        self.source |= set(chosen)
        self.check_dropped()

    @rule(files=st.integers(0, 6), blocks=st.integers(0, 12))
    def ask(self, files, blocks):
        self.now += 1.0
        asked_before = len(self.peer)
        chosen = self.queue.next_from_peers(files, blocks * BLOCK_BYTES, self.now)
        assert len(chosen) <= files
        if not self.queue.linked:
            assert chosen == []
        size = sum(self.queue.states.size(i) for i in chosen)
        assert size <= blocks * BLOCK_BYTES or (len(chosen) == 1 and not asked_before), "credits"
        for id_ in chosen:
            assert id_ not in self.source | self.peer, "in flight twice"
            assert self.queue.states.is_from_peer(id_)
            assert id_ not in self.ended
        self.peer |= set(chosen)
        self.check_dropped()

    @rule(data=st.data())
    def request(self, data):
        id_ = data.draw(self.ids())
        before = self.queue.states.of(id_)
        decision = self.queue.request(id_, self.now)
        if before is FileState.STORED:
            assert decision.kind is AnswerKind.READY
        elif before in FINAL:
            assert decision.kind is AnswerKind.DIRECT
        elif decision.kind is AnswerKind.WAIT:
            self.requested.add(id_)
            assert self.now < decision.deadline <= self.now + 4.0
            assert self.queue.states.of(id_) in (FileState.PROMOTED, FileState.FLYING)
            if not self.queue.linked:
                assert not self.queue.states.is_from_peer(id_) or id_ in self.peer
        else:
            assert decision.reason is Reason.FULL
            assert self.queue.states.of(id_) is before

    @rule(data=st.data())
    def asked(self, data):
        id_ = data.draw(self.ids())
        kind = self.queue.asked_for(id_)
        place = self.queue.states.of(id_)
        if place is FileState.STORED:
            assert kind is AnswerKind.READY
        elif kind is AnswerKind.WAIT:
            assert place in (FileState.WAITING, FileState.PROMOTED, FileState.FLYING)
            assert not self.queue.states.is_from_peer(id_), "two nodes would wait for each other"

    @precondition(lambda self: self.peer | self.source)
    @rule(data=st.data(), size=st.integers(0, 3 * BLOCK_BYTES), same=st.booleans())
    def done(self, data, size, same):
        id_ = data.draw(st.sampled_from(sorted(self.source | self.peer)))
        size = self.queue.states.size(id_) if same else size
        void = self.queue.states.of(id_) is FileState.VOID
        assert self.queue.done(id_, size, self.now) is not void
        self.source.discard(id_)
        self.peer.discard(id_)
        self.check_dropped()

    @precondition(lambda self: self.peer)
    @rule(data=st.data(), doubtful=st.booleans())
    def missed(self, data, doubtful):
        id_ = data.draw(st.sampled_from(sorted(self.peer)))
        void = self.queue.states.of(id_) is FileState.VOID
        self.queue.missed(id_, requested=id_ in self.requested, doubtful=doubtful)
        self.peer.discard(id_)
        assert not self.queue.states.is_from_peer(id_), "a remote id that was refused becomes local"
        expected = {FileState.PROMOTED} if id_ in self.requested else {FileState.WAITING, FileState.REMOTE}
        assert void or self.queue.states.of(id_) in expected | {FileState.REFUSED}

    @rule(data=st.data(), size=st.integers(0, 3 * BLOCK_BYTES))
    def came_late(self, data, size):
        id_ = data.draw(self.ids())
        if id_ in self.peer:
            return
        before = self.queue.states.of(id_)
        taken = self.queue.came_late(id_, size)
        assert taken or before not in (FileState.WAITING, FileState.PROMOTED, FileState.STORED)
        assert not taken or self.queue.states.of(id_) is FileState.STORED
        self.check_dropped(id_)

    @precondition(lambda self: self.source)
    @rule(data=st.data())
    def failed(self, data):
        id_ = data.draw(st.sampled_from(sorted(self.source)))
        self.queue.failed(id_)
        self.source.discard(id_)
        assert self.queue.states.of(id_) in (FileState.FAILED, FileState.VOID)

    @precondition(lambda self: self.source)
    @rule(data=st.data())
    def requeue(self, data):
        id_ = data.draw(st.sampled_from(sorted(self.source)))
        self.queue.requeue(id_)
        self.source.discard(id_)

    @rule(data=st.data())
    def void(self, data):
        ids = data.draw(st.lists(self.ids(), max_size=3, unique=True))
        void = {id_ for id_ in ids if self.queue.states.of(id_) is FileState.VOID}
        flying = self.queue.void(ids)
        assert set(flying) >= set(ids) & (self.source | self.peer) - void
        assert all(self.queue.states.of(i) is FileState.VOID for i in ids)

    @rule(data=st.data())
    def reorder(self, data):
        self.queue.sequences.push(self.some(data), data.draw(st.sampled_from(["", "announced"])))

    def check_dropped(self, *new):
        for id_ in self.queue.budget.temporary.dropped:
            assert self.queue.states.of(id_) in (FileState.REMOTE, FileState.VOID), (
                "only copies in the store are dropped"
            )
        self.queue.budget.temporary.dropped.clear()

    @rule()
    def finish(self):
        """Whatever happened, the rest comes to an end; what other nodes keep stays there."""
        for _ in range(300):
            self.now += 1000.0
            self.source |= set(self.queue.next(4, self.now))
            self.peer |= set(self.queue.next_from_peers(4, 1 << 40, self.now))
            for id_ in sorted(self.source | self.peer):
                self.queue.done(id_, self.queue.states.size(id_), self.now)
            self.source.clear()
            self.peer.clear()
            self.check_dropped()
            if self.queue.settled or not self.queue.linked:
                break
        if self.queue.linked:
            assert self.queue.settled
            assert all(self.queue.states.of(i) in FINAL | {FileState.REMOTE} for i in range(len(self.sizes)))

    @invariant()
    def counts_agree(self):
        if not hasattr(self, "queue"):
            return
        queue = self.queue
        places = [queue.states.of(i) for i in range(len(self.sizes))]
        for place in FileState:
            assert queue.states.count(place) == places.count(place)
        self.ended |= {i for i, place in enumerate(places) if place in (FileState.VOID, FileState.FAILED)}
        assert len(queue.flights.started) == len(self.source) + len(self.peer)
        assert len(queue.flights.asked) == len(self.peer)
        peer = [i for i, place in enumerate(places) if place is FileState.WAITING and queue.states.is_from_peer(i)]
        assert queue.states.closed or queue.states.ordered(from_peers=False) == places.count(FileState.WAITING) - len(
            peer
        )

    @invariant()
    def books_agree(self):
        if not hasattr(self, "queue"):
            return
        queue = self.queue
        kept = [i for i in range(len(self.sizes)) if queue.states.of(i) is FileState.STORED]
        flying = self.source | self.peer
        used = sum(blocks_bytes(queue.states.size(i)) for i in kept)
        assert used <= queue.budget.used_bytes
        assert queue.budget.used_files == len(kept) + len(flying)
        assert queue.budget.temporary.used_bytes <= queue.budget.used_bytes


TestGroupQueue = GroupQueueMachine.TestCase
TestGroupQueue.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
