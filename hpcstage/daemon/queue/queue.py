"""Decides which file is copied next and what a want is told: a pure state machine over the ids of a manifest.

Owns the state of every id, the rate cap and the estimates behind the bound of a wait. `sequences` owns the order,
`room` the budget, `groupqueue` the ids that come from other nodes. The queue owns no clock (callers pass `now`,
monotonic seconds), no disk, no process and no connection. An id ends in exactly one of STORED, FAILED, VOID and
REFUSED; nothing is ever evicted. A million ids cost 9 MB: a byte of state and eight of size.
"""

from __future__ import annotations

from array import array
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum, IntEnum
from itertools import islice

from hpcstage.daemon.queue.large import MOST_WAIT_S, NEARLY_DONE, Large
from hpcstage.daemon.queue.rates import Bucket, Estimates
from hpcstage.daemon.queue.room import Room
from hpcstage.daemon.queue.sequences import WAITS, Sequences
from hpcstage.plan.types import Budget
from hpcstage.protocol.shim import Reason

LOOK_LIMIT = 4096
"""The most ids that one call passes over, so that a full store never holds up the event loop."""
SHORTEST_WAIT_S = 0.25
WAIT_FACTOR = 4.0


class Place(IntEnum):
    """The state of an id."""

    WAITING = WAITS
    PROMOTED = 1
    FLYING = 2
    STORED = 3
    FAILED = 4
    VOID = 5
    REFUSED = 6
    AWAY = 7
    """Another node keeps the file; it comes here when a program wants it. Only in a node group."""


FINAL = frozenset({Place.STORED, Place.FAILED, Place.VOID, Place.REFUSED})
_REASONS = {Place.FAILED: Reason.FAILED, Place.VOID: Reason.VOID, Place.REFUSED: Reason.FULL}


class Verdict(Enum):
    """The kind of answer to a want."""

    READY = "ready"
    WAIT = "wait"
    DIRECT = "direct"


@dataclass(frozen=True)
class Decision:
    """The answer to a want; `deadline` is set for WAIT, `reason` for DIRECT."""

    verdict: Verdict
    deadline: float = 0.0
    reason: Reason = Reason.NONE


READY = Decision(Verdict.READY)


