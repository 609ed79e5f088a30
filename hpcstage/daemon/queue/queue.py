"""Decides which file is copied next and what a request is told: a pure state machine over the ids of a manifest.

A file waits in an order, is requested (a program waits for it) or comes, from the source or from another node.

From the source, large files that programs read meanwhile come first, as far as `plan.rule` allows, then requested ones.
After them, files that other nodes asked for and files of this node's own order take turns. Large files that were
deferred come last. Other nodes are asked for requested files, then for those of the order, then for deferred ones, and
at last for those that run ahead of a program that announced what it reads. `peers.routes` decides which node is asked,
`peers.asks` how much may be asked for at a time.

The queue owns no clock (callers pass `now`, monotonic seconds), no disk, no process and no connection. Its parts, whose
interfaces callers use: `states` (how far each id is, who reads and keeps it), `sequences` (the orders), `budget`,
`flights` (the transfers under way) and `large` (files whose copying may be deferred). A single node reads and keeps
every file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import final

from hpcstage.daemon.queue.freebudget import FreeBudget
from hpcstage.daemon.queue.large import MOST_WAIT_S, Large
from hpcstage.daemon.queue.rates import AnswerKind, Bucket, Decision, Estimates, Limits
from hpcstage.daemon.queue.sequences import Line, Sequences
from hpcstage.daemon.queue.states import (
    FINAL,
    FROM_PEER,
    LOOK_LIMIT,
    PEER_REMOTE,
    PEER_WAITS,
    SOURCE_WAITS,
    FileState,
    Flights,
    NodeShare,
    States,
)
from hpcstage.plan.blocks import blocks_bytes
from hpcstage.protocol.shim import Reason

SHORTEST_WAIT_S, SHORTEST_SHARED_WAIT_S, SHORTEST_PEER_WAIT_S = 0.25, 2.0, 5.0
"""The least time that a request waits: on a single node; in a node group, where a wait that ends too early has a file
read twice from the source, which the group is there to avoid; and for another node, which may have to read the file
first."""
LONGEST_QUEUE_S = 1.0
"""The estimate of a wait counts at most this much of the time that the last answers took: answers that took long,
maybe because a node was gone, do not end the asking."""
_FLYING, _STORED = FileState.FLYING, FileState.STORED
_REASONS = {FileState.FAILED: Reason.FAILED, FileState.VOID: Reason.VOID}


@final
class Queue:
    """Owns what goes before the orders, and the rate cap. Every call is O(1) amortised, but for those that take many
    ids. `read_of` returns the bytes of an id that copiers have read, in all attempts at it."""

    def __init__(
        self,
        sizes: Sequence[int],
        limits: Limits,
        order: Sequence[int] = (),
        *,
        read_of: Callable[[int], int] = lambda _: 0,
    ) -> None:
        self.limits = limits
        self.estimates = Estimates()
        self.peer_estimates = Estimates()
        """How long files that a program waited for took, from the peer request to the copy."""
        self.states = States(sizes)
        self.sequences = Sequences(self.states.cells, order)
        self.budget = FreeBudget(self.states, limits.budget, limits.directories)
        self.flights = Flights(self.states)
        self.large = Large(self.states, self.flights, self.estimates, read_of, is_alone=not limits.shared)
        self.linked = False
        """Whether other nodes can be asked now."""
        self.turns = 1
        """The number of files asked for by other nodes that are read before each file of this node's own order."""
        self.promoted = Line(self.states.cells, FileState.PROMOTED)
        self.peer_promoted = Line(self.states.cells, FROM_PEER | FileState.PROMOTED)
        self.is_stalled = False
        """Whether the program has to read what came before this node asks for more ahead of it."""
        self.is_disk_full = False
        """Whether the disk itself was full, whatever the budget allows."""
        self._bucket = Bucket(limits.max_rate_bytes_per_s)
        self._turn = 0
        self._asked_for = Line(self.states.cells, SOURCE_WAITS)
        """Ids that other nodes asked for."""
        self._released = Line(self.states.cells, SOURCE_WAITS)
        """Ids that another node was asked for in vain; they are read before the order goes on."""
        self._held = Line(self.states.cells, PEER_WAITS, PEER_REMOTE)
        """Ids that other nodes are asked for before the order goes on."""
        self._ahead: set[int] = set()
        """Ids that other nodes keep and were asked for while no program waited for them."""
        self._doubtful: set[int] = set()
        """Ids whose peer requests were given up while their copies may still come."""

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
        if state is _STORED:
            return Decision(AnswerKind.READY)
        if state in FINAL:
            is_refused = state is FileState.REFUSED
            return Decision(AnswerKind.DIRECT, reason=closed or Reason.FULL if is_refused else _REASONS[state])
        if self.large.is_large(id_) and not (closed and states.is_from_peer(id_)):
            return self._request_large(id_, now)
        if states.is_from_peer(id_) and not self.linked and id_ not in self.flights.asked:
            states.fetch_here(id_)
            if state is FileState.PROMOTED:
                self.promoted.ids.append(id_)
        if state is FileState.REMOTE:
            if closed or not temporary.can_hold(blocks_bytes(states.size(id_))):
                return Decision(AnswerKind.DIRECT, reason=closed or Reason.FULL)
            temporary.passed()
        return self._wait(id_, self._expected_s(id_, now), now)

    def _request_large(self, id_: int, now: float) -> Decision:
        """Lets the program read a large file at the source, unless its copy is nearly here: it may read little."""
        if self.states.is_from_peer(id_):
            if self._are_peers_sooner(id_, now):
                self.large.reads.awaited(id_)
                return self._wait(id_, self.peer_estimates.transfer_s(self.states.size(id_)), now)
        elif self.states.of(id_) is _FLYING and self.large.is_worth_waiting(id_, now):
            return Decision(AnswerKind.WAIT, deadline=now + 2 * MOST_WAIT_S)
        self.large.reads.opened(id_, now)
        return Decision(AnswerKind.DIRECT, reason=Reason.LARGE)

    def _are_peers_sooner(self, id_: int, now: float) -> bool:
        """Returns whether a large file comes sooner from another node, which says at once if it has no copy, than from
        the source."""
        size = self.states.size(id_)
        is_remote = self.states.of(id_) is FileState.REMOTE
        has_space = not is_remote or self.budget.temporary.can_hold(blocks_bytes(size))
        most_s = min(self.limits.patience_s, self.estimates.transfer_s(size))
        is_sooner = self.peer_estimates.transfer_s(size) <= most_s
        return self.linked and has_space and is_sooner and self.large.why_not(id_, now) is None

    def _expected_s(self, id_: int, now: float) -> float:
        """Returns the seconds in which a program that opens a file has its copy: another node may have to read it
        first."""
        state, size, peers = self.states.of(id_), self.states.size(id_), self.peer_estimates
        is_from_peer = self.states.is_from_peer(id_)
        alone_s = self.estimates.transfer_s(size)
        if is_from_peer:
            alone_s += peers.transfer_s(size) - peers.file_s + min(peers.file_s, LONGEST_QUEUE_S)
        if state is _FLYING:
            return max(alone_s - self.flights.took_s(id_, now), alone_s / 8)
        ahead_bytes = 0 if is_from_peer else self.states.promoted_bytes / (2 if state is FileState.PROMOTED else 1)
        return alone_s + self.estimates.drain_s(ahead_bytes)

    def _wait(self, id_: int, expected_s: float, now: float) -> Decision:
        """Lets the program wait for a copy that is expected so soon, if that is not too long."""
        is_from_peer = self.states.is_from_peer(id_)
        own_least_s = SHORTEST_SHARED_WAIT_S if self.limits.shared else SHORTEST_WAIT_S
        decision = self.limits.decide(expected_s, SHORTEST_PEER_WAIT_S if is_from_peer else own_least_s, now)
        if decision.kind is AnswerKind.WAIT:
            self._ahead.discard(id_)
            if self.states.of(id_) in (FileState.WAITING, FileState.REMOTE):
                self.states.move(id_, FileState.PROMOTED)
                (self.peer_promoted if is_from_peer else self.promoted).ids.append(id_)
        return decision

    def asked_for(self, id_: int) -> AnswerKind:
        """Returns what another node that asks for a file is told; WAIT: this node reads it from the source soon."""
        state = self.states.of(id_)
        if state is _STORED:
            return AnswerKind.READY
        is_final = state in FINAL or state is FileState.REMOTE
        if self.states.closed or is_final or self.states.is_from_peer(id_):
            return AnswerKind.DIRECT
        if state is FileState.WAITING:
            self._asked_for.ids.append(id_)
        return AnswerKind.WAIT

    def is_deferred(self, id_: int, now: float) -> bool:
        """Returns whether other nodes that ask for a file are told to ask again later."""
        waits = self.states.of(id_) in (FileState.WAITING, FileState.REMOTE)
        return waits and self.large.why_not(id_, now) is not None

    # ---- whose turn it is, from the source

    def next(self, free: int, now: float) -> list[int]:
        """Returns up to `free` ids to read from the source now. They are in flight from here on."""
        chosen: list[int] = []
        passed_over = 0
        states, bucket, large = self.states, self._bucket, self.large
        while len(chosen) < free and passed_over < LOOK_LIMIT and not states.closed:
            id_ = self._next(now, is_capped=not bucket.open(now))
            if id_ is None:
                break
            if self.budget.is_full:
                states.close(Reason.FULL)
            if not self._begin(id_, now):
                passed_over += 1
                continue
            bucket.take(states.size(id_))
            if large.is_large(id_):
                large.begun(id_, now)
            chosen.append(id_)
        return chosen

    def _next(self, now: float, *, is_capped: bool) -> int | None:
        """Takes out the next id. The cap keeps none back that a program waits for, as it would read the file itself."""
        large = self.large
        if not is_capped and (wanted := large.next_wanted(now)) is not None:
            return wanted
        while (id_ := self.promoted.pop() if is_capped else self._pop()) is not None:
            if large.why_not(id_, now) is None:
                return id_
            self._defer(id_, now)
        return None if is_capped or not large.may_bring_deferred(now) else large.pop_deferred(SOURCE_WAITS, now)

    def _pop(self) -> int | None:
        if (requested := self.promoted.pop()) is not None:
            return requested
        if self._turn < self.turns and (asked_for := self._asked_for.pop()) is not None:
            self._turn += 1
            return asked_for
        self._turn = 0
        if (released := self._released.pop()) is not None:
            return released
        ordered = self.sequences.pop(SOURCE_WAITS) if self.states.ordered(from_peers=False) else None
        return self._asked_for.pop() if ordered is None else ordered

    def wake_after(self, now: float) -> float | None:
        """Returns the seconds until the rate cap admits a transfer that no program waits for; None if it keeps nothing
        back."""
        return self._bucket.delay_s(now) or None if self.states.waiting else None

    def _begin(self, id_: int, now: float) -> bool:
        """Begins a transfer. Returns False if there is no budget for it, which refuses the file."""
        if not self.budget.reserve(id_):
            self.states.move(id_, FileState.REFUSED)
            return False
        self.states.move(id_, _FLYING)
        self.flights.started[id_] = now
        return True

    def _defer(self, id_: int, now: float) -> None:
        self.states.wait_again(id_)
        self.large.defer(id_, now)

    # ---- whose turn it is, from other nodes

    def next_from_peers(self, files: int, size_bytes: int, now: float) -> list[int]:
        """Returns ids to ask other nodes for, at most `files` with `size_bytes` together. A larger one is asked for
        only when no other peer request is in flight. The ids are in flight from here on."""
        chosen: list[int] = []
        passed_over = 0
        states, asked = self.states, self.flights.asked
        while len(chosen) < files and passed_over < LOOK_LIMIT and self.linked and not states.closed:
            id_ = self._pop_from_peers(now)
            if id_ is None:
                break
            size, is_requested = states.size(id_), states.of(id_) is FileState.PROMOTED
            if not is_requested and self._is_put_off(id_, now):
                passed_over += 1
                continue
            must_wait = not states.keeps(id_) and self.budget.temporary.must_wait(blocks_bytes(size))
            if must_wait or (size > size_bytes and asked):
                (self.peer_promoted if is_requested else self._held).ids.appendleft(id_)
                break
            if not self._begin(id_, now):
                passed_over += 1
                continue
            asked[id_] = is_requested
            if not is_requested and not states.keeps(id_):
                self._ahead.add(id_)
            size_bytes -= size
            chosen.append(id_)
        return chosen

    def _pop_from_peers(self, now: float) -> int | None:
        if (requested := self.peer_promoted.pop()) is not None:
            return requested
        if (held := self._held.pop()) is not None:
            return held
        ordered = self.sequences.pop(PEER_WAITS) if self.states.ordered(from_peers=True) else None
        deferred = self.large.pop_deferred(PEER_WAITS, now) if ordered is None else ordered
        return self._next_ahead(now) if deferred is None else deferred

    def _next_ahead(self, now: float) -> int | None:
        """Returns the next id that the program will read of those that other nodes keep; None where there is none or
        no free budget for it."""
        temporary = self.budget.temporary
        if not temporary.limit.size_bytes:
            return None
        while (id_ := self.sequences.peek_ahead()) is not None and self._is_put_off(id_, now):
            self.sequences.pop(PEER_REMOTE)
        self.is_stalled = id_ is not None and not temporary.fits_ahead(blocks_bytes(self.states.size(id_)))
        return None if self.is_stalled else id_

    def _is_put_off(self, id_: int, now: float) -> bool:
        """Defers a large file that is not to be brought now. Returns whether it did."""
        if self.large.why_not(id_, now) is None:
            return False
        self.large.defer(id_, now)
        return True

    # ---- what came

    def done(self, id_: int, size_bytes: int, now: float) -> bool:
        """Notes that a transfer was published with this size. Returns False if it had become void, so that the caller
        has to delete the copy."""
        is_requested = self.flights.asked.get(id_)
        started = self._end(id_)
        state = self.states.of(id_)
        if started is None:
            return state is _STORED
        if is_requested is None:
            self.estimates.finished(size_bytes, now - started, now)
        elif is_requested:
            self.peer_estimates.finished(size_bytes, now - started, now)
        if state is not _FLYING:
            return False
        self._take_in(id_, size_bytes)
        return True

    def came_late(self, id_: int, size_bytes: int) -> bool:
        """Takes in a copy whose peer request was given up. Returns False if the caller has to delete it or a transfer
        under way will find it."""
        self._doubtful.discard(id_)
        state, closed = self.states.of(id_), self.states.closed
        if state in (FileState.WAITING, FileState.PROMOTED) or (closed and state is FileState.REFUSED):
            self._take_in(id_, size_bytes)
            return True
        return state is _STORED

    def _end(self, id_: int) -> float | None:
        """Ends a transfer and gives its budget back. Returns when it began; None if it was not in flight. A file whose
        copy is still of use is FLYING until the caller gives it another state."""
        started = self.flights.started.pop(id_, None)
        if started is not None:
            self.flights.asked.pop(id_, None)
            self.budget.release(id_)
        return started

    def _take_in(self, id_: int, size_bytes: int) -> None:
        """Takes in the copy of an id, which is in the store with this size."""
        self.large.deferred.discard(id_)
        self.budget.stored(id_, size_bytes, ahead=id_ in self._ahead)
        self._ahead.discard(id_)
        self.states.move(id_, _STORED)
        self.states.resize(id_, size_bytes)

    # ---- what did not come

    def failed(self, id_: int, *, no_space: bool = False) -> None:
        """Notes that a transfer failed for good. With `no_space` (ENOSPC, EDQUOT) the queue admits nothing more."""
        if no_space:
            self.is_disk_full = True
            self.states.close(Reason.FULL)
        if self._end(id_) is not None and self.states.of(id_) is _FLYING:
            self.states.move(id_, FileState.REFUSED if no_space else FileState.FAILED)

    def requeue(self, id_: int) -> None:
        """Puts a transfer that was lost (its copier died) back, in front."""
        if self._end(id_) is not None and self.states.of(id_) is _FLYING:
            self.states.move(id_, FileState.PROMOTED)
            self.promoted.ids.appendleft(id_)

    def given_up(self, id_: int, now: float) -> bool:
        """Takes back a transfer that was given up: it goes before the order again, or is deferred if it must not be
        copied now. Returns False if it was not in flight, or came to nothing."""
        if self.states.of(id_) is not _FLYING:
            return False
        if not self.large.reads.has(id_, now):
            self.large.taken_back(id_)
        if self.large.why_not(id_, now) is None:
            self.requeue(id_)
            return True
        self._end(id_)
        self._defer(id_, now)
        self.large.join_late(id_)
        return True

    def missed(self, id_: int, *, requested: bool, doubtful: bool = False) -> None:
        """Takes back a peer request that brought nothing: the source is read instead, next if the file is `requested`.

        `doubtful` says that the copy may come all the same.
        """
        if id_ not in self.flights.asked:
            return
        if doubtful:
            self._doubtful.add(id_)
        self.states.fetch_here(id_)
        if requested:
            self.requeue(id_)
        else:
            self.take_back(id_)
            self._released.ids.append(id_)

    def deferred_by_peer(self, id_: int, now: float) -> None:
        """Defers a large file that the other node does not copy now; it is asked for again later."""
        if self.take_back(id_):
            self.large.not_yet(id_, now)
            self.large.join_late(id_)

    def take_back(self, id_: int) -> bool:
        """Takes back a peer request: the file waits again. Returns False if there was none. The files of a missing node
        are divided anew when it is known who has them."""
        if id_ not in self.flights.asked:
            return False
        self._ahead.discard(id_)
        self._end(id_)
        if self.states.of(id_) is _FLYING:
            self.states.wait_again(id_)
        return True

    def void(self, ids: Iterable[int]) -> list[int]:
        """Voids files that were written to: they are never handed out again. Returns those whose copies may still come:
        they are in flight, or their peer requests were given up."""
        coming = []
        for id_ in ids:
            if self.states.of(id_) is _STORED:
                self.budget.drop(id_)
            if self._may_come(id_):
                coming.append(id_)
            self.states.move(id_, FileState.VOID)
        return coming

    def void_range(self, ids: range) -> tuple[bytes, list[int]]:
        """Voids a range of ids as `void` does, fast enough for a million. Returns the state that each had, and those
        whose copies may still come. Stored copies keep their part of the budget: the caller that deletes them gives it
        back, as if this node had kept all of them."""
        begun = dict.fromkeys((*self.flights.started, *self._doubtful))
        coming = [id_ for id_ in begun if id_ in ids and self._may_come(id_)]
        self.budget.keep(ids)
        return self.states.void_range(ids), coming

    def _may_come(self, id_: int) -> bool:
        is_doubtful = id_ in self._doubtful and id_ not in self.flights.started
        return is_doubtful or self.states.of(id_) is _FLYING

    # ---- dividing the files among nodes

    def divide(self, share: NodeShare | None) -> None:
        """Divides the files: this node reads its share from the source; None: it reads and keeps all, as far as the
        budget allows. Transfers that have begun go on, copies that are here stay. O(number of ids)."""
        self.budget.set_aside(None if share is None else share.temporary)
        self.states.divide(share, self.flights.started.keys() - self.flights.asked.keys())
        self.budget.keep_own()
        self.sequences.restart()
        self._divide_promoted()
        self._held.ids.clear()

    def unlink(self, is_requested: Callable[[int], bool]) -> None:
        """Notes that no node can be asked any more: ids that were asked for wait again, and requested ones are read
        from the source."""
        self.linked = False
        for id_ in list(self.flights.asked):
            if is_requested(id_):
                self.missed(id_, requested=True)
            else:
                self.take_back(id_)
                self._held.ids.append(id_)
        for id_ in self.peer_promoted.ids:
            if self.states.of(id_) is FileState.PROMOTED:
                self.states.fetch_here(id_)
        self._divide_promoted()

    def _divide_promoted(self) -> None:
        promoted = (*self.promoted.ids, *self.peer_promoted.ids)
        self.promoted.refill(promoted)
        self.peer_promoted.refill(promoted)
