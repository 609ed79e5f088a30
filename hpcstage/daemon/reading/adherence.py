"""Measures how well the program kept an announced order, and how far ahead of it the copies were. Pure: callers pass
`now`.

Owns the positions of an announcement, the share of opens that came in its order, the front of the reading and the
lead. What was announced is in `streams`.

Each process that reads for a loader (the loader's own process or one of its workers) reads a part of the announced
order. Of its opens, the longest part that follows the announced order counts as in order; it is found online by
patience sorting, and where an id was announced several times every position of it is tried. Threads of one process read
neighbours in any order, which makes no difference to what is copied in time: opens at most NEAR_POSITIONS behind the
last one in order are counted on their own.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from statistics import median
from typing import TYPE_CHECKING

from hpcstage.daemon.reading.streams import Who

if TYPE_CHECKING:
    from hpcstage.record.parts.part import OrderLead

MOST_POSITIONS = 64
"""The most positions of one id that are tried for an open: those nearest to where its process is."""
NEAR_POSITIONS = 64
MOST_STEPS = 20_000
"""The most positions by which one look follows the staged part, so that a look is short."""
LOOKS_OF_PACE = 16
MOST_SAMPLES = 256


@dataclass(frozen=True)
class Positions:
    """Knows the positions of each id in an announced order."""

    ids: Sequence[int]
    starts: Sequence[int]
    """By id, and one more: the positions of an id are places[starts[id]:starts[id + 1]]."""
    places: Sequence[int]
    """The positions of each id, rising."""

    def of(self, id_: int, behind: Sequence[int] = ()) -> Sequence[int]:
        """Returns the positions of an id; of very many only those beyond most of `behind`, which rises."""
        first, stop = self.starts[id_], self.starts[id_ + 1]
        if stop - first > MOST_POSITIONS and len(behind) > MOST_POSITIONS:
            first = bisect_right(self.places, behind[-MOST_POSITIONS], first, stop)
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

    def __init__(self, who: Who, where: Positions) -> None:
        self.who = who
        self.where = where
        self.opens = 0
        """The number of opens of announced ids; a sample that opens its file again does not count."""
        self.near = 0
        """The number of opens in the announced order or at most NEAR_POSITIONS behind it."""
        self.front = 0
        """The position that the program has come to."""
        self._ends: dict[int, array[int]] = {}
        """By process: the smallest last position of every length of a part that is in order."""
        self._opened = array("I", bytes(4 * len(where.ids)))
        """How often an id was opened, stored at `where.starts[id]`."""
        self._staged_to = 0
        self._fronts: deque[tuple[float, int]] = deque(maxlen=LOOKS_OF_PACE)

    def distance(self, process: int, id_: int) -> int | None:
        """Returns how far ahead of what a process read last this id is, negative if it is behind; None if it was not
        announced."""
        ends: Sequence[int] = self._ends.get(process, ())
        found = self.where.of(id_, ends)
        if not len(found):
            return None
        last = ends[-1] if len(ends) else -1
        return min((position - last for position in found if position > last), default=found[-1] - last)

    def opened(self, process: int, id_: int) -> None:
        """Counts an open by a process that reads for this loader."""
        where = self.where
        first, stop = where.starts[id_], where.starts[id_ + 1]
        if first == stop or self._opened[first] >= stop - first:
            return
        self._opened[first] += 1
        self.opens += 1
        ends = self._ends.setdefault(process, array("I"))
        last = ends[-1] if ends else -1
        found = where.of(id_, ends)
        self.near += len(found) > 0 and found[-1] >= last - NEAR_POSITIONS
        for position in reversed(found):
            length = bisect_left(ends, position)
            if length == len(ends):
                ends.append(position)
            else:
                ends[length] = position
        self.front = max(self.front, 1 + next((position for position in found if position > last), -1))

    @property
    def kept(self) -> int:
        """The number of opens that came in the announced order."""
        return sum(map(len, self._ends.values()))

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


@dataclass
class CopyLead:
    """How far ahead the copies were, as samples spread evenly over the run, however long it is."""

    samples: list[tuple[float, int, float | None]] = field(default_factory=list)
    """Seconds since the start, files ahead, seconds ahead."""
    least_files: int | None = None
    least_s: float | None = None
    _every: int = 1
    _looks: int = 0

    def add(self, at_s: float, files: int, seconds: float | None) -> None:
        """Adds what one look found."""
        self._looks += 1
        self.least_files = files if self.least_files is None else min(files, self.least_files)
        if seconds is not None:
            self.least_s = round(seconds if self.least_s is None else min(seconds, self.least_s), 3)
        if self._looks % self._every:
            return
        self.samples.append((round(at_s, 3), files, None if seconds is None else round(seconds, 3)))
        if len(self.samples) > MOST_SAMPLES:
            self.samples = self.samples[1::2]
            self._every *= 2

    def record(self) -> OrderLead | None:
        """Returns the lead for the record; None if no look found a file that was still missing."""
        from hpcstage.record.parts.part import OrderLead

        if not self.samples or self.least_files is None:
            return None
        files = [sample[1] for sample in self.samples]
        seconds = [sample[2] for sample in self.samples if sample[2] is not None]
        return OrderLead(
            median_files=int(median(files)),
            least_files=self.least_files,
            median_s=round(median(seconds), 3) if seconds else None,
            least_s=self.least_s,
            samples=tuple(self.samples),
        )


class Adherence:
    """Follows all announced epochs and finds the one that a process reads for."""

    def __init__(self, family_of: Callable[[int], Sequence[int]]) -> None:
        """`family_of` returns the pids of a process and of its parents. A process is a number, such as that of its
        slot."""
        self.lead = CopyLead()
        self._family_of = family_of
        self._following: dict[Who, Following] = {}
        self._for: dict[int, list[Following]] = {}
        self._opens = 0
        self._kept = 0
        self._near = 0

    def begin(self, following: Following) -> None:
        """Begins to follow an announced epoch; its loader's last one is over."""
        self.end(following.who)
        self._following[following.who] = following
        self._for.clear()

    def end(self, who: Who) -> None:
        """Ends the epoch of a loader and adds up its opens."""
        following = self._following.pop(who, None)
        if following is not None:
            self._opens += following.opens
            self._kept += following.kept
            self._near += following.near
            self._for.clear()

    def opened(self, process: int, id_: int) -> None:
        """Counts an open. Of the loaders that the process and its parents have made, it belongs to the one nearest to
        this id."""
        candidates = self._for.get(process)
        if candidates is None:
            candidates = self._for[process] = self._candidates(process)
        if len(candidates) == 1:
            candidates[0].opened(process, id_)
            return
        found = [(distance, f) for f in candidates if (distance := f.distance(process, id_)) is not None]
        if found:
            min(found, key=lambda pair: (pair[0] <= 0, abs(pair[0])))[1].opened(process, id_)

    def _candidates(self, process: int) -> list[Following]:
        family = self._family_of(process)
        return [following for who, following in self._following.items() if who.pid in family]

    def look(self, at_s: float, now: float, staged: Callable[[int], bool]) -> None:
        """Notes the lead: the smallest lead over any loader, in files."""
        found = [lead for following in self._following.values() if (lead := following.ahead(now, staged)) is not None]
        if found:
            self.lead.add(at_s, *min(found, key=lambda lead: lead[0]))

    @property
    def opens(self) -> int:
        """The number of opens of announced files so far."""
        return self._opens + sum(following.opens for following in self._following.values())

    @property
    def kept_share(self) -> float | None:
        """The share of these opens that came in the announced order; None if there were none."""
        return self._share(self._kept + sum(following.kept for following in self._following.values()))

    @property
    def near_share(self) -> float | None:
        """The same share, with the opens that came a little later than announced."""
        return self._share(self._near + sum(following.near for following in self._following.values()))

    def _share(self, count: int) -> float | None:
        return round(count / self.opens, 6) if self.opens else None
