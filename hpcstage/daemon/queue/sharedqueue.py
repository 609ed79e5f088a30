"""A queue whose files are divided among nodes: it knows which ids other nodes read and which copies this node keeps.

Owns the flags of ids, the division of the files among nodes, the files that other nodes asked for, and the share of the
budget for copies that only pass through (transit copies: the oldest go when it is full). `groupqueue` asks other nodes.
Pure, as `queue` is.

Of the files that this node reads from the source, those that a program here waits for come first. After them, files
that other nodes asked for and files of this node's own order take turns.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from hpcstage.daemon.queue.grouproom import GroupRoom
from hpcstage.daemon.queue.groupsequences import PASSING, REMOTE, GroupSequences
from hpcstage.daemon.queue.passing import Transit
from hpcstage.daemon.queue.queue import FINAL, Place, Queue, Verdict
from hpcstage.plan.types import Budget

_REMOTE = bytes(flag & REMOTE for flag in range(256))
_PASSING = bytes(flag >> 1 & 1 for flag in range(256))
_STILL = bytes(place in (Place.WAITING, Place.AWAY) for place in range(256))


@dataclass(frozen=True)
class Share:
    """A node's part of the files."""

    own: Sequence[int]
    """The ids that this node reads from the source."""
    others: Sequence[int] = ()
    """With `transit`: the ids that it keeps of the rest. Without `transit` it keeps everything."""
    unplaced: Sequence[int] = ()
    """The ids that no node keeps."""
    transit: Budget | None = None
    """The budget for copies that it does not keep; None: it keeps everything."""


