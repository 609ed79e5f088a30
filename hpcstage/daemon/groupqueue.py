"""The queue of a node in a group: some ids come from other nodes, some are kept elsewhere and come on demand.

Owns which ids this node reads from the source, the order in which it asks for the others, what other nodes asked it
for, and the share of the budget for copies that only pass through (transit copies: the oldest go when it is full).
Whom to ask is `routes`' business, how much may be asked for at a time `asks`'. Pure, as `queue` is.

Among the files that this node reads from the source, those come first for which a program waits here; then those that
other nodes asked for and those of its own order take turns.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from hpcstage.daemon.queue import (
    FINAL,
    LOOK_LIMIT,
    WAIT_FACTOR,
    Decision,
    OrderedIds,
    Place,
    Queue,
    Verdict,
    blocks_bytes,
)
from hpcstage.daemon.rates import Estimates
from hpcstage.daemon.transit import Transit
from hpcstage.plan.types import Budget
from hpcstage.wire import Reason

REMOTE, PASSING = 1, 2
"""Flags of an id: another node reads it from the source; it is not kept here."""
SHORTEST_FAR_WAIT_S = 2.0
"""For what another node may have to read first."""


@dataclass(frozen=True)
class Share:
    """A node's part of the files."""

    own: Sequence[int]
    """It reads them from the source."""
    others: Sequence[int] = ()
    """With `transit`: what it keeps of the rest. Without, it keeps everything."""
    unplaced: Sequence[int] = ()
    """No node keeps them."""
    transit: Budget | None = None
    """Room for what it does not keep."""


