"""The orders of a node in a node group: of what it reads from the source and of what it asks other nodes for. Pure."""

from __future__ import annotations

from hpcstage.daemon.queue.sequences import WAITS, One, Sequences

REMOTE, PASSING = 1, 2
"""Flags of an id: another node reads it from the source; this node does not keep it."""


class GroupSequences(Sequences):
    """Sequences that look at the flags of ids, too. It forgets no finished order, since what other nodes read may
    change."""

    def __init__(self, places: bytearray, flags: bytearray) -> None:
        super().__init__(places)
        self._flags = flags

    def pop(self) -> int | None:
        """Returns the next waiting id that this node reads from the source. All calls together take O(ids)."""
        for one in reversed(self._all):
            position = self._find(one, one.cursor, 0)
            one.cursor = position + 1
            if position < len(one.ids):
                return one.ids[position]
        return None

    def pop_far(self) -> int | None:
        """Returns the next waiting id that another node reads."""
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
        """Returns the id in the place `away` that the program reads next, by the newest order with a name that has
        one."""
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
        """Passes over an id that `peek_ahead` returned, so that it returns another one."""
        for one in self._all:
            if one.name and one.ahead < len(one.ids) and one.ids[one.ahead] == id_:
                one.ahead += 1

    def start_at(self, position: int) -> None:
        """Begins the order of the manifest at `position`: where nothing is known of the order, nodes begin at different
        places."""
        self._all.insert(min(2, len(self._all)), One(range(position, len(self._places))))

    def restart(self, *, near: bool) -> None:
        """Goes through all orders anew for the files that other nodes read; with `near` also for the others."""
        for one in self._all:
            one.far = 0
            if near:
                one.cursor = 0

    def _flatten(self) -> None:
        for one in self._all:
            one.cursor = min(one.cursor, one.far)
        super()._flatten()
