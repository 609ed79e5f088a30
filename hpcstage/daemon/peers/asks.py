"""Keeps count of what this node asked other nodes for: credits, answers, and nodes that do not answer. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from heapq import heappop, heappush

SILENT_S = 300.0
"""Asks to a node that answers nothing for this long are given up. Its source may be slow, so this is long."""
MOST_LATE = 3
"""A node is not asked again until it answers, once this many waits of the program for it ended in vain."""
UNREADY_S = 30.0
"""A node that has had no manifest for this long will not have one."""
FIRST_RETRY_S, LAST_RETRY_S = 0.05, 2.0
LONG_S = 0.5
"""Answers that take longer show that peer requests queue up at other nodes, also those that a program waits for."""
LEAST_FILES, FIRST_FILES = 4, 16


@dataclass
class _Owner:
    asked: dict[int, float] = field(default_factory=dict)
    """By id: when it was asked for."""
    heard: float = 0.0
    late: int = 0
    unready_since: float | None = None

    def lives(self, now: float) -> None:
        self.heard, self.late, self.unready_since = now, 0, None

    def is_trusted(self, now: float) -> bool:
        unready = self.unready_since is not None and now - self.unready_since > UNREADY_S
        return self.late < MOST_LATE and not unready


class Credits:
    """Bounds what may be asked for and not received. The number of files falls when answers take long, which keeps
    other nodes free for what a program waits for."""

    def __init__(self, files: int, size_bytes: int) -> None:
        self._most_files = files
        self._most_bytes = size_bytes
        self._window = float(min(files, FIRST_FILES))
        """The most files that are asked for at a time."""

    def free(self, files: int, size_bytes: int) -> tuple[int, int]:
        """Returns how many files and bytes may be asked for beside those that were and have not come."""
        return max(0, int(self._window) - files), self._most_bytes - size_bytes

    def answered(self, after_s: float) -> None:
        """Takes the time that an answer took."""
        if after_s > LONG_S:
            self._window = max(LEAST_FILES, self._window * 0.9)
        else:
            self._window = min(self._most_files, self._window + 1)


class Asks:
    """Owns the peer requests of this node that are out."""

    def __init__(self, files: int, size_bytes: int) -> None:
        """`files` and `size_bytes` are the most that may be asked for and not received."""
        self._credits = Credits(files, size_bytes)
        self._owners: defaultdict[int, _Owner] = defaultdict(_Owner)
        self._of: dict[int, tuple[int, int]] = {}
        """By id: the node that was asked, and the size of the file."""
        self._bytes = 0
        self._again: list[tuple[float, int, int]] = []
        """Asks to be repeated: when, id, node."""

    @property
    def ids(self) -> list[int]:
        """The ids that were asked for and not received."""
        return list(self._of)

    def free(self) -> tuple[int, int]:
        """Returns how many files and bytes may be asked for now."""
        return self._credits.free(len(self._of), self._bytes)

    def asked(self, id_: int, owner: int, size_bytes: int, now: float) -> None:
        """Counts a peer request that goes out."""
        self._of[id_] = owner, size_bytes
        self._bytes += size_bytes
        self._owners[owner].asked[id_] = now

    def answered(self, id_: int, now: float) -> bool:
        """Takes an answer. Returns False if it was not expected any more."""
        if id_ not in self._of:
            return False
        owner = self._owners[self._of[id_][0]]
        owner.lives(now)
        self._credits.answered(now - owner.asked[id_])
        self._end(id_)
        return True

    def unready(self, id_: int, now: float) -> bool:
        """Takes the answer that the other node cannot say yet. Returns True if the id is asked for again (`due`)."""
        if id_ not in self._of:
            return False
        number = self._of[id_][0]
        owner = self._owners[number]
        if owner.unready_since is None:
            owner.unready_since = now
        waited_s = now - owner.asked[id_]
        if waited_s > UNREADY_S or not owner.is_trusted(now):
            self._end(id_)
            return False
        pause_s = min(LAST_RETRY_S, max(FIRST_RETRY_S, waited_s / 2))
        heappush(self._again, (now + pause_s, id_, number))
        return True

    def due(self, now: float) -> list[int]:
        """Returns the ids to ask for again now, maybe of another node (`move`)."""
        found = []
        while self._again and self._again[0][0] <= now:
            _, id_, number = heappop(self._again)
            if id_ in self._of and self._of[id_][0] == number:
                found.append(id_)
        return found

    def is_out(self, id_: int) -> bool:
        """Returns whether an id was asked for and not answered."""
        return id_ in self._of

    def move(self, id_: int, owner: int) -> None:
        """Notes that an id is asked of another node."""
        before, size_bytes = self._of[id_]
        self._owners[owner].asked[id_] = self._owners[before].asked.pop(id_)
        self._of[id_] = owner, size_bytes

    def wake_after(self, now: float) -> float | None:
        """Returns the seconds until `due` has something; None if nothing is to be repeated."""
        return max(0.0, self._again[0][0] - now) if self._again else None

    def heard(self, owner: int, now: float) -> None:
        """Notes that a node lives, whatever it said."""
        self._owners[owner].lives(now)

    def late(self, node: int, now: float) -> list[int]:
        """Notes that a program waited for that node in vain. Returns the ids that are given up for it."""
        owner = self._owners[node]
        owner.late += 1
        gone = [] if owner.is_trusted(now) else list(owner.asked)
        for lost in gone:
            self._end(lost)
        return gone

    def trusts(self, owner: int, now: float) -> bool:
        """Returns whether it is worth asking that node."""
        return self._owners[owner].is_trusted(now)

    def give_up(self, now: float) -> list[int]:
        """Gives up the peer requests to silent nodes. Returns their ids."""
        gone = []
        for owner in self._owners.values():
            if owner.asked and now - max(owner.heard, next(iter(owner.asked.values()))) > SILENT_S:
                owner.late = MOST_LATE
                gone += list(owner.asked)
        for id_ in gone:
            self._end(id_)
        return gone

    def clear(self) -> None:
        """Forgets all peer requests, since no node can answer any more."""
        self._owners.clear()
        self._again.clear()
        self._of.clear()
        self._bytes = 0

    def _end(self, id_: int) -> None:
        if id_ in self._of:
            number, size_bytes = self._of.pop(id_)
            self._bytes -= size_bytes
            del self._owners[number].asked[id_]


def by_owner(ids: Iterable[int], owners: Iterable[int]) -> dict[int, list[int]]:
    """Groups ids by their owners, in their order."""
    found: dict[int, list[int]] = {}
    for id_, owner in zip(ids, owners, strict=True):
        found.setdefault(owner, []).append(id_)
    return found