class GroupQueue(Queue):
    """A queue that starts out as any other: `divide` makes ids come from other nodes, `adopt` takes that back."""

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
        super().__init__(
            sizes,
            budget,
            order,
            directories=directories,
            max_rate_bytes_per_s=max_rate_bytes_per_s,
            patience_s=patience_s,
            want_cap_s=want_cap_s,
        )
        self.linked = False
        """Whether other nodes can be asked now."""
        self.turns = 1
        """So many files that other nodes asked for are read for one of this node's order."""
        self.peers = Estimates()
        """Of files that somebody waited for, from the request to the copy."""
        self.transit = Transit()
        self._flags = bytearray(len(sizes))
        self._far_waiting = 0
        self._far_promoted: deque[int] = deque()
        self._far_held: deque[int] = deque()
        """To be asked for before the order goes on."""
        self._far_flying: dict[int, bool] = {}
        """Asked for, and whether somebody waited for it then."""
        self._doubtful: set[int] = set()
        """Given up while their copies may still come."""
        self._asked: deque[int] = deque()
        self._turn = 0

    # ---- what is where

    def is_far(self, id_: int) -> bool:
        """Whether another node reads it from the source."""
        return bool(self._flags[id_] & REMOTE)

    @property
    def asking(self) -> int:
        """Ids that were asked for and have not come."""
        return len(self._far_flying)

    def is_asked_for(self, id_: int) -> bool:
        """Whether another node was asked for it and has not answered."""
        return id_ in self._far_flying

    def size(self, id_: int) -> int:
        """What is known of it, in bytes."""
        return self._sizes[id_]

    @property
    def near_waiting(self) -> int:
        """Ids in the order that this node reads from the source."""
        return self._counts[Place.WAITING] - self._far_waiting

    def _move(self, id_: int, to: Place) -> None:
        if self._flags[id_] & REMOTE:
            self._far_waiting += (to == Place.WAITING) - (self._places[id_] == Place.WAITING)
        super()._move(id_, to)
        if to == Place.STORED:
            self.transit.landed(id_)

    def _localise(self, id_: int) -> None:
        if self._flags[id_] & REMOTE:
            self._far_waiting -= self._places[id_] == Place.WAITING
            self._flags[id_] &= ~REMOTE

    # ---- dividing the files among nodes

    def divide(self, share: Share) -> None:
        """This node reads its share from the source. What has begun goes on, what is here stays. O(number of ids)."""
        self._set_transit(share.transit)
        rest = REMOTE if share.transit is None else REMOTE | PASSING
        flags = bytearray(bytes((rest,))) * len(self._flags)
        for ids, flag in ((share.others, REMOTE), (share.own, 0), (share.unplaced, PASSING)):
            for id_ in ids:
                flags[id_] = flag
        for id_ in self._flying.keys() - self._far_flying.keys():
            flags[id_] &= ~REMOTE
        self._flags = flags
        self._resettle()
        for id_ in share.unplaced:
            if self._places[id_] == Place.AWAY:
                self._move(id_, Place.REFUSED)

    def adopt(self) -> None:
        """There are no other nodes: everything comes from the source, as far as there is room."""
        self._set_transit(None)
        self._flags = bytearray(len(self._flags))
        self._resettle()

    def start_at(self, position: int) -> None:
        """Where the list says nothing of the order: nodes begin at different places of it."""
        self._sequences.insert(min(2, len(self._sequences)), OrderedIds(range(position, len(self._sizes))))

    def _set_transit(self, limit: Budget | None) -> None:
        given, inodes = (limit.size_bytes, limit.inodes) if limit else (0, 0)
        self._room_bytes += self.transit.limit_bytes - given
        self._room_inodes += self.transit.limit_inodes - inodes
        self.transit.limit_bytes, self.transit.limit_inodes = given, inodes

    def _resettle(self) -> None:
        """Counts and places follow the flags; all orders are gone through anew."""
        far = 0
        for id_, (place, flag) in enumerate(zip(self._places, self._flags, strict=True)):
            if place in (Place.WAITING, Place.AWAY):
                to = Place.AWAY if flag & PASSING else Place.WAITING
                if to != place:
                    super()._move(id_, to)
                far += to == Place.WAITING and flag & REMOTE
        self._far_waiting = far
        for sequence in self._sequences:
            sequence.cursor = sequence.far = 0
        self._far_held.clear()
        self._promote_anew()

    def _promote_anew(self) -> None:
        """Every wanted id into the line that it belongs to now."""
        wanted = dict.fromkeys((*self._promoted, *self._far_promoted))
        self._promoted.clear()
        self._far_promoted.clear()
        for id_ in wanted:
            if self._places[id_] == Place.PROMOTED:
                (self._far_promoted if self.is_far(id_) else self._promoted).append(id_)

    # ---- from the source

    def _pop(self) -> int | None:
        if (wanted := self._pop_promoted()) is not None:
            return wanted
        if self._turn < self.turns and (asked := self._pop_asked()) is not None:
            self._turn += 1
            return asked
        self._turn = 0
        ordered = self._pop_in_order()
        return self._pop_asked() if ordered is None else ordered

    def _pop_asked(self) -> int | None:
        while self._asked:
            id_ = self._asked.popleft()
            if self._places[id_] == Place.WAITING and not self.is_far(id_):
                return id_
        return None

    def _pop_in_order(self) -> int | None:
        return self._next_of(0) if self.near_waiting else None

    def _next_of(self, kind: int) -> int | None:
        """The next waiting id of the orders: with REMOTE one that comes from another node."""
        places, flags = self._places, self._flags
        for sequence in reversed(self._sequences):
            ids = sequence.ids
            for position in range(sequence.far if kind else sequence.cursor, len(ids)):
                id_ = ids[position]
                if places[id_] == Place.WAITING and flags[id_] & REMOTE == kind:
                    sequence.pass_to(position + 1, far=bool(kind))
                    return id_
            sequence.pass_to(len(ids), far=bool(kind))
        return None

    def _flatten(self) -> None:
        for sequence in self._sequences:
            sequence.cursor = min(sequence.cursor, sequence.far)
        super()._flatten()

    # ---- room

    def _reserve(self, id_: int) -> bool:
        passing = self._flags[id_] & PASSING
        if not passing and not self.transit.limit_bytes:
            return super()._reserve(id_)
        blocks = blocks_bytes(self._sizes[id_])
        # Unlike in a queue without a group: a full store must not end what passes through.
        here = blocks <= self._room_bytes and self._room_inodes > 0
        if not (self.transit.fits(blocks) if passing else here):
            return False
        self._charge(id_, blocks)
        return True

    def _charge(self, id_: int, blocks: int) -> None:
        if not self._flags[id_] & PASSING:
            super()._charge(id_, blocks)
            return
        self._reserved[id_] = blocks
        self.used_bytes += blocks
        self.used_files += 1
        self.transit.take(id_, blocks)
        while (old := self.transit.surplus()) is not None:
            self._drop(old)

    def _refund(self, id_: int, blocks: int) -> None:
        if not self.transit.give_back(id_):
            super()._refund(id_, blocks)
            return
        self.used_bytes -= blocks
        self.used_files -= 1

    def _drop(self, id_: int) -> None:
        self._refund(id_, blocks_bytes(self._sizes[id_]))
        self._move(id_, Place.AWAY)
        self.transit.dropped.append(id_)

    # ---- wants

    def want(self, id_: int, now: float) -> Decision:
        """As of any queue. What another node reads is asked for next; without other nodes it comes from the source."""
        place = self.place(id_)
        if place in FINAL:
            return super().want(id_, now)
        if not self.linked and self.is_far(id_) and id_ not in self._far_flying:
            self._localise(id_)
            if place is Place.PROMOTED:
                self._promoted.append(id_)
        if place is not Place.AWAY:
            return self._want_far(id_, now) if self.is_far(id_) else super().want(id_, now)
        if self._closed:
            return Decision(Verdict.DIRECT, reason=self._closed)
        if not self.transit.can_hold(blocks_bytes(self._sizes[id_])):
            return Decision(Verdict.DIRECT, reason=Reason.FULL)
        self._move(id_, Place.WAITING)
        decision = self._want_far(id_, now) if self.is_far(id_) else super().want(id_, now)
        if self._places[id_] == Place.WAITING:
            self._move(id_, Place.AWAY)
        return decision

    def _want_far(self, id_: int, now: float) -> Decision:
        size = self._sizes[id_]
        expected_s = self.peers.transfer_s(size) + self.estimates.transfer_s(size)
        if self._places[id_] == Place.FLYING:
            expected_s = max(expected_s - (now - self._flying[id_]), expected_s / 8)
        if expected_s > self._patience_s:
            return Decision(Verdict.DIRECT, reason=Reason.LATER)
        if self._places[id_] == Place.WAITING:
            self._move(id_, Place.PROMOTED)
            self._far_promoted.append(id_)
            self._promoted_bytes += size
        longest_s = min(max(SHORTEST_FAR_WAIT_S, WAIT_FACTOR * expected_s), self._want_cap_s / 2)
        return Decision(Verdict.WAIT, deadline=now + longest_s)

    # ---- asking other nodes

    def next_requests(self, files: int, size_bytes: int, now: float) -> list[int]:
        """Ids to ask other nodes for, at most so many and so large; a larger one alone. They are in flight then."""
        chosen: list[int] = []
        passed_over = 0
        while len(chosen) < files and passed_over < LOOK_LIMIT and self.linked and not self._closed:
            id_ = self._pop_far()
            if id_ is None:
                break
            wanted = self._places[id_] == Place.PROMOTED
            size = self._sizes[id_]
            if (size > size_bytes and self._far_flying) or not self._fits_now(id_):
                self._hold(id_)
                break
            if not self._reserve(id_):
                passed_over += 1
                self._move(id_, Place.REFUSED)
                continue
            size_bytes -= size
            self._move(id_, Place.FLYING)
            self._flying[id_] = now
            self._far_flying[id_] = wanted
            chosen.append(id_)
        return chosen

    def _pop_far(self) -> int | None:
        while self._far_promoted:
            id_ = self._far_promoted.popleft()
            if self._places[id_] == Place.PROMOTED and self.is_far(id_):
                self._promoted_bytes -= self._sizes[id_]
                return id_
        while self._far_held:
            id_ = self._far_held.popleft()
            if self._places[id_] in (Place.WAITING, Place.AWAY) and self.is_far(id_):
                return id_
        return self._next_of(REMOTE) if self._far_waiting else None

    def _fits_now(self, id_: int) -> bool:
        """False for what has to wait until transit copies in flight have come."""
        blocks = blocks_bytes(self._sizes[id_])
        passing = self._flags[id_] & PASSING
        return not passing or not self.transit.can_hold(blocks) or self.transit.fits(blocks)

    def _hold(self, id_: int) -> None:
        if self._places[id_] == Place.PROMOTED:
            self._far_promoted.appendleft(id_)
            self._promoted_bytes += self._sizes[id_]
        else:
            self._far_held.appendleft(id_)

    def _took(self, id_: int, size_bytes: int, took_s: float, now: float) -> None:
        wanted = self._far_flying.pop(id_, None)
        if wanted is None:
            super()._took(id_, size_bytes, took_s, now)
        elif wanted:
            self.peers.finished(size_bytes, took_s, now)

    def failed(self, id_: int, now: float, *, no_room: bool = False) -> None:
        """See Queue."""
        self._far_flying.pop(id_, None)
        super().failed(id_, now, no_room=no_room)

    def missed(self, id_: int, *, wanted: bool, doubtful: bool = False) -> None:
        """What was asked for does not come: this node reads it from the source, at once if it is `wanted` or kept.

        `doubtful`: it may come all the same.
        """
        if self._far_flying.pop(id_, None) is None:
            return
        if doubtful:
            self._doubtful.add(id_)
        self._localise(id_)
        if wanted or not self._flags[id_] & PASSING:
            self.requeue(id_)
        else:
            self._put_back(id_)

    def _put_back(self, id_: int) -> None:
        del self._flying[id_]
        self._refund(id_, self._reserved.pop(id_))
        if self._places[id_] == Place.FLYING:
            self._move(id_, Place.AWAY if self._flags[id_] & PASSING else Place.WAITING)

    def came_late(self, id_: int, size_bytes: int) -> bool:
        """A copy that was given up has come. False: it has to go, or a transfer will find it."""
        self._doubtful.discard(id_)
        place = self._places[id_]
        if place not in (Place.WAITING, Place.PROMOTED):
            return place == Place.STORED
        if place == Place.PROMOTED:
            self._promoted_bytes -= self._sizes[id_]
        self._charge(id_, blocks_bytes(size_bytes))
        del self._reserved[id_]
        self._set_size(id_, size_bytes)
        self._move(id_, Place.STORED)
        return True

    def unlink(self, is_wanted: Callable[[int], bool]) -> None:
        """Nobody can be asked any more: what was asked for waits again; what is wanted comes from the source."""
        self.linked = False
        for id_ in list(self._far_flying):
            if is_wanted(id_):
                self.missed(id_, wanted=True)
                continue
            del self._far_flying[id_]
            self._put_back(id_)
            if self._places[id_] in (Place.WAITING, Place.AWAY):
                self._far_held.append(id_)
        for id_ in self._far_promoted:
            if self._places[id_] == Place.PROMOTED:
                self._localise(id_)
        self._promote_anew()

    def void(self, ids: Iterable[int]) -> list[int]:
        """See Queue: also what was given up and may still come."""
        ids = list(ids)
        flying = super().void(ids)
        return flying + [id_ for id_ in ids if id_ in self._doubtful and id_ not in self._flying]

    # ---- asked by other nodes

    def asked(self, id_: int) -> Verdict:
        """What another node that asks is told; WAIT: it is read from the source soon."""
        place = self.place(id_)
        if place is Place.STORED:
            return Verdict.READY
        if place in FINAL or place is Place.AWAY or self._closed or self.is_far(id_):
            return Verdict.DIRECT
        if place is Place.WAITING:
            self._asked.append(id_)
        return Verdict.WAIT
