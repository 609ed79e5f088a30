"""Decides which stripes of other nodes a node has of a file that is divided: those that its readers in order need next.
Pure.

There is room for so many stripes. What a reader will need comes ahead of it, also over the end of the file, as it may
begin anew; several readers share the room. For a stripe that is needed the one goes that came first of those that are
not. Callers pass `now`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

READS_S = 3.0
"""A reader that goes on reads: it has asked for something else within this time."""


class NextStripe(NamedTuple):
    """A stripe to be asked for, and the one that goes for it."""

    stripe: int
    instead_of: int | None


class Window:
    """Owns the places of readers, and which stripes of other nodes are here or on their way."""

    def __init__(self, stripes: int, room: int, is_own: Callable[[int], bool]) -> None:
        """`stripes` are those of the file, `room` how many of other nodes there may be."""
        self._stripes = stripes
        self._room = room
        self._is_own = is_own
        self._readers: dict[int, tuple[int, float]] = {}
        """By the number of its word: what a reader needs next, plus one, and since when."""
        self._here: dict[int, None] = {}
        """Stripes of others, the oldest first."""
        self._coming: set[int] = set()

    @property
    def held(self) -> int:
        """The number of stripes that take room."""
        return len(self._here) + len(self._coming)

    def look(self, words: Sequence[int], now: float) -> None:
        """Takes the words of readers."""
        for number, word in enumerate(words):
            if word and self._readers.get(number, (0, 0.0))[0] != word:
                self._readers[number] = word, now

    def fronts(self, now: float) -> list[int]:
        """Returns what readers need next that go on, the latest first."""
        latest = sorted(self._readers.values(), key=lambda reader: -reader[1])
        return [(word - 1) % self._stripes for word, since in latest if now - since < READS_S]

    def needed(self, now: float) -> list[int]:
        """Returns the stripes of others that readers need, as many as there is room for, what is needed first first."""
        fronts = self.fronts(now)
        found: dict[int, None] = {}
        for distance in range(self._stripes if fronts else 0):
            for front in fronts:
                stripe = (front + distance) % self._stripes
                if len(found) == self._room:
                    return list(found)
                if not self._is_own(stripe):
                    found[stripe] = None
        return list(found)

    def take(self, now: float, can_come: Callable[[int], bool]) -> NextStripe | None:
        """Returns what is to be asked for next; from then on it is on its way. None if nothing is needed that can come,
        or there is no room."""
        needed = self.needed(now)
        missing = (stripe for stripe in needed if stripe not in self._here and stripe not in self._coming)
        stripe = next(filter(can_come, missing), None)
        if stripe is None:
            return None
        oldest = None
        if self.held >= self._room:
            oldest = next((old for old in self._here if old not in needed), None)
            if oldest is None:
                return None
            del self._here[oldest]
        self._coming.add(stripe)
        return NextStripe(stripe, oldest)

    def coming(self) -> list[int]:
        """Returns the stripes that are on their way."""
        return list(self._coming)

    def came(self, stripe: int) -> None:
        """Notes that a stripe is here."""
        self._coming.discard(stripe)
        self._here[stripe] = None

    def failed(self, stripe: int) -> None:
        """Notes that a stripe does not come."""
        self._coming.discard(stripe)
