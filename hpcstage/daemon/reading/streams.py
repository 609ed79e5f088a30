"""What the loaders of a node will read next, and one order out of all of it. Pure.

Owns which announcements are alive and how several loaders' orders are merged. It knows ids, neither paths nor indices:
`epochs` turns an announcement into ids.

A loader announces an epoch when it begins one; its next announcement takes the place of the last. Loaders are merged
by position, for ranks of one job go through their epochs side by side, and a loader that begins its epoch while
another is half-way through is the one that reads now.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import NamedTuple

from hpcstage.daemon.reading.learn import Rows

MOST_STREAMS = 256
"""More loaders than this are not followed, the oldest go: a program that makes loaders without end."""


class Who(NamedTuple):
    """A loader: the process in which its sampler runs, and its number there."""

    pid: int
    number: int


@dataclass(frozen=True)
class Stream:
    """What one loader reads."""

    who: Who
    epoch: int
    ids: Sequence[int]
    """In reading order; an id may come several times. Empty when the epoch is over."""
    key: int = 0
    """Of its dataset."""
    formula: str = ""
    """From which later epochs can be computed; empty if they cannot."""
    rows: Rows | None = None
    """The files of its samples."""


class Streams:
    """The loaders that are alive, those that began last at the end."""

    def __init__(self) -> None:
        self._streams: dict[Who, Stream] = {}

    def __len__(self) -> int:
        return len(self._streams)

    def begin(self, stream: Stream) -> None:
        """A loader begins an epoch."""
        self._streams.pop(stream.who, None)
        self._streams[stream.who] = stream
        if len(self._streams) > MOST_STREAMS:
            del self._streams[next(iter(self._streams))]

    def end(self, who: Who, *, goes_on: bool) -> bool:
        """A loader's epoch is over. Where it goes on, its later epochs stay. False: it was not known."""
        stream = self._streams.get(who)
        if stream is None:
            return False
        if goes_on and stream.formula:
            self._streams[who] = replace(stream, ids=())
        else:
            del self._streams[who]
        return True

    def forget(self, key: int) -> bool:
        """What was announced for a dataset turned out to be wrong. True if anything was."""
        gone = [who for who, stream in self._streams.items() if stream.key == key]
        for who in gone:
            del self._streams[who]
        return bool(gone)

    def alive(self) -> list[Stream]:
        """All of them."""
        return list(self._streams.values())

    def orders(self) -> list[Sequence[int]]:
        """What is left to `merge`."""
        return [stream.ids for stream in self._streams.values() if len(stream.ids)]


def merge(orders: Iterable[Sequence[int]], waits: Callable[[int], bool], taken: bytearray) -> array[int]:
    """One order out of several, taken in turn: every id that waits, at its first place.

    `taken` (a byte per id) holds what comes before, and afterwards also what is returned.
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
