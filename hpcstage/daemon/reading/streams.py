"""Holds what the loaders of a node will read next and merges it into one order. Pure.

Owns the loaders that are alive and the way in which their orders are merged. It knows ids, neither paths nor indices:
`epochs` turns an announcement into ids.

An iterator of a loader announces an epoch when it begins one; its next announcement replaces the last. Orders are
merged by position: ranks of one job go through their epochs side by side, and a loader that begins its epoch while
another is half-way through is the one that reads now.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import NamedTuple

MOST_STREAMS = 256
"""The most iterators that are followed; the oldest go, for there are programs that make loaders without end."""
NONE = 0xFFFFFFFF
"""Stands for no file in a table's ids."""


@dataclass(frozen=True)
class Table:
    """Says which files each sample of a dataset has, `columns` of them."""

    ids: Sequence[int]
    columns: int

    def row(self, index: int) -> Sequence[int]:
        """Returns the ids of a sample's files; nothing for an unknown index."""
        row = self.ids[index * self.columns : (index + 1) * self.columns]
        return [id_ for id_ in row if id_ != NONE]


class Who(NamedTuple):
    """An iterator of a loader: the process in which its sampler runs, and its number there."""

    pid: int
    number: int


@dataclass(frozen=True)
class Stream:
    """The epoch that one iterator reads."""

    who: Who
    ids: Sequence[int]
    """The ids in reading order; an id may come several times."""
    table: str = ""
    """The name of the table from which the ids came."""


class Streams:
    """The epochs that are being read, those that began last at the end."""

    def __init__(self) -> None:
        self._streams: dict[Who, Stream] = {}

    def __len__(self) -> int:
        return len(self._streams)

    def begin(self, stream: Stream) -> None:
        """Adds the epoch that an iterator begins, in place of its last one."""
        self._streams.pop(stream.who, None)
        self._streams[stream.who] = stream
        if len(self._streams) > MOST_STREAMS:
            del self._streams[next(iter(self._streams))]

    def end(self, who: Who) -> bool:
        """Ends an iterator's epoch. Returns False if it has none."""
        return self._streams.pop(who, None) is not None

    def forget(self, table: str) -> bool:
        """Drops the loaders whose table proved wrong. Returns whether there were any."""
        gone = [who for who, stream in self._streams.items() if stream.table == table]
        for who in gone:
            del self._streams[who]
        return bool(gone)

    def alive(self) -> list[Stream]:
        """Returns the epochs that are being read."""
        return list(self._streams.values())


def merge(orders: Iterable[Sequence[int]], waits: Callable[[int], bool], files: int) -> array[int]:
    """Merges several orders into one, an id of each in turn: every id that waits, at its first position. Ids are below
    `files`."""
    given = list(orders)
    merged, taken = array("I"), bytearray(files)
    rows: Iterable[Iterable[int | None]] = [given[0]] if len(given) == 1 else zip_longest(*given)
    for row in rows:
        for id_ in row:
            if id_ is not None and not taken[id_]:
                taken[id_] = 1
                if waits(id_):
                    merged.append(id_)
    return merged
