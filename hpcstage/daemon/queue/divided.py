"""Decides when this node begins to keep its part of files that are divided among nodes, and how that gives way. Pure.

Such a file is never whole on this node: it stays REMOTE, and programs open it at the source, where they are served what
nodes have of it. Its transfer goes on as long as the run does. It begins when nothing else waits to be copied, or as
soon as a program of any node reads the file. Callers pass `now`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from hpcstage.daemon.queue.freebudget import FreeBudget
from hpcstage.daemon.queue.sourcereads import SourceReads
from hpcstage.daemon.queue.states import FileState, NodeShare, States
from hpcstage.protocol.arriving import Priority

_GONE = (FileState.WAITING, FileState.REFUSED)


class Divided:
    """Owns which files are divided, and how far this node is with its part of each."""

    def __init__(self, states: States, budget: FreeBudget, reads: SourceReads) -> None:
        self.place, self.nodes = 0, 1
        """The place of this node among the nodes, and how many they are."""
        self.kept: dict[int, int] = {}
        """By id: the bytes of its part, once all of that is here."""
        self._begun: dict[int, int] = {}
        """By id: the bytes that are set aside for it."""
        self._rooms: Mapping[int, int] = {}
        """By id: the bytes that are to be set aside."""
        self._left_out: set[int] = set()
        """Ids that are not begun any more: there was no room, or it failed."""
        self._states = states
        self._budget = budget
        self._reads = reads

    def divide(self, share: NodeShare | None) -> None:
        """Sets which files are divided. What has begun goes on, whoever is to read the file now."""
        self._rooms = {} if share is None else share.rooms
        if share is not None and not self._begun:
            self.place, self.nodes = share.place, share.nodes
        for id_ in self._begun:
            if self._states.of(id_) in _GONE:
                self._states.move(id_, FileState.REMOTE)

    def __contains__(self, id_: int) -> bool:
        """Returns whether a file is divided."""
        return (id_ in self._rooms or id_ in self._begun) and self._states.of(id_) is FileState.REMOTE

    @property
    def ids(self) -> Collection[int]:
        """The files of which this node has a part, or is to have it."""
        return self._begun.keys()

    @property
    def is_bringing(self) -> bool:
        """Whether there is something of its parts that this node does not have yet and will have."""
        waits = any(id_ in self and id_ not in self._left_out for id_ in self._rooms if id_ not in self._begun)
        return any(id_ not in self.kept for id_ in self._begun) or (waits and not self._states.closed)

    def next(self, now: float) -> list[int]:
        """Returns the files whose transfers begin now; they have from here on."""
        if self._states.closed or not self._rooms:
            return []
        is_first = not self._states.waiting
        waiting = [id_ for id_ in self._rooms if id_ in self and id_ not in self._begun and id_ not in self._left_out]
        return [id_ for id_ in waiting if (is_first or self._reads.has(id_, now)) and self._begin(id_)]

    def _begin(self, id_: int) -> bool:
        if not self._budget.set_room_aside(self._rooms[id_]):
            self._left_out.add(id_)
            return False
        self._begun[id_] = self._rooms[id_]
        return True

    def leave_out(self, id_: int) -> None:
        """Notes that no transfer of a file is begun any more. Programs read it at the source."""
        self.end(id_)
        self._left_out.add(id_)

    def priority(self, id_: int, now: float) -> Priority:
        """Returns how the transfer of a file gives way to programs that read it in any order: they lose nothing by what
        comes for them later."""
        if self._reads.is_here(id_, now):
            return Priority.BELOW_PROGRAMS
        return Priority.BELOW_OTHER_NODES if self._reads.has(id_, now) else Priority.FULL

    def whole(self, id_: int, size_bytes: int) -> None:
        """Notes that all of this node's part is here."""
        if id_ in self._begun:
            self.kept[id_] = size_bytes

    def end(self, id_: int) -> bool:
        """Notes that a transfer has ended, and gives its room back. Returns False if there was none."""
        self.kept.pop(id_, None)
        room = self._begun.pop(id_, None)
        if room is not None:
            self._budget.give_back(room, 1)
        return room is not None
