"""The orders of a node in a group: for what it reads from the source, and for what it asks other nodes for. Pure."""

from __future__ import annotations

from hpcstage.daemon.queue.sequences import WAITS, One, Sequences

REMOTE, PASSING = 1, 2
"""Flags of an id: another node reads it from the source; it is not kept here."""


class GroupSequences(Sequences):
    """Over the flags of all ids as well. No order is forgotten: what comes from whom may change."""

    def __init__(self, places: bytearray, flags: bytearray) -> None:
        super().__init__(places)
        self._flags = flags

    def pop(self) -> int | None:
        """The next waiting id that this node reads from the source. O(ids) in all."""
        for one in reversed(self._all):
            position = self._find(one, one.cursor, 0)
            one.cursor = position + 1
            if position < len(one.ids):
                return one.ids[position]
        return None

    def pop_far(self) -> int | None:
        """The next waiting id that another node reads."""
        for one in reversed(self._all):
            position = self._find(one, one.far, REMOTE)
            one.far = position + 1
            if position < len(one.ids):
                return one.ids[position]
        return None

    def _find(self, one: One, first: int, kind: int) -> int:
        ids, places, flags = one.ids, self._places, self._flags
        for position in range(first, len(ids)):
            id_ = ids[position]
            if places[id_] == WAITS and flags[id_] & REMOTE == kind:
                return position
        return len(ids)

    def peek_ahead(self, away: int) -> int | None:
        """What the program reads next of what is in the place `away`: the last order with a name that has some."""
        for one in reversed(self._all):
            ids = one.ids if one.name else ()
            for position in range(one.ahead, len(ids)):
                id_ = ids[position]
                if self._places[id_] == away and self._flags[id_] & REMOTE:
                    one.ahead = position
                    return id_
            one.ahead = len(ids)
        return None

    def pass_ahead(self, id_: int) -> None:
        """`peek_ahead` gives something else from here on."""
        for one in self._all:
            if one.name and one.ahead < len(one.ids) and one.ids[one.ahead] == id_:
                one.ahead += 1

    def start_at(self, position: int) -> None:
        """Where the list says nothing of the order: nodes begin at different places of it."""
        self._all.insert(min(2, len(self._all)), One(range(position, len(self._places))))

    def restart(self, *, near: bool) -> None:
        """All orders are gone through anew, for what other nodes read; with `near` for the rest as well."""
        for one in self._all:
            one.far = 0
            if near:
                one.cursor = 0

    def _flatten(self) -> None:
        for one in self._all:
            one.cursor = min(one.cursor, one.far)
        super()._flatten()
