"""Decides when the copying of large files is held back because the program reads them at the source itself. Pure.

A file is large if the source is busy with it for more than a quarter of a second. A program that has such a file open
at the source goes on reading it there, so a copy that is made meanwhile only takes bandwidth away from it. Such a copy
is held back until the program has let go of the file; one that is under way is given up. While the program reads large
files at the source, others are copied only where that does not slow it down (`beside`), and no more of them than it is
reading, until it opens those copies: it is not known whether it ever will. Later, too, no more are copied at a time
than the program read at a time. Afterwards files that the program has not read yet come before those that it has read.
In a node group all nodes tell each other what their programs read at the source, and each holds back accordingly.
Callers pass `now`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from hpcstage.daemon.queue.beside import Beside, Read
from hpcstage.daemon.queue.rates import Estimates

LARGE_S = 0.25
LEAST_BYTES = 16 << 20
LET_GO_S = 5.0
"""The program has let go of a file once this much time has passed without a sign of use."""
TELL_EVERY_S = 1.0
"""The interval at which other nodes are told that a program still reads a file at the source."""
MOST_TRIES = 3
"""The most times that the copying of one file is begun."""
MOST_WAIT_S, NEARLY_DONE = 1.0, 0.75
"""A program waits for a copy of which NEARLY_DONE is there, if the rest is expected within MOST_WAIT_S."""


class Large:
    """Knows which large files are in use at the source, which copies are ahead of the program and which are held
    back."""

    def __init__(self, estimates: Estimates) -> None:
        self.held_back: set[int] = set()
        """Files that were not copied when it was their turn, since the program read them at the source."""
        self._estimates = estimates
        self._used_at: dict[int, float] = {}
        self._untold: set[int] = set()
        self._told_at: dict[int, float] = {}
        self._tries: Counter[int] = Counter()
        self._beside: Beside | None = None
        """Judges copying beside the program; only where this node counts what its programs read."""
        self._readers = 0
        """The most files that the program had open at the source at the same time."""
        self._ahead: set[int] = set()
        """Ids that are copied or being copied and that the program has not opened since."""

    def is_large(self, size_bytes: int) -> bool:
        """Returns whether a file of this size is large."""
        return size_bytes > max(LEAST_BYTES, LARGE_S * self._estimates.all_bytes_per_s)

    def read_at_source(self, id_: int, now: float) -> None:
        """Notes that a program of this node has a file open at the source or is about to open it there."""
        self._used_at[id_] = now
        self._untold.add(id_)

    def read_elsewhere(self, id_: int, now: float) -> None:
        """Notes that a program of another node has a file open at the source."""
        self._used_at[id_] = now

    def asked_for(self, id_: int) -> None:
        """Notes that a program waits for another node's copy and opens the file at the source if there is none."""
        self._untold.add(id_)

    def untold(self, now: float) -> list[int]:
        """Returns the files in use on this node of which other nodes are to be told now."""
        found = [id_ for id_ in self._untold if now - self._told_at.get(id_, -TELL_EVERY_S) >= TELL_EVERY_S]
        self._untold.difference_update(found)
        self._told_at.update(dict.fromkeys(found, now))
        return found

    def in_use(self, id_: int, now: float) -> bool:
        """Returns whether a program reads the file at the source."""
        return now - self._used_at.get(id_, -LET_GO_S) < LET_GO_S

    def must_wait(self, id_: int, now: float) -> bool:
        """Returns whether a large file whose turn it is must not be copied now."""
        if self.in_use(id_, now):
            self.held_back.add(id_)
            return True
        return self._tries[id_] >= MOST_TRIES or self.are_enough(now)

    def came(self, id_: int) -> None:
        """Notes that another node's copy has come."""
        self.held_back.discard(id_)

    def are_enough(self, now: float) -> bool:
        """Returns whether the copies ahead of the program are as many as the files that it reads at the source."""
        for id_ in [id_ for id_ in self._used_at if not self.in_use(id_, now)]:
            del self._used_at[id_]
        if self.must_not_slow(now):
            return True
        readers = min(len(self._used_at), self._readers or len(self._used_at))
        return 0 < readers <= len(self._ahead)

    def most_in_flight(self) -> int | None:
        """Returns how many are copied at a time for a program that has read large files at the source: a copy that is
        not complete when the program opens the file is of no use."""
        return self._readers or None

    def watch(self) -> None:
        """Begins to judge copying beside the program: `looked` is told what both read."""
        self._beside = Beside()

    def looked(self, open_at_source: int, read: Read, *, copies: bool) -> None:
        """Notes how many large files the program has open at the source now, and whether others are being copied."""
        self._readers = max(self._readers, open_at_source)
        if self._beside is not None:
            self._beside.look(read, reads=self._is_read(read.at), copies=copies)

    def must_not_slow(self, now: float) -> bool:
        """Returns whether no large file may be copied now, since that slows the program's reading down, or might."""
        return self._beside is not None and not self._beside.is_allowed and self._is_read(now)

    def _is_read(self, now: float) -> bool:
        return any(self.in_use(id_, now) for id_ in self._used_at)

    def begun(self, id_: int) -> None:
        """Notes that the copying of a file begins."""
        self.held_back.discard(id_)
        self._tries[id_] += 1
        self._ahead.add(id_)

    def taken_back(self, id_: int) -> None:
        """Notes that the copying of a file was given up for reasons that have nothing to do with the file."""
        self._ahead.discard(id_)
        self._tries[id_] = max(0, self._tries[id_] - 1)

    def given_up(self, id_: int) -> None:
        """Notes that the copying of a file was given up, since a program reads it at the source."""
        self._ahead.discard(id_)
        self.held_back.add(id_)

    @property
    def ahead(self) -> Sequence[int]:
        """The ids of copies that may prove to be of no use, since the program has not opened them."""
        return list(self._ahead)

    def opened(self, id_: int) -> None:
        """Notes that the program opened the copy or that there will be none."""
        self._ahead.discard(id_)

    @staticmethod
    def is_worth_waiting(size_bytes: int, copied_bytes: int, took_s: float) -> bool:
        """Returns whether a program waits for the rest of a copy under way: never for long, as it may read little."""
        if copied_bytes < NEARLY_DONE * size_bytes:
            return False
        return (size_bytes - copied_bytes) * took_s <= MOST_WAIT_S * copied_bytes
