"""Knows what programs read of large files at the source: which they have open there, on this node and on others, and
what others are to be told. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

LET_GO_S = 5.0
"""The program has let go of a file once this much time has passed without a sign of use."""
TELL_EVERY_S = 1.0
"""The interval at which other nodes are told that a program still reads a file at the source."""


class SourceReads:
    """Knows which large files programs of this node and of others read at the source, and what others are to be
    told."""

    def __init__(self) -> None:
        self._used_at: dict[int, float] = {}
        self._opened: set[int] = set()
        self._here_at: dict[int, float] = {}
        self._elsewhere: defaultdict[int, dict[int, float]] = defaultdict(dict)
        """By id and node: when another node has said that its program has a file open."""
        self._untold: set[int] = set()
        self._told_at: dict[int, float] = {}

    def opened(self, id_: int, now: float) -> None:
        """Notes that a program of this node asked for a file and is about to open it at the source."""
        self._opened.add(id_)
        self.here(id_, now)

    def here(self, id_: int, now: float) -> None:
        """Notes that a program of this node has a file open at the source."""
        self._used_at[id_] = self._here_at[id_] = now
        self._untold.add(id_)

    def elsewhere(self, id_: int, node: int, now: float) -> None:
        """Notes that a program of another node has a file open at the source."""
        self._used_at[id_] = self._elsewhere[id_][node] = now

    def is_here(self, id_: int, now: float) -> bool:
        """Returns whether a program of this node reads the file at the source."""
        return now - self._here_at.get(id_, -LET_GO_S) < LET_GO_S

    def are_here(self, now: float) -> bool:
        """Returns whether programs of this node read large files at the source."""
        return any(self.is_here(id_, now) and self.was_here(id_) for id_ in self.ids(now))

    def was_here(self, id_: int) -> bool:
        """Returns whether a program of this node has read the file at the source: one asked before it opened it, or no
        other node has said that its program did. Daemons of virtual nodes see each other's programs."""
        return id_ in self._opened or id_ not in self._elsewhere

    def nodes(self, id_: int, now: float) -> list[int]:
        """Returns the other nodes whose programs read the file at the source."""
        return [node for node, at in self._elsewhere.get(id_, {}).items() if now - at < LET_GO_S]

    def awaited(self, id_: int) -> None:
        """Notes that a program waits for another node's copy and opens the file at the source if there is none."""
        self._untold.add(id_)

    def untold(self, now: float) -> list[int]:
        """Returns the files in use on this node of which other nodes are to be told now."""
        found = [id_ for id_ in self._untold if now - self._told_at.get(id_, -TELL_EVERY_S) >= TELL_EVERY_S]
        self._untold.difference_update(found)
        self._told_at.update(dict.fromkeys(found, now))
        return found

    def drop(self, ids: Iterable[int]) -> None:
        """Forgets files whose copies are there. Who reads the source on is seen again."""
        for id_ in ids:
            del self._used_at[id_]
            self._here_at.pop(id_, None)

    def has(self, id_: int, now: float) -> bool:
        """Returns whether a program reads the file at the source."""
        return now - self._used_at.get(id_, -LET_GO_S) < LET_GO_S

    def ids(self, now: float) -> list[int]:
        """Returns the files that programs read at the source."""
        for id_ in [id_ for id_ in self._used_at if not self.has(id_, now)]:
            del self._used_at[id_]
        return [*self._used_at]

    def count(self, now: float) -> int:
        """Returns how many files programs read at the source."""
        return len(self.ids(now))
