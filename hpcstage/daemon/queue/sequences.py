"""The orders of the queue, one above the other: the newest counts, what it does not mention comes after it. Pure."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

WAITS = 0
"""The place of an id that it is the order's business to hand out."""
_MOST = 8


@dataclass
class One:
    """An order and how far it has been worked off."""

    ids: Sequence[int]
    cursor: int = 0
    name: str = ""
    far: int = 0
    """Likewise for what comes from other nodes (see `groupsequences`)."""
    ahead: int = 0
    """Likewise for what is asked of them on demand, ahead of the demand."""


class Sequences:
    """Over the places of all ids, a byte each, which are the queue's: an id that does not wait is passed over."""

    def __init__(self, places: bytearray) -> None:
        self._places = places
        self._all = [One(range(len(places)))]

    def pop(self) -> int | None:
        """The next waiting id, or None if there is none. The caller takes it out of its place."""
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
        """From here on this order counts. One with a name takes the place of the last of that name."""
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