class SharedQueue(Queue):
    """Starts out as any other queue; `divide` makes ids come from other nodes, `adopt` takes that back."""

    room: GroupRoom
    _sequences: GroupSequences

    def __init__(self, sizes: Sequence[int], budget: Budget, order: Sequence[int] = (), **options: Any) -> None:  # noqa: ANN401
        self._flags = bytearray(len(sizes))
        self._far_waiting = 0
        super().__init__(sizes, budget, order, **options)
        self.turns = 1
        """The number of files asked for by other nodes that are read before each file of this node's own order."""
        self._far_promoted: deque[int] = deque()
        self._far_flying: dict[int, bool] = {}
        """By id that another node was asked for: whether a program waited for it then."""
        self._ahead: dict[int, bool] = {}
        """Ids of transit copies that were asked for while no program waited for them."""
        self._released: deque[int] = deque()
        """Ids that another node was asked for in vain; they are read before the order goes on."""
        self._asked: deque[int] = deque()
        self._turn = 0

    def _make_sequences(self) -> GroupSequences:
        return GroupSequences(self._places, self._flags)

    def _make_room(self, budget: Budget, directories: int) -> GroupRoom:
        return GroupRoom(budget, directories, self._is_passing, self._drop)

    @property
    def transit(self) -> Transit:
        """The transit copies and their budget."""
        return self.room.transit

    # ---- what is where

    def is_far(self, id_: int) -> bool:
        """Returns whether another node reads the file from the source."""
        return bool(self._flags[id_] & REMOTE)

    def keeps(self, id_: int) -> bool:
        """See Queue."""
        return not self._is_passing(id_)

    def _is_passing(self, id_: int) -> bool:
        return bool(self._flags[id_] & PASSING)

    @property
    def near_waiting(self) -> int:
        """The number of ids that wait in the order and that this node reads from the source."""
        return self._counts[Place.WAITING] - self._far_waiting

    def waits(self, id_: int) -> bool:
        """Returns whether an order may bring the file: from the source, or from another node ahead of the program."""
        return self._places[id_] in (Place.WAITING, Place.AWAY) and not self._closed

    def _move(self, id_: int, to: Place) -> None:
        if self._flags[id_] & REMOTE:
            self._far_waiting += (to == Place.WAITING) - (self._places[id_] == Place.WAITING)
        super()._move(id_, to)
        if to == Place.STORED:
            self.transit.landed(id_, ahead=self._ahead.pop(id_, False))

    def _localise(self, id_: int) -> None:
        if self._flags[id_] & REMOTE:
            self._far_waiting -= self._places[id_] == Place.WAITING
            self._flags[id_] &= ~REMOTE

    # ---- dividing the files among nodes

    def divide(self, share: Share) -> None:
        """Divides the files: this node reads its share from the source. Transfers that have begun go on, copies that
        are here stay. O(number of ids)."""
        self.room.set_aside(share.transit)
        rest = REMOTE if share.transit is None else REMOTE | PASSING
        flags = bytearray(bytes((rest,))) * len(self._flags)
        for ids, flag in ((share.others, REMOTE), (share.own, 0), (share.unplaced, PASSING)):
            for id_ in ids:
                flags[id_] = flag
        for id_ in self._flying.keys() - self._far_flying.keys():
            flags[id_] &= ~REMOTE
        self._flags[:] = flags
        self._resettle()
        for id_ in share.unplaced:
            if self._places[id_] == Place.AWAY:
                self._move(id_, Place.REFUSED)

    def hand_over(self, ids: Iterable[int], busy: Container[int]) -> None:
        """Hands files over to other nodes, which read them from the source, except those begun or in `busy`."""
        for id_ in ids:
            if self._places[id_] == Place.WAITING and not self.is_far(id_) and id_ not in busy:
                self._flags[id_] |= REMOTE
                self._far_waiting += 1
        self._sequences.restart(near=False)

    def adopt(self) -> None:
        """Takes all files back when there are no other nodes: this node reads them from the source, as far as the
        budget allows."""
        self.room.set_aside(None)
        self._flags[:] = bytes(len(self._flags))
        self._resettle()

    def start_at(self, position: int) -> None:
        """Begins the order of the manifest at `position`: where nothing is known of the order, nodes begin at different
        places."""
        self._sequences.start_at(position)

    def _resettle(self) -> None:
        """Sets counts and states by the flags and begins all orders anew. Takes tens of milliseconds for a million."""
        still = self._counts[Place.WAITING] + self._counts[Place.AWAY]
        waits = _mask(self._places, _STILL)
        passing, remote = _mask(self._flags, _PASSING), _mask(self._flags, _REMOTE)
        away = waits & passing
        places = int.from_bytes(self._places, "little") & ~(waits * 0xFF) | away * Place.AWAY
        self._places[:] = places.to_bytes(len(self._places), "little")
        self._counts[Place.AWAY] = away.bit_count()
        self._counts[Place.WAITING] = still - away.bit_count()
        self._far_waiting = (waits & ~passing & remote).bit_count()
        self._sequences.restart(near=True)
        self._promote_anew()

    def _promote_anew(self) -> None:
        """Puts every wanted id into the line that it belongs to now."""
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
        while self._released:
            id_ = self._released.popleft()
            if self._places[id_] == Place.WAITING and not self.is_far(id_):
                return id_
        return self._sequences.pop() if self.near_waiting else None

    def _put_aside(self, id_: int) -> None:
        if self._is_passing(id_):
            self._move(id_, Place.AWAY)
        else:
            super()._put_aside(id_)

    def _may_come_aside(self, id_: int) -> bool:
        return super()._may_come_aside(id_) and not self.is_far(id_)

    def _drop(self, id_: int) -> None:
        self.room.drop(id_, self._sizes[id_])
        self._move(id_, Place.AWAY)
        self.transit.dropped.append(id_)

    def void_range(self, ids: range) -> tuple[bytes, list[int]]:
        """See Queue."""
        places, flying = super().void_range(ids)
        for id_, place in zip(ids, places, strict=True):
            self._far_waiting -= place == Place.WAITING and self.is_far(id_)
            # The caller that deletes them gives budget back as if this node had kept all of them.
            if place == Place.STORED and self.transit.give_back(id_):
                self.room.now_kept(self._sizes[id_])
        for id_ in self._far_promoted:
            if id_ in ids and places[id_ - ids.start] == Place.PROMOTED:
                self._promoted_bytes -= self._sizes[id_]
        return places, flying

    # ---- asked by other nodes

    def asked(self, id_: int) -> Verdict:
        """Returns what another node that asks for a file is told; WAIT: this node reads it from the source soon."""
        place = self.place(id_)
        if place is Place.STORED:
            return Verdict.READY
        if place in FINAL or place is Place.AWAY or self._closed or self.is_far(id_):
            return Verdict.DIRECT
        if place is Place.WAITING:
            self._asked.append(id_)
        return Verdict.WAIT


def _mask(values: bytearray, table: bytes) -> int:
    """Returns a byte of 0 or 1 for each value, as one number, for arithmetic on all of them at once."""
    return int.from_bytes(values.translate(table), "little")
