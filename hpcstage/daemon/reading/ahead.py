"""Measures how far the copies were ahead of the program, and whether an announced table names the files that it opens.
Pure: callers pass `now`.

Owns the positions of an announcement, the front of the reading and the lead. What was announced is in `streams`.

Each process that reads for a loader (the loader's own process or one of its workers) reads a part of the announced
order, nearly in its sequence. Where the opens of a process jump about in it, the table is wrong.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from statistics import median
from typing import TYPE_CHECKING

from hpcstage.daemon.reading.streams import Who

if TYPE_CHECKING:
    from hpcstage.record.parts.part import OrderLead

MOST_POSITIONS = 64
"""The most positions of one id that are looked at for an open: those nearest to where its process is."""
NEAR_POSITIONS = 64
NEAR_PART = 8
"""Two opens in a row of a process are near each other up to NEAR_POSITIONS, and up to this part of the order."""
JUDGED_AFTER = 32
"""The number of opens after which a table is judged to be right or wrong."""
STRANGERS = 256
"""A table is wrong, too, if so many files were opened that are not in the order, and hardly one that is."""
MOST_STEPS = 20_000
"""The most positions by which one look follows the staged part, so that a look is short."""
LOOKS_OF_PACE = 16
MOST_LOOKS = 256


@dataclass(frozen=True)
class Positions:
    """Knows the positions of each id in an announced order."""

    ids: Sequence[int]
    starts: Sequence[int]
    """By id, and one more: the positions of an id are places[starts[id]:starts[id + 1]]."""
    places: Sequence[int]
    """The positions of each id, rising."""

    def of(self, id_: int, last: int = -1) -> Sequence[int]:
        """Returns the positions of an id; of very many only those from a little before `last` on."""
        first, stop = self.starts[id_], self.starts[id_ + 1]
        if stop - first > MOST_POSITIONS:
            first = max(first, bisect_left(self.places, last, first, stop) - 1)
        return self.places[first : min(stop, first + MOST_POSITIONS)]


def positions(ids: Sequence[int], files: int) -> Positions:
    """Builds the look-up for an order: O(its length)."""
    counts = array("I", bytes(4 * (files + 1)))
    for id_ in ids:
        counts[id_ + 1] += 1
    starts = array("I", accumulate(counts))
    free, places = starts[:], array("I", bytes(4 * len(ids)))
    for position, id_ in enumerate(ids):
        places[free[id_]] = position
        free[id_] += 1
    return Positions(ids, starts, places)


class Following:
    """Follows one announced epoch through the opens of the processes that read for it."""

    def __init__(self, who: Who, where: Positions, table: str = "", since_ns: int = 0) -> None:
        self.who = who
        self.where = where
        self.table = table
        """The name of the table from which the ids came."""
        self.since_ns = since_ns
        """Opens before this time belong to an earlier epoch."""
        self.front = 0
        """The position that the program has come to."""
        self.is_wrong: bool | None = None
        """Whether the program opens other files than announced; None while that is not known."""
        self._last: dict[int, int] = {}
        """The position of each process."""
        self._judged = self._near = self._strangers = 0
        self._staged_to = 0
        self._fronts: deque[tuple[float, int]] = deque(maxlen=LOOKS_OF_PACE)

    def distance(self, process: int, id_: int) -> int | None:
        """Returns how far ahead of what a process read last this id is, negative if it is behind; None if it was not
        announced."""
        last = self._last.get(process, -1)
        found = self.where.of(id_, last)
        if not len(found):
            return None
        return min((position - last for position in found if position > last), default=found[-1] - last)

    def opened(self, process: int, id_: int) -> None:
        """Takes an open by a process that reads for this loader. The front moves where two opens in a row are near each
        other, so that one file far ahead does not move it."""
        last = self._last.get(process, -1)
        found = self.where.of(id_, last)
        if last in found:
            return  # a sample opens its file again
        if not len(found):
            self._judge(strangers=1)
            return
        position = min(found, key=lambda place: (abs(place - last), place < last))
        self._last[process] = position
        is_near = abs(position - last) <= max(1, min(NEAR_POSITIONS, len(self.where.ids) // NEAR_PART))
        if is_near:
            self.front = max(self.front, position + 1)
        if last >= 0:
            self._judge(judged=1, near=int(is_near))

    def _judge(self, *, judged: int = 0, near: int = 0, strangers: int = 0) -> None:
        self._judged += judged
        self._near += near
        self._strangers += strangers
        if self.is_wrong is not None:
            return
        if self._judged >= JUDGED_AFTER:
            self.is_wrong = 2 * self._near < self._judged
        elif self._strangers >= STRANGERS and 2 * self._judged < JUDGED_AFTER:
            self.is_wrong = True

    def ahead(self, now: float, staged: Callable[[int], bool]) -> tuple[int, float | None] | None:
        """Returns how many files after the front are staged without a gap, and in how many seconds the program will be
        at the end of them.

        Returns None if nothing that the program still has to read is missing. The seconds are None while its pace is
        not known.
        """
        ids = self.where.ids
        self._fronts.append((now, self.front))
        at = max(self._staged_to, self.front)
        stop = min(len(ids), at + MOST_STEPS)
        while at < stop and staged(ids[at]):
            at += 1
        self._staged_to = at
        if at == len(ids):
            return None
        (then, before), files = self._fronts[0], at - self.front
        pace = (self.front - before) / (now - then) if now > then else 0.0
        return files, files / pace if pace else None


class CopyLead:
    """How far ahead the copies were, as looks spread evenly over the run, however long it is."""

    def __init__(self) -> None:
        self._looks: list[tuple[int, float | None]] = []
        """Files ahead, seconds ahead."""
        self._least_files: int | None = None
        self._every = 1
        self._number = 0

    def add(self, files: int, seconds: float | None) -> None:
        """Adds what one look found."""
        self._number += 1
        self._least_files = files if self._least_files is None else min(files, self._least_files)
        if self._number % self._every:
            return
        self._looks.append((files, seconds))
        if len(self._looks) > MOST_LOOKS:
            self._looks = self._looks[1::2]
            self._every *= 2

    def record(self) -> OrderLead | None:
        """Returns the lead for the record; None if no look found a file that was still missing."""
        from hpcstage.record.parts.part import OrderLead

        if not self._looks or self._least_files is None:
            return None
        seconds = [seconds for _, seconds in self._looks if seconds is not None]
        return OrderLead(
            median_files=int(median(files for files, _ in self._looks)),
            least_files=self._least_files,
            median_s=round(median(seconds), 3) if seconds else None,
        )


class Followings:
    """Follows all announced epochs and finds the one that a process reads for. It calls `on_wrong` with the name of a
    table that names other files than those that are opened."""

    def __init__(self, family_of: Callable[[int], Sequence[int]], on_wrong: Callable[[str], object]) -> None:
        """`family_of` returns the pids of a process and of its parents. A process is a number, such as that of its
        slot."""
        self.lead = CopyLead()
        self._family_of = family_of
        self._on_wrong = on_wrong
        self._following: dict[Who, Following] = {}
        self._for: dict[int, list[Following]] = {}
        self._right: set[str] = set()
        """The tables that need no more judging."""

    def begin(self, following: Following) -> None:
        """Begins to follow an announced epoch; its loader's last one is over."""
        if following.table in self._right:
            following.is_wrong = False
        self._following[following.who] = following
        self._for.clear()

    def end(self, who: Who) -> None:
        """Ends the epoch of a loader."""
        if self._following.pop(who, None) is not None:
            self._for.clear()

    def opened(self, process: int, id_: int, ns: int) -> None:
        """Takes an open. Of the loaders that the process and its parents have made, it belongs to the one nearest to
        this id."""
        candidates = self._for.get(process)
        if candidates is None:
            candidates = self._for[process] = self._candidates(process)
        begun = [following for following in candidates if ns >= following.since_ns]
        if len(begun) == 1:
            self._opened(begun[0], process, id_)
            return
        found = [(distance, f) for f in begun if (distance := f.distance(process, id_)) is not None]
        if found:
            self._opened(min(found, key=lambda pair: (pair[0] <= 0, abs(pair[0])))[1], process, id_)

    def _opened(self, following: Following, process: int, id_: int) -> None:
        known = following.is_wrong
        following.opened(process, id_)
        if following.is_wrong is False:
            self._right.add(following.table)
        elif following.is_wrong and known is None:
            for other in [f for f in self._following.values() if f.table == following.table]:
                self.end(other.who)
            self._on_wrong(following.table)

    def _candidates(self, process: int) -> list[Following]:
        family = self._family_of(process)
        return [following for who, following in self._following.items() if who.pid in family]

    def look(self, now: float, staged: Callable[[int], bool]) -> None:
        """Notes the lead: the smallest lead over any loader, in files."""
        found = [lead for following in self._following.values() if (lead := following.ahead(now, staged)) is not None]
        if found:
            self.lead.add(*min(found, key=lambda lead: lead[0]))
