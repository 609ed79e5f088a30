"""Knows what programs read of large files at the source: which they have open there, on this node and on others, and
how much of them was read. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from hpcstage.daemon.queue.beside import LEAST_TRIAL_S, BytesRead

LET_GO_S = 5.0
"""The program has let go of a file once this much time has passed without a sign of use."""
TELL_EVERY_S = 1.0
"""The interval at which other nodes are told that a program still reads a file at the source."""
LED_SHARE, LED_BYTES = 1 / 8, 64 << 20
"""A program that has read this share of a file by calls, or as many bytes in a row, is expected to read on."""
MAPPED_SHARE = 1 / 4
"""The share that must be in the page cache of a file that is mapped: the kernel brings more than programs touch."""


class ReadBefore:
    """Knows how much programs have read of the large files that they have open at the source, since they are open, from
    open files that go on with the copy once it is whole."""

    def __init__(self) -> None:
        self.again: frozenset[int] = frozenset()
        """Files that are read again: the program has read as many bytes as they have together."""
        self.much: Mapping[int, float] = {}
        """Of files of which LED_SHARE was read: the bytes per second that were read of all of them."""
        self._since: dict[int, BytesRead] = {}

    def look(self, sizes: Mapping[int, int], read: BytesRead) -> None:
        """Takes the sizes of the files that are open at the source now, and what was read until now."""
        self._since = {id_: self._since.get(id_, read) for id_ in sizes}
        whole = sum(sizes.values())
        bytes_read = {id_: read.movable_bytes - since.movable_bytes for id_, since in self._since.items()}
        self.again = frozenset(id_ for id_, size_bytes in bytes_read.items() if size_bytes >= whole)
        lengths_s = {id_: read.at - since.at for id_, since in self._since.items()}
        self.much = {
            id_: size_bytes / lengths_s[id_]
            for id_, size_bytes in bytes_read.items()
            if lengths_s[id_] >= LEAST_TRIAL_S and size_bytes >= LED_SHARE * whole
        }


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
