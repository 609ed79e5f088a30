"""Asks, when nodes are missing, which copies the others have of the files that these would read: a node to which such
files go asks for these copies before it reads the source. Pure.

Owns what the others have said, and the bound of the wait for it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from hpcstage.daemon.peers.routes import Estate

MOST_S = 1.0
"""A file that nobody has is read from the source so much later, at most. A program that asks for it does not wait for
that."""


class Inquiry:
    """What this node has asked the others, once or more often."""

    def __init__(self) -> None:
        self.until: float | None = None
        """When the wait for the others ends; None while there is none."""
        self._unheard: set[int] = set()
        self._holders: dict[int, int] = {}

    def begin(self, others: Iterable[int], now: float) -> None:
        """Waits for these nodes."""
        self._unheard = set(others)
        self.until = now + MOST_S if self._unheard else now

    def heard(self, node: int, ids: Collection[int]) -> None:
        """Takes what a node has; without ids, that this was all."""
        self._holders.update(dict.fromkeys(ids, node))
        if not ids:
            self._unheard.discard(node)

    def is_over(self, now: float) -> bool:
        """Returns whether there was a wait, and nothing is to be waited for any more."""
        return self.until is not None and (not self._unheard or now >= self.until)

    def end(self) -> None:
        """Waits no more."""
        self.until = None

    def estate(self, present: Collection[int], here: Collection[int]) -> Estate:
        """Returns what is known. Of the ids that are `here` this node needs no copy; a node that is not there any more
        gives none."""
        found = {id_: node for id_, node in self._holders.items() if node in present and id_ not in here}
        return Estate(is_divided=True, holders=found)
