"""Knows which copies of large files go on although a program reads their files meanwhile, since what has arrived serves
it. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from typing import NamedTuple

from hpcstage.daemon.queue.beside import LEAST_TRIAL_S, MOST_TAKEN, BytesRead

LEAST_FOLLOWED_S = 0.5
"""The time after which a copy that goes on must have paid."""


class Seen(NamedTuple):
    """What was read and copied up to a look at a copy that goes on beside a program."""

    read: BytesRead
    served_bytes: int
    missed_bytes: int


class Followed:
    """Knows the copies under way that go on although a program reads their files, as it gets more from what has arrived
    than it reads at the source. One of which FOLLOWED_SHARE is there when the program opens its file is tried.

    One that does not pay so yields from then on: it is copied only while no program reads the source. So does one of
    which it is known how fast the program read alone. It goes on as long as the program is served something, or is not
    slowed down."""

    def __init__(self) -> None:
        self.yielding: set[int] = set()
        self._seen: dict[int, Seen] = {}
        self._alone: dict[int, float] = {}
        """By id: the bytes per second that the program read alone."""
        self._for_others: set[int] = set()
        """Ids that other nodes need, too: as long as no program here reads them, nothing is judged."""
        self._last = BytesRead(0.0, 0, 0)

    @property
    def ids(self) -> Collection[int]:
        """The copies that go on."""
        return self._seen.keys()

    def begin(self, id_: int, now: float, alone: float | None = None, *, for_others: bool = False) -> None:
        """Notes that a program reads a file that goes on being copied, unless it is noted."""
        if id_ not in self._seen:
            self._seen[id_] = Seen(replace(self._last, at=now), 0, 0)
            if for_others:
                self._for_others.add(id_)
            if alone is not None:
                self._alone[id_] = alone
                self.yielding.add(id_)

    def end(self, id_: int) -> None:
        """Notes that the copy is not under way any more, or is of no use to the program."""
        self._seen.pop(id_, None)
        self._alone.pop(id_, None)
        self._for_others.discard(id_)
        self.yielding.discard(id_)

    def look(self, of: Callable[[int], tuple[int, int]], read: BytesRead) -> None:
        """Has what has not paid since the last look yield, and ends what is of no use even so. `of` returns the bytes
        that programs got and missed by id."""
        self._last = read
        for id_, since in [*self._seen.items()]:
            if read.at - since.read.at < (LEAST_TRIAL_S if id_ in self.yielding else LEAST_FOLLOWED_S):
                continue
            now = self._seen[id_] = Seen(read, *of(id_))
            served, missed = now.served_bytes - since.served_bytes, now.missed_bytes - since.missed_bytes
            if served > missed or (not missed and id_ in self._for_others):
                continue
            if id_ not in self.yielding:
                self.yielding.add(id_)
            elif _slows(since, now, self._alone[id_]) if id_ in self._alone else not served:
                self.end(id_)


def _slows(since: Seen, now: Seen, alone: float) -> bool:
    """Returns whether a program has read less than it read alone, by more than MOST_TAKEN of what was copied."""
    length_s = now.read.at - since.read.at
    got = now.read.program_bytes - since.read.program_bytes + now.served_bytes - since.served_bytes
    return alone * length_s - got > MOST_TAKEN * (now.read.copied_bytes - since.read.copied_bytes)
