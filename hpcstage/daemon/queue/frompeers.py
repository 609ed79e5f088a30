"""Decides what a node asks other nodes for, and what happens after a peer request brought nothing. Pure.

Owns the order of peer requests and those that run ahead of a program that announced what it reads. `peers.routes`
decides which node is asked, `peers.asks` how much may be asked for at a time.
"""

from __future__ import annotations

from collections.abc import Callable

from hpcstage.daemon.queue.flights import Flights
from hpcstage.daemon.queue.fromsource import FromSource
from hpcstage.daemon.queue.large import Large
from hpcstage.daemon.queue.rates import Estimates
from hpcstage.daemon.queue.sequences import Line, Sequences
from hpcstage.daemon.queue.states import FROM_PEER, LOOK_LIMIT, PEER_REMOTE, PEER_WAITS, FileState
from hpcstage.plan.blocks import blocks_bytes

LONGEST_QUEUE_S = 1.0
"""The estimate of a wait counts at most this much of the time that the last answers took: answers that took long,
maybe because a node was gone, do not end the asking."""


class FromPeers:
    """Owns the files that are asked for before the order goes on, and the peer requests that were given up."""

    def __init__(self, sequences: Sequences, flights: Flights, large: Large, source: FromSource) -> None:
        cells = flights.states.cells
        self.linked = False
        """Whether other nodes can be asked now."""
        self.estimates = Estimates()
        """How long files that a program waited for took, from the peer request to the copy."""
        self.is_stalled = False
        """Whether the program has to read what came before this node asks for more ahead of it."""
        self.promoted = Line(cells, FROM_PEER | FileState.PROMOTED)
        self.held = Line(cells, PEER_WAITS, PEER_REMOTE)
        """Ids that are asked for before the order goes on."""
        self.doubtful: set[int] = set()
        """Ids whose peer requests were given up while their copies may still come."""
        self._sequences = sequences
        self._flights = flights
        self._large = large
        self._source = source

    # ---- asking

    def next(self, files: int, size_bytes: int, now: float) -> list[int]:
        """Returns ids to ask other nodes for, at most `files` with `size_bytes` together. A larger one is asked for
        only when no other peer request is in flight. The ids are in flight from here on."""
        chosen: list[int] = []
        passed_over = 0
        flights, states = self._flights, self._flights.states
        while len(chosen) < files and passed_over < LOOK_LIMIT and self.linked and not states.closed:
            id_ = self._pop(now)
            if id_ is None:
                break
            if self._defer(id_, now):
                passed_over += 1
                continue
            size = states.size(id_)
            must_wait = not states.keeps(id_) and flights.budget.temporary.must_wait(blocks_bytes(size))
            if must_wait or (size > size_bytes and flights.asked):
                (self.promoted if states.of(id_) is FileState.PROMOTED else self.held).ids.appendleft(id_)
                break
            if flights.begin_ask(id_, now):
                size_bytes -= size
                chosen.append(id_)
            else:
                passed_over += 1
        return chosen

    def _pop(self, now: float) -> int | None:
        peer_waits = self._flights.states.ordered(from_peers=True)
        for pop in (self.promoted.pop, self.held.pop, lambda: self._sequences.pop(PEER_WAITS) if peer_waits else None):
            if (id_ := pop()) is not None:
                return id_
        kept = self._large.pop_deferred(PEER_WAITS, now)
        return self._next_ahead(now) if kept is None else kept

    def _defer(self, id_: int, now: float) -> bool:
        """Defers a large file that is not to be brought now, if no program waits for it. Returns whether it did."""
        if self._flights.states.of(id_) is FileState.PROMOTED or self._large.why_not(id_, now) is None:
            return False
        self._large.defer(id_, now)
        return True

    def _next_ahead(self, now: float) -> int | None:
        """Returns the next id that the program will read of those that other nodes keep; None where there is none or
        no free budget for it."""
        temporary = self._flights.budget.temporary
        if not temporary.limit.size_bytes:
            return None
        while (id_ := self._sequences.peek_ahead()) is not None and self._defer(id_, now):
            self._sequences.pop(PEER_REMOTE)
        self.is_stalled = id_ is not None and not temporary.fits_ahead(blocks_bytes(self._flights.states.size(id_)))
        return None if self.is_stalled else id_

    # ---- large files that programs read at the source

    def is_deferred(self, id_: int, now: float) -> bool:
        """Returns whether other nodes that ask for a file are told to ask again later."""
        waits = self._flights.states.of(id_) in (FileState.WAITING, FileState.REMOTE)
        return waits and self._large.why_not(id_, now) is not None

    def deferred_by_peer(self, id_: int, now: float) -> None:
        """Defers a large file that the other node does not copy now; it is asked for again later."""
        if id_ in self._flights.asked:
            self._put_back(id_)
            self._large.not_yet(id_, now)
            self._large.join_late(id_)

    # ---- requested

    def expected_s(self, id_: int, now: float) -> float:
        """Returns the seconds in which a program that opens a file has its copy: the other node may have to read it
        first."""
        size, own = self._flights.states.size(id_), self.estimates
        over_s = own.transfer_s(size) - own.file_s + min(own.file_s, LONGEST_QUEUE_S)
        expected_s = over_s + self._source.estimates.transfer_s(size)
        if self._flights.states.of(id_) is FileState.FLYING:
            return max(expected_s - self._flights.took_s(id_, now), expected_s / 8)
        return expected_s

    def are_sooner(self, id_: int, now: float) -> bool:
        """Returns whether a large file comes sooner from another node, which says at once if it has no copy, than from
        the source."""
        states, temporary = self._flights.states, self._flights.budget.temporary
        size = states.size(id_)
        has_space = states.of(id_) is not FileState.REMOTE or temporary.can_hold(blocks_bytes(size))
        most_s = min(self._source.limits.patience_s, self._source.estimates.transfer_s(size))
        is_sooner = self.estimates.transfer_s(size) <= most_s
        return self.linked and has_space and is_sooner and self._large.why_not(id_, now) is None

    # ---- what became of a peer request

    def missed(self, id_: int, *, requested: bool, doubtful: bool = False) -> None:
        """Takes back a peer request that brought nothing: the source is read instead, next if the file is `requested`.

        `doubtful` says that the copy may come all the same.
        """
        if id_ not in self._flights.asked:
            return
        if doubtful:
            self.doubtful.add(id_)
        self._flights.states.fetch_here(id_)
        if requested:
            self._source.requeue(id_)
        else:
            self._put_back(id_)
            self._source.released.ids.append(id_)

    def take_back(self, id_: int) -> None:
        """Takes back a peer request for a file of a missing node; the files are divided anew when it is known who has
        it."""
        if id_ in self._flights.asked:
            self._put_back(id_)

    def _put_back(self, id_: int) -> None:
        flights = self._flights
        flights.ahead.discard(id_)
        if flights.end(id_) is not None and flights.states.of(id_) is FileState.FLYING:
            flights.states.wait_again(id_)

    def came_late(self, id_: int, size_bytes: int) -> bool:
        """Takes in a copy whose peer request was given up. Returns False if the caller has to delete it or a transfer
        under way will find it."""
        self.doubtful.discard(id_)
        state, closed = self._flights.states.of(id_), self._flights.states.closed
        if state in (FileState.WAITING, FileState.PROMOTED) or (closed and state is FileState.REFUSED):
            self._large.deferred.discard(id_)
            self._flights.take_in(id_, size_bytes)
            return True
        return state is FileState.STORED

    def unlink(self, is_requested: Callable[[int], bool]) -> None:
        """Notes that no node can be asked any more: ids that were asked for wait again, and requested ones are read
        from the source."""
        self.linked = False
        states = self._flights.states
        for id_ in list(self._flights.asked):
            if is_requested(id_):
                self.missed(id_, requested=True)
            else:
                self._put_back(id_)
                self.held.ids.append(id_)
        promoted = list(self.promoted.ids)
        for id_ in promoted:
            if states.of(id_) is FileState.PROMOTED:
                states.fetch_here(id_)
        self.promoted.ids.clear()
        self._source.promoted.refill((*self._source.promoted.ids, *promoted))
