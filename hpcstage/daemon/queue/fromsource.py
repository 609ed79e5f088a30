"""Decides which file this node reads from the source next. Pure.

Large files that programs read meanwhile come first, as far as `plan.rule` allows, then files that a program here waits
for. After them, files that other nodes asked for and files of this node's own order take turns. Large files that were
deferred come last.
"""

from __future__ import annotations

from hpcstage.daemon.queue.flights import Flights
from hpcstage.daemon.queue.large import Large
from hpcstage.daemon.queue.rates import AnswerKind, Bucket, Estimates, Limits
from hpcstage.daemon.queue.sequences import Line, Sequences
from hpcstage.daemon.queue.states import FINAL, LOOK_LIMIT, SOURCE_WAITS, FileState
from hpcstage.protocol.shim import Reason


class FromSource:
    """Owns the files that go before the order, those that are deferred, and the rate cap."""

    def __init__(
        self, sequences: Sequences, flights: Flights, large: Large, estimates: Estimates, limits: Limits
    ) -> None:
        cells = flights.states.cells
        self.turns = 1
        """The number of files asked for by other nodes that are read before each file of this node's own order."""
        self.promoted = Line(cells, FileState.PROMOTED)
        self.released = Line(cells, SOURCE_WAITS)
        """Ids that another node was asked for in vain; they are read before the order goes on."""
        self.estimates = estimates
        self.limits = limits
        self._asked = Line(cells, SOURCE_WAITS)
        self._turn = 0
        self._sequences = sequences
        self._flights = flights
        self._large = large
        self._bucket = Bucket(limits.max_rate_bytes_per_s)

    def wake_after(self, now: float) -> float | None:
        """Returns the seconds until the rate cap admits a transfer that no program waits for; None if it keeps nothing
        back."""
        return self._bucket.delay_s(now) or None if self._flights.states.waiting else None

    # ---- handing out

    def next(self, free: int, now: float) -> list[int]:
        """Returns up to `free` ids to copy now. They are in flight from here on."""
        chosen: list[int] = []
        passed_over = 0
        flights, states, bucket, large = self._flights, self._flights.states, self._bucket, self._large
        while len(chosen) < free and passed_over < LOOK_LIMIT and not states.closed:
            id_ = self._next(now, is_capped=not bucket.open(now))
            if id_ is None:
                break
            if flights.budget.is_full:
                states.close(Reason.FULL)
            if not flights.begin(id_, now):
                passed_over += 1
                continue
            bucket.take(states.size(id_))
            if large.is_large(id_):
                large.begun(id_, now)
            chosen.append(id_)
        return chosen

    def _next(self, now: float, *, is_capped: bool) -> int | None:
        """Takes out the next id. The cap keeps none back that a program waits for, as it would read the file itself."""
        large = self._large
        if not is_capped and (wanted := large.next_wanted(now)) is not None:
            return wanted
        while (id_ := self.promoted.pop() if is_capped else self._pop()) is not None:
            if large.why_not(id_, now) is None:
                return id_
            self._defer(id_, now)
        return None if is_capped or not large.may_bring_deferred(now) else large.pop_deferred(SOURCE_WAITS, now)

    def _defer(self, id_: int, now: float) -> None:
        self._flights.states.wait_again(id_)
        self._large.defer(id_, now)

    def _pop(self) -> int | None:
        if (requested := self.promoted.pop()) is not None:
            return requested
        if self._turn < self.turns and (asked := self._asked.pop()) is not None:
            self._turn += 1
            return asked
        self._turn = 0
        if (released := self.released.pop()) is not None:
            return released
        ordered = self._sequences.pop(SOURCE_WAITS) if self._flights.states.ordered(from_peers=False) else None
        return self._asked.pop() if ordered is None else ordered

    # ---- requested

    def expected_s(self, id_: int, now: float) -> float:
        """Returns the seconds in which a program that opens a file has its copy."""
        state = self._flights.states.of(id_)
        alone_s = self.estimates.transfer_s(self._flights.states.size(id_))
        if state is FileState.FLYING:
            return max(alone_s - self._flights.took_s(id_, now), alone_s / 8)
        ahead = self._flights.states.promoted_bytes / (2 if state is FileState.PROMOTED else 1)
        return alone_s + self.estimates.drain_s(ahead)

    def asked(self, id_: int) -> AnswerKind:
        """Returns what another node that asks for a file is told; WAIT: this node reads it from the source soon."""
        state = self._flights.states.of(id_)
        if state is FileState.STORED:
            return AnswerKind.READY
        if (
            self._flights.states.closed
            or state in FINAL
            or state is FileState.REMOTE
            or self._flights.states.is_from_peer(id_)
        ):
            return AnswerKind.DIRECT
        if state is FileState.WAITING:
            self._asked.ids.append(id_)
        return AnswerKind.WAIT

    # ---- transfers that are begun again

    def requeue(self, id_: int) -> None:
        """Puts a transfer that was lost (its copier died) back, in front."""
        if self._flights.end(id_) is not None and self._flights.states.of(id_) is FileState.FLYING:
            self._flights.states.move(id_, FileState.PROMOTED)
            self.promoted.ids.appendleft(id_)

    def given_up(self, id_: int, now: float) -> bool:
        """Takes back a transfer that was given up: it goes before the order again, or is deferred if it must not be
        copied now. Returns False if it was not in flight, or came to nothing."""
        if self._flights.states.of(id_) is not FileState.FLYING:
            return False
        if not self._large.reads.has(id_, now):
            self._large.taken_back(id_)
        if self._large.why_not(id_, now) is None:
            self.requeue(id_)
            return True
        self._flights.end(id_)
        self._defer(id_, now)
        self._large.join_late(id_)
        return True
