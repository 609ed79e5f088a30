"""Holds what the loaders of a node will read next and merges it into one order. Pure.

Owns the loaders that are alive and the way in which their orders are merged. It knows ids, neither paths nor indices:
`epochs` turns an announcement into ids.

A loader announces an epoch when it begins one; its next announcement replaces the last. Orders are merged
by position: ranks of one job go through their epochs side by side, and a loader that begins its epoch while
another is half-way through is the one that reads now.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import NamedTuple

MOST_STREAMS = 256
"""The most loaders that are followed; the oldest go, for there are programs that make loaders without end."""


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
    """A loader: the process in which its sampler runs, and its number there."""

    pid: int
    number: int


@dataclass(frozen=True)
class Stream:
    """The epoch that one loader reads."""

    who: Who
    epoch: int
    ids: Sequence[int]
    """The ids in reading order; an id may come several times. Empty when the epoch is over."""
    table: str = ""
    """The name of the table from which the ids came."""
    formula: str = ""
    """The formula from which later epochs can be computed; empty if they cannot."""
    rows: Table | None = None
    """The files of its samples."""


class Streams:
    """The loaders that are alive, those that began last at the end."""

    def __init__(self) -> None:
        self._streams: dict[Who, Stream] = {}

    def __len__(self) -> int:
        return len(self._streams)

    def begin(self, stream: Stream) -> None:
        """Adds the epoch that a loader begins, in place of its last one."""
        self._streams.pop(stream.who, None)
        self._streams[stream.who] = stream
        if len(self._streams) > MOST_STREAMS:
            del self._streams[next(iter(self._streams))]

    def end(self, who: Who, *, goes_on: bool) -> bool:
        """Ends a loader's epoch; if the loader goes on, its formula stays for later epochs. Returns False for an
        unknown loader."""
        stream = self._streams.get(who)
        if stream is None:
            return False
        if goes_on and stream.formula:
            self._streams[who] = replace(stream, ids=())
        else:
            del self._streams[who]
        return True

    def forget(self, table: str) -> bool:
        """Drops the loaders whose table proved wrong. Returns whether there were any."""
        gone = [who for who, stream in self._streams.items() if stream.table == table]
        for who in gone:
            del self._streams[who]
        return bool(gone)

    def alive(self) -> list[Stream]:
        """Returns the streams of all loaders that are alive."""
        return list(self._streams.values())

    def orders(self) -> list[Sequence[int]]:
        """Returns the orders that `merge` takes: those of all loaders in an epoch."""
        return [stream.ids for stream in self._streams.values() if len(stream.ids)]


def merge(orders: Iterable[Sequence[int]], waits: Callable[[int], bool], taken: bytearray) -> array[int]:
    """Merges several orders into one, an id of each in turn: every id that waits, at its first position.

    `taken` (a byte per id) marks the ids to leave out, and afterwards also all ids of these orders.
    """
    given = list(orders)
    merged = array("I")
    rows: Iterable[Iterable[int | None]] = [given[0]] if len(given) == 1 else zip_longest(*given)
    for row in rows:
        for id_ in row:
            if id_ is not None and not taken[id_]:
                taken[id_] = 1
                if waits(id_):
                    merged.append(id_)
    return merged
