"""Transit copies, which only pass through a node: they have a share of the store, and the oldest go when it is full.

A copy that came ahead of the program goes last, since it has yet to be read; the caller says when it was (`read`).
Pure.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import chain, islice

from hpcstage.plan.types import Budget

SHARE = 0.1
LEAST_BYTES = 64 << 20
LEAST_INODES = 256
MOST_SHARE = 0.25
"""The largest share of a small store that LEAST_BYTES and LEAST_INODES may take."""


@dataclass
class Transit:
    """The budget of transit copies, and the copies that take it: those in the store and those on their way there."""

    limit_bytes: int = 0
    limit_inodes: int = 0
    dropped: list[int] = field(default_factory=list)
    """Ids of copies that have to be deleted; the caller that deletes them clears the list."""
    _flying: dict[int, int] = field(default_factory=dict)
    """By id: the bytes of a copy on its way."""
    _here: dict[int, int] = field(default_factory=dict)
    """By id: the bytes of a copy in the store that was read, the oldest first."""
    _unread: dict[int, int] = field(default_factory=dict)
    """By id: the bytes of a copy in the store that came ahead of the program, the oldest first."""
    _flying_bytes: int = 0
    _here_bytes: int = 0
    _unread_bytes: int = 0

    @property
    def used_bytes(self) -> int:
        """The bytes that all transit copies take, those on their way included."""
        return self._flying_bytes + self._here_bytes + self._unread_bytes

    def can_hold(self, blocks: int) -> bool:
        """Returns whether a copy would fit if there was no other."""
        return blocks <= self.limit_bytes and self.limit_inodes > 0

    def fits(self, blocks: int) -> bool:
        """Returns whether a copy fits once every copy in the store has gone."""
        return self._flying_bytes + blocks <= self.limit_bytes and len(self._flying) < self.limit_inodes

    def fits_ahead(self, blocks: int) -> bool:
        """Returns whether a copy fits without dropping one that has yet to be read."""
        files = len(self._flying) + len(self._unread)
        return self._flying_bytes + self._unread_bytes + blocks <= self.limit_bytes and files < self.limit_inodes

    def oldest_unread(self, most: int) -> list[int]:
        """Returns up to `most` copies that came ahead of the program, the oldest first; it may have read them by
        now."""
        return list(islice(self._unread, most))

    def read(self, ids: Iterable[int]) -> None:
        """Notes that the program has read these copies."""
        for id_ in ids:
            blocks = self._unread.pop(id_, None)
            if blocks is not None:
                self._unread_bytes -= blocks
                self._here[id_] = blocks
                self._here_bytes += blocks

    def take(self, id_: int, blocks: int) -> None:
        """Counts a copy that is on its way."""
        self._flying[id_] = blocks
        self._flying_bytes += blocks

    def landed(self, id_: int, *, ahead: bool) -> None:
        """Notes that a copy is in the store; `ahead` says that it came before the program asked for it."""
        blocks = self._flying.pop(id_, None)
        if blocks is not None:
            self._flying_bytes -= blocks
            self._unread[id_] = blocks
            self._unread_bytes += blocks
            if not ahead:
                self.read([id_])

    def give_back(self, id_: int) -> bool:
        """Gives back the budget of a copy that is gone or will not come. Returns False if it is no transit copy."""
        blocks = self._flying.pop(id_, None)
        if blocks is not None:
            self._flying_bytes -= blocks
            return True
        self.read([id_])
        blocks = self._here.pop(id_, None)
        self._here_bytes -= blocks or 0
        return blocks is not None

    def surplus(self) -> int | None:
        """Returns the copy that has to go next; None while all fit."""
        files = len(self._flying) + len(self._here) + len(self._unread)
        if self.used_bytes <= self.limit_bytes and files <= self.limit_inodes:
            return None
        return next(chain(self._here, self._unread), None)


def share_of(budget: Budget) -> Budget:
    """Returns the part of a store's budget that is set aside for transit copies."""
    return Budget(
        max(int(budget.size_bytes * SHARE), min(LEAST_BYTES, int(budget.size_bytes * MOST_SHARE))),
        max(int(budget.inodes * SHARE), min(LEAST_INODES, int(budget.inodes * MOST_SHARE))),
    )