class Queue:
    """Owns the state of all ids. Every call is O(1) amortised, except `reorder` and `void`: O(ids given)."""

    def __init__(
        self,
        sizes: Sequence[int],
        budget: Budget,
        order: Sequence[int] = (),
        *,
        directories: int = 0,
        max_rate_bytes_per_s: float | None = None,
        patience_s: float = 5.0,
        want_cap_s: float = 20.0,
    ) -> None:
        self._sizes = sizes
        self._places = bytearray(len(sizes))
        self._sequences = self._make_sequences()
        self._promoted: deque[int] = deque()
        self._promoted_bytes = 0
        self._flying: dict[int, float] = {}
        self._counts = Counter({Place.WAITING: len(sizes)})
        self._closed = Reason.NONE
        self.disk_full = False
        """Whether the disk itself was full, whatever the budget allows."""
        self.room = self._make_room(budget, directories)
        self._bucket = Bucket(max_rate_bytes_per_s)
        self.estimates = Estimates()
        self.large = Large(self.estimates)
        self.copied: Callable[[int], int] = lambda _: 0
        """Returns the bytes of a transfer in flight that have been read; the engine sets it."""
        self._aside: dict[int, None] = {}
        """Large files that are held back, in the order in which it was their turn."""
        self.shortest_wait_s = SHORTEST_WAIT_S
        self._patience_s = patience_s
        self._want_cap_s = want_cap_s
        if len(order):
            self.reorder(order)

    def _make_sequences(self) -> Sequences:
        return Sequences(self._places)

    def _make_room(self, budget: Budget, directories: int) -> Room:
        return Room(budget, directories)

    def __len__(self) -> int:
        return len(self._sizes)

    # ---- what is where

    def place(self, id_: int) -> Place:
        """Returns the state of an id; a closed queue counts those that were not handed out as refused."""
        place = Place(self._places[id_])
        return Place.REFUSED if self._closed and place <= Place.PROMOTED else place

    def size(self, id_: int) -> int:
        """Returns the bytes of a file; of its copy once there is one."""
        return self._sizes[id_]

    def count(self, place: Place) -> int:
        """Returns how many ids are in this state."""
        waiting = self._counts[Place.WAITING] + self._counts[Place.PROMOTED]
        if place <= Place.PROMOTED:
            return 0 if self._closed else self._counts[place]
        return self._counts[place] + (waiting if place is Place.REFUSED and self._closed else 0)

    @property
    def waiting(self) -> int:
        """The number of ids that will still be handed out."""
        return self.count(Place.WAITING) + self.count(Place.PROMOTED)

    def waits(self, id_: int) -> bool:
        """Returns whether the order decides when an id is handed out."""
        return self._places[id_] == Place.WAITING and not self._closed

    def keeps(self, id_: int) -> bool:
        """Returns whether this node keeps a copy; always, outside of a node group."""
        del id_
        return True

    @property
    def flying(self) -> int:
        """The number of transfers that were handed out and are not yet reported."""
        return len(self._flying)

    @property
    def in_flight(self) -> list[int]:
        """The ids of transfers whose copies are still wanted."""
        return [id_ for id_ in self._flying if self._places[id_] == Place.FLYING]

    @property
    def settled(self) -> bool:
        """Whether nothing is in flight and nothing will be handed out any more."""
        return not self._flying and not self.waiting

    @property
    def closed(self) -> Reason:
        """Why nothing more is admitted; NONE while the queue is open."""
        return self._closed

    def wake_after(self, now: float) -> float | None:
        """Returns the seconds until the rate cap admits the next transfer; None if it keeps nothing back."""
        return self._bucket.delay_s(now) or None if self.waiting else None

    # ---- handing out

    def next_transfers(self, free: int, now: float) -> list[int]:
        """Returns up to `free` ids to copy now, wanted ones first, then in order. They are in flight from here on."""
        chosen: list[int] = []
        passed_over = 0
        while len(chosen) < free and passed_over < LOOK_LIMIT and not self._closed and self._bucket.open(now):
            id_ = self._next(now)
            if id_ is None:
                break
            if self._reserve(id_):
                self._bucket.take(self._sizes[id_])
                self._move(id_, Place.FLYING)
                self._flying[id_] = now
                if self.is_large(id_):
                    self.large.begun(id_)
                chosen.append(id_)
            else:
                passed_over += 1
                self._move(id_, Place.REFUSED)
        return chosen

    def is_large(self, id_: int) -> bool:
        """Returns whether a file is large, so that its copying may be held back."""
        return self.large.is_large(self._sizes[id_])

    def _next(self, now: float) -> int | None:
        is_enough = self._are_enough_large()
        while (id_ := self._pop()) is not None:
            if not (self.is_large(id_) and (is_enough or self.large.must_wait(id_, now))):
                return id_
            self._put_aside(id_)
        return None if is_enough or self.large.are_enough(now) else self._next_aside(now)

    def _are_enough_large(self) -> bool:
        most = self.large.most_in_flight()
        return most is not None and sum(map(self.is_large, self.in_flight)) >= most

    def _next_aside(self, now: float) -> int | None:
        looked = list(islice(self._aside, LOOK_LIMIT))
        for id_ in sorted(looked, key=self.large.held_back.__contains__):  # what the program has read comes last
            waits = self._may_come_aside(id_)
            if waits and self.large.must_wait(id_, now):
                continue
            del self._aside[id_]
            if waits:
                return id_
        return None

    def _may_come_aside(self, id_: int) -> bool:
        return self._places[id_] == Place.WAITING

    def _put_aside(self, id_: int) -> None:
        if self._places[id_] != Place.WAITING:
            self._move(id_, Place.WAITING)
        self._aside.pop(id_, None)
        self._aside[id_] = None

    def _pop(self) -> int | None:
        id_ = self._pop_promoted()
        return self._sequences.pop() if id_ is None else id_

    def _pop_promoted(self) -> int | None:
        while self._promoted:
            id_ = self._promoted.popleft()
            if self._places[id_] == Place.PROMOTED:
                self._promoted_bytes -= self._sizes[id_]
                return id_
        return None

    def _reserve(self, id_: int) -> bool:
        if self.room.is_full:
            self.close(Reason.FULL)
        return self.room.reserve(id_, self._sizes[id_])

    def _move(self, id_: int, to: Place) -> None:
        self._counts[Place(self._places[id_])] -= 1
        self._counts[to] += 1
        self._places[id_] = to

    # ---- wants

    def want(self, id_: int, now: float) -> Decision:
        """Returns what the program that opens `id_` is told. A wait moves a waiting id to the front."""
        place = self.place(id_)
        if place is Place.STORED:
            return READY
        if place in FINAL:
            reason = self._closed if self._places[id_] <= Place.PROMOTED else _REASONS[place]
            return Decision(Verdict.DIRECT, reason=reason)
        if self.is_large(id_):
            return self._want_large(id_, place, now)
        expected_s = self._expected_s(id_, place, now)
        if expected_s > self._patience_s:
            return Decision(Verdict.DIRECT, reason=Reason.LATER)
        if place is Place.WAITING:
            self._move(id_, Place.PROMOTED)
            self._promoted.append(id_)
            self._promoted_bytes += self._sizes[id_]
        longest_s = min(max(self.shortest_wait_s, WAIT_FACTOR * expected_s), self._want_cap_s / 2)
        return Decision(Verdict.WAIT, deadline=now + longest_s)

    def _want_large(self, id_: int, place: Place, now: float) -> Decision:
        if place is Place.FLYING:
            took_s = now - self._flying[id_]
            if self.large.is_worth_waiting(self._sizes[id_], self.copied(id_), took_s):
                return Decision(Verdict.WAIT, deadline=now + 2 * MOST_WAIT_S)
        self.large.read_at_source(id_, now)
        return Decision(Verdict.DIRECT, reason=Reason.LARGE)

    def _expected_s(self, id_: int, place: Place, now: float) -> float:
        alone_s = self.estimates.transfer_s(self._sizes[id_])
        if place is Place.FLYING:
            return max(alone_s - (now - self._flying[id_]), alone_s / 8)
        ahead = self._promoted_bytes if place is Place.WAITING else self._promoted_bytes / 2
        return alone_s + self.estimates.drain_s(ahead) + self._bucket.delay_s(now)

    # ---- what became of a transfer

    def done(self, id_: int, size_bytes: int, now: float) -> bool:
        """Notes that a transfer was published with this size. Returns False if it had become void, so that the caller
        has to delete the copy."""
        started = self._flying.pop(id_, None)
        if started is None:
            return self._places[id_] == Place.STORED
        self._took(id_, size_bytes, now - started, now)
        self.room.release(id_)
        if self._places[id_] != Place.FLYING:
            return False
        self.room.take(id_, size_bytes)
        self._set_size(id_, size_bytes)
        self._move(id_, Place.STORED)
        return True

    def _took(self, id_: int, size_bytes: int, took_s: float, now: float) -> None:
        del id_
        self.estimates.finished(size_bytes, took_s, now)

    def failed(self, id_: int, now: float, *, no_room: bool = False) -> None:
        """Notes that a transfer failed for good. With `no_room` (ENOSPC, EDQUOT) the queue admits nothing more."""
        del now
        if no_room:
            self.disk_full = True
            self.close(Reason.FULL)
        self.large.opened(id_)
        if self._flying.pop(id_, None) is None:
            return
        self.room.release(id_)
        if self._places[id_] == Place.FLYING:
            self._move(id_, Place.REFUSED if no_room else Place.FAILED)

    def requeue(self, id_: int) -> None:
        """Puts a transfer that was lost (its copier died) back, in front."""
        if self._flying.pop(id_, None) is None:
            return
        self.room.release(id_)
        if self._places[id_] == Place.FLYING:
            self._move(id_, Place.PROMOTED)
            self._promoted.appendleft(id_)
            self._promoted_bytes += self._sizes[id_]

    def put_off(self, id_: int) -> bool:
        """Takes back a transfer that was given up because the program reads the file at the source. Returns False if it
        was not in flight."""
        if self._places[id_] != Place.FLYING or self._flying.pop(id_, None) is None:
            return False
        self.room.release(id_)
        self.large.given_up(id_)
        self._put_aside(id_)
        return True

    def large_in_flight(self, now: float) -> list[int]:
        """Returns the transfers in flight whose files the program reads at the source meanwhile."""
        return [id_ for id_ in self.in_flight if self.large.in_use(id_, now)]

    def slowing(self, now: float) -> list[int]:
        """Returns transfers of other large files that would slow the program's reading down and are not nearly done."""
        if not self.large.must_not_slow(now):
            return []
        found = [id_ for id_ in self.in_flight if self.is_large(id_) and not self.large.in_use(id_, now)]
        return [id_ for id_ in found if self.copied(id_) < NEARLY_DONE * self._sizes[id_]]

    def take_back(self, id_: int) -> None:
        """Takes back a transfer that was given up for reasons that have nothing to do with the file."""
        self.large.taken_back(id_)
        self.requeue(id_)

    def void(self, ids: Iterable[int]) -> list[int]:
        """Voids files that were written to: they are never handed out again. Returns those that are in flight."""
        flying = []
        for id_ in ids:
            place = Place(self._places[id_])
            if place is Place.PROMOTED:
                self._promoted_bytes -= self._sizes[id_]
            elif place is Place.STORED:
                self.room.drop(id_, self._sizes[id_])
            elif place is Place.FLYING:
                flying.append(id_)
            self._move(id_, Place.VOID)
        return flying

    def void_range(self, ids: range) -> tuple[bytes, list[int]]:
        """Voids a range of ids as `void` does, fast enough for a million. Returns the state that each had, and those in
        flight. Stored copies keep their part of the budget: the caller that deletes them gives it back."""
        places = bytes(self._places[ids.start : ids.stop])
        flying = [id_ for id_ in self._flying if id_ in ids and self._places[id_] == Place.FLYING]
        for id_ in self._promoted:
            if id_ in ids and self._places[id_] == Place.PROMOTED:
                self._promoted_bytes -= self._sizes[id_]
        for place in Place:
            self._counts[place] -= places.count(place)
        self._counts[Place.VOID] += len(ids)
        self._places[ids.start : ids.stop] = bytes([Place.VOID]) * len(ids)
        return places, flying

    def _set_size(self, id_: int, size_bytes: int) -> None:
        if self._sizes[id_] != size_bytes:
            if not isinstance(self._sizes, array):
                self._sizes = array("Q", self._sizes)
            self._sizes[id_] = size_bytes

    # ---- what is decided from outside

    def reorder(self, order: Sequence[int], name: str = "") -> None:
        """Sets the order in which waiting ids are handed out; ids that it does not mention keep their place behind it.

        An order with a name replaces the last one of that name.
        """
        self._sequences.push(order, name)

    def close(self, reason: Reason) -> None:
        """Ends the admission of files; transfers in flight may finish. The first reason stays."""
        if not self._closed:
            self._closed = reason
