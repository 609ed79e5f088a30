"""Holds the orders of a node: of what it reads from the source and of what it asks other nodes for. Pure.

The newest order decides first, then the earlier ones for ids that it does not mention. A line holds single ids that go
before the orders.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from hpcstage.daemon.queue.states import PEER_REMOTE, PEER_WAITS, READER, SOURCE_WAITS

_MOST_ORDERS = 8
"""When there are more orders than this, all but the first are joined into one."""


class Line:
    """Ids in the order in which they came. Ids whose byte is none of `sought` any more, PASSING aside, are passed
    over."""

    def __init__(self, cells: bytearray, *sought: int) -> None:
        self.ids: deque[int] = deque()
        self._cells = cells
        self._sought = sought

    def pop(self) -> int | None:
        """Takes the next id out; None if there is none."""
        while self.ids:
            id_ = self.ids.popleft()
            if self._cells[id_] & READER in self._sought:
                return id_
        return None

    def refill(self, ids: Iterable[int]) -> None:
        """Replaces the ids by those of the given ones that belong here."""
        self.ids = deque(id_ for id_ in dict.fromkeys(ids) if self._cells[id_] & READER in self._sought)


@dataclass
class Sequenced:
    """An order, and by the state of ids that are looked for how far it has been worked off."""

    ids: Sequence[int]
    name: str = ""
    cursors: dict[int, int] = field(default_factory=lambda: dict.fromkeys((SOURCE_WAITS, PEER_WAITS, PEER_REMOTE), 0))


class Sequences:
    """The orders, newest last; the first is that of the manifest. `cells` is the byte of every id."""

    def __init__(self, cells: bytearray, order: Sequence[int]) -> None:
        self._cells = cells
        self._all = [Sequenced(range(len(cells)))]
        if len(order):
            self.push(order)

    def push(self, ids: Sequence[int], name: str = "") -> None:
        """Puts an order above all others. One with a name replaces the last of that name."""
        if name:
            self._all = [one for one in self._all if one.name != name]
        self._all.append(Sequenced(ids, name))
        if len(self._all) > _MOST_ORDERS:
            self._flatten()

    def start_at(self, position: int) -> None:
        """Begins the order of the manifest at `position`: where nothing is known of the order, nodes begin at different
        places."""
        self._all.insert(min(2, len(self._all)), Sequenced(range(position, len(self._cells))))

    def restart(self) -> None:
        """Goes through all orders anew, since other nodes read other files now."""
        for one in self._all:
            one.cursors[SOURCE_WAITS] = one.cursors[PEER_WAITS] = 0

    def pop(self, sought: int) -> int | None:
        """Returns the next id with the byte `sought`, PASSING aside, and passes over it. All calls together take
        O(ids)."""
        one = self._next(sought)
        if one is None:
            return None
        position = one.cursors[sought]
        one.cursors[sought] = position + 1
        return one.ids[position]

    def peek_ahead(self) -> int | None:
        """Returns the id of those that other nodes keep that the program reads next, by the newest order with a name
        that has one. `pop(PEER_REMOTE)` passes over it."""
        one = self._next(PEER_REMOTE)
        return None if one is None else one.ids[one.cursors[PEER_REMOTE]]

    def _next(self, sought: int) -> Sequenced | None:
        cells = self._cells
        for one in reversed(self._all):
            if sought == PEER_REMOTE and not one.name:
                continue
            ids = one.ids
            for position in range(one.cursors[sought], len(ids)):
                if cells[ids[position]] & READER == sought:
                    one.cursors[sought] = position
                    return one
            one.cursors[sought] = len(ids)
        return None

    def _flatten(self) -> None:
        seen = bytearray(len(self._cells))
        flat = array("I")
        for one in reversed(self._all[1:]):
            for id_ in one.ids:
                if not seen[id_] and self._cells[id_] & READER in (SOURCE_WAITS, PEER_WAITS):
                    seen[id_] = 1
                    flat.append(id_)
        self._all[1:] = [Sequenced(flat)]
