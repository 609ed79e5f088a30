"""Holds the orders of the queue: the newest decides first, then the earlier ones for ids it does not mention. Pure."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

WAITS = 0
"""The state of an id that the order has yet to hand out."""
_MOST = 8


@dataclass
class One:
    """An order, and how far it has been worked off."""

    ids: Sequence[int]
    cursor: int = 0
    name: str = ""
    far: int = 0
    """The cursor for files that come from other nodes (see `groupsequences`)."""
    ahead: int = 0
    """The cursor for files that other nodes keep and that are asked for ahead of the program."""


class Sequences:
    """The orders, newest last. `places` is the queue's state of all ids, a byte each; an id that does not wait is
    passed over."""

    def __init__(self, places: bytearray) -> None:
        self._places = places
        self._all = [One(range(len(places)))]

    def pop(self) -> int | None:
        """Returns the next waiting id, or None if there is none. The caller gives it another state."""
        while self._all:
            one = self._all[-1]
            ids, places = one.ids, self._places
            for position in range(one.cursor, len(ids)):
                if places[ids[position]] == WAITS:
                    one.cursor = position + 1
                    return ids[position]
            self._all.pop()
        return None

    def push(self, ids: Sequence[int], name: str = "") -> None:
        """Puts an order above all others. One with a name replaces the last of that name."""
        if name:
            self._all = [one for one in self._all if one.name != name]
        self._all.append(One(ids, name=name))
        if len(self._all) > _MOST:
            self._flatten()

    def _flatten(self) -> None:
        seen = bytearray(len(self._places))
        flat = array("I")
        for one in reversed(self._all):
            for position in range(one.cursor, len(one.ids)):
                id_ = one.ids[position]
                if not seen[id_] and self._places[id_] == WAITS:
                    seen[id_] = 1
                    flat.append(id_)
        self._all = [One(flat)]
