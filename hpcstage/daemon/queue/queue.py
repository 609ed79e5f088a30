"""Decides which file is copied next and what a request is told: a pure state machine over the ids of a manifest.

The queue owns no clock (callers pass `now`, monotonic seconds), no disk, no process and no connection. Its parts, whose
interfaces callers use: `states` (how far each id is, who reads and keeps it), `sequences` (the orders), `budget`,
`flights` (the transfers under way), `large` (files whose copying may be deferred), `source` (what is read from the
source) and `from_peers` (what other nodes are asked for). A single node reads and keeps every file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import final

from hpcstage.daemon.queue.flights import Flights
from hpcstage.daemon.queue.freebudget import FreeBudget
from hpcstage.daemon.queue.frompeers import FromPeers
from hpcstage.daemon.queue.fromsource import FromSource
from hpcstage.daemon.queue.large import MOST_WAIT_S, Large
from hpcstage.daemon.queue.rates import AnswerKind, Decision, Estimates, Limits
from hpcstage.daemon.queue.sequences import Sequences
from hpcstage.daemon.queue.states import FINAL, FileState, NodeShare, States
from hpcstage.plan.blocks import blocks_bytes
from hpcstage.protocol.shim import Reason

SHORTEST_WAIT_S, SHORTEST_SHARED_WAIT_S, SHORTEST_PEER_WAIT_S = 0.25, 2.0, 5.0
"""The least time that a request waits: on a single node; in a node group, where a wait that ends too early has a file
read twice from the source, which the group is there to avoid; and for another node, which may have to read the file
first."""
_FLYING = FileState.FLYING
_REASONS = {FileState.FAILED: Reason.FAILED, FileState.VOID: Reason.VOID}


@final
class Queue:
    """Owns the parts, and what concerns several of them. Every call is O(1) amortised, but for those that take many
    ids. `read_of` returns the bytes of an id that copiers have read, in all attempts at it."""

    def __init__(
        self,
        sizes: Sequence[int],
        limits: Limits,
        order: Sequence[int] = (),
        *,
        read_of: Callable[[int], int] = lambda _: 0,
    ) -> None:
        estimates = Estimates()
        self.states = States(sizes)
        self.sequences = Sequences(self.states.cells, order)
        self.budget = FreeBudget(self.states, limits.budget, limits.directories)
        self.flights = Flights(self.states, self.budget, read_of)
        self.large = Large(self.flights, estimates, is_alone=not limits.shared)
        self.source = FromSource(self.sequences, self.flights, self.large, estimates, limits)
        self.from_peers = FromPeers(self.sequences, self.flights, self.large, self.source)
        self.is_disk_full = False
        """Whether the disk itself was full, whatever the budget allows."""

    @property
    def settled(self) -> bool:
        """Whether nothing is in flight and nothing will be handed out any more."""
        return not self.flights.started and not self.states.waiting

    # ---- requests

    def request(self, id_: int, now: float) -> Decision:
        """Returns what the program that opens `id_` is told. A wait moves a waiting id to the front. While no other
        node can be asked, this node reads what others would from the source."""
        states, temporary = self.states, self.budget.temporary
        state, closed = states.of(id_), states.closed
        if state is FileState.STORED:
            return Decision(AnswerKind.READY)
        if state in FINAL:
            is_refused = state is FileState.REFUSED
            return Decision(AnswerKind.DIRECT, reason=closed or Reason.FULL if is_refused else _REASONS[state])
        if self.large.is_large(id_) and not (closed and states.is_from_peer(id_)):
            return self._request_large(id_, now)
        if states.is_from_peer(id_) and not self.from_peers.linked and id_ not in self.flights.asked:
            states.fetch_here(id_)
            if state is FileState.PROMOTED:
                self.source.promoted.ids.append(id_)
        if state is FileState.REMOTE:
            if closed or not temporary.can_hold(blocks_bytes(states.size(id_))):
                return Decision(AnswerKind.DIRECT, reason=closed or Reason.FULL)
            temporary.passed()
        bringer = self.from_peers if states.is_from_peer(id_) else self.source
        return self._wait(id_, bringer.expected_s(id_, now), now)

    def _request_large(self, id_: int, now: float) -> Decision:
        """Lets the program read a large file at the source, unless its copy is nearly here: it may read little."""
        if self.states.is_from_peer(id_):
            if self.from_peers.are_sooner(id_, now):
                self.large.reads.awaited(id_)
                return self._wait(id_, self.from_peers.estimates.transfer_s(self.states.size(id_)), now)
        elif self.states.of(id_) is _FLYING and self.large.is_worth_waiting(id_, now):
            return Decision(AnswerKind.WAIT, deadline=now + 2 * MOST_WAIT_S)
        self.large.reads.opened(id_, now)
        return Decision(AnswerKind.DIRECT, reason=Reason.LARGE)

    def _wait(self, id_: int, expected_s: float, now: float) -> Decision:
        """Lets the program wait for a copy that is expected so soon, if that is not too long."""
        is_from_peer = self.states.is_from_peer(id_)
        own_least_s = SHORTEST_SHARED_WAIT_S if self.source.limits.shared else SHORTEST_WAIT_S
        least_s = SHORTEST_PEER_WAIT_S if is_from_peer else own_least_s
        decision = self.source.limits.decide(expected_s, least_s, now)
        if decision.kind is AnswerKind.WAIT:
            self.flights.ahead.discard(id_)
            if self.states.of(id_) in (FileState.WAITING, FileState.REMOTE):
                self.states.move(id_, FileState.PROMOTED)
                (self.from_peers if is_from_peer else self.source).promoted.ids.append(id_)
        return decision

    # ---- what became of a transfer

    def done(self, id_: int, size_bytes: int, now: float) -> bool:
        """Notes that a transfer was published with this size. Returns False if it had become void, so that the caller
        has to delete the copy."""
        is_requested = self.flights.asked.get(id_)
        started = self.flights.end(id_)
        state = self.states.of(id_)
        if started is None:
            return state is FileState.STORED
        self.large.deferred.discard(id_)
        if is_requested is None:
            self.source.estimates.finished(size_bytes, now - started, now)
        elif is_requested:
            self.from_peers.estimates.finished(size_bytes, now - started, now)
        if state is not _FLYING:
            return False
        self.flights.take_in(id_, size_bytes)
        return True

    def failed(self, id_: int, *, no_space: bool = False) -> None:
        """Notes that a transfer failed for good. With `no_space` (ENOSPC, EDQUOT) the queue admits nothing more."""
        if no_space:
            self.is_disk_full = True
            self.states.close(Reason.FULL)
        if self.flights.end(id_) is not None and self.states.of(id_) is FileState.FLYING:
            self.states.move(id_, FileState.REFUSED if no_space else FileState.FAILED)

    def void(self, ids: Iterable[int]) -> list[int]:
        """Voids files that were written to: they are never handed out again. Returns those whose copies may still come:
        they are in flight, or their peer requests were given up."""
        flying = []
        for id_ in ids:
            state = self.states.of(id_)
            if state is FileState.STORED:
                self.budget.drop(id_)
            is_doubtful = id_ in self.from_peers.doubtful and id_ not in self.flights.started
            if state is FileState.FLYING or is_doubtful:
                flying.append(id_)
            self.states.move(id_, FileState.VOID)
        return flying

    def void_range(self, ids: range) -> tuple[bytes, list[int]]:
        """Voids a range of ids as `void` does, fast enough for a million. Returns the state that each had, and those
        whose copies may still come. Stored copies keep their part of the budget: the caller that deletes them gives it
        back, as if this node had kept all of them."""
        flying = [id_ for id_ in self.flights.needed() if id_ in ids]
        flying += [id_ for id_ in self.from_peers.doubtful if id_ in ids and id_ not in self.flights.started]
        self.budget.keep(ids)
        return self.states.void_range(ids), flying

    # ---- dividing the files among nodes

    def divide(self, share: NodeShare | None) -> None:
        """Divides the files: this node reads its share from the source; None: it reads and keeps all, as far as the
        budget allows. Transfers that have begun go on, copies that are here stay. O(number of ids)."""
        self.budget.set_aside(None if share is None else share.temporary)
        self.states.divide(share, self.flights.started.keys() - self.flights.asked.keys())
        self.budget.keep_own()
        self.sequences.restart()
        promoted = (*self.source.promoted.ids, *self.from_peers.promoted.ids)
        self.source.promoted.refill(promoted)
        self.from_peers.promoted.refill(promoted)
        self.from_peers.held.ids.clear()
