"""Copies that only pass through a node: a share of the store, of which the oldest go when it is full. Pure.

A copy that came ahead of the program goes last: it has yet to be read. When it was, somebody says so.
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
"""Of a small store."""


@dataclass
class Transit:
    """The room, and what is in it: in the store, or on its way there."""

    limit_bytes: int = 0
    limit_inodes: int = 0
    dropped: list[int] = field(default_factory=list)
    """Copies that have to be removed; who removes them clears the list."""
    _flying: dict[int, int] = field(default_factory=dict)
    """Bytes by id."""
    _here: dict[int, int] = field(default_factory=dict)
    """Likewise, the oldest first."""
    _unread: dict[int, int] = field(default_factory=dict)
    """In the store ahead of the program."""
    _flying_bytes: int = 0
    _here_bytes: int = 0
    _unread_bytes: int = 0

    @property
    def used_bytes(self) -> int:
        """What they take."""
        return self._flying_bytes + self._here_bytes + self._unread_bytes

    def can_hold(self, blocks: int) -> bool:
        """Whether there would be room if nothing was there."""
        return blocks <= self.limit_bytes and self.limit_inodes > 0

    def fits(self, blocks: int) -> bool:
        """Whether there is room once every copy in the store has gone."""
        return self._flying_bytes + blocks <= self.limit_bytes and len(self._flying) < self.limit_inodes

    def fits_ahead(self, blocks: int) -> bool:
        """Whether there is room without a copy that has yet to be read."""
        files = len(self._flying) + len(self._unread)
        return self._flying_bytes + self._unread_bytes + blocks <= self.limit_bytes and files < self.limit_inodes

    def oldest_unread(self, most: int) -> list[int]:
        """Copies that came ahead of the program, and may have been read by now."""
        return list(islice(self._unread, most))

    def read(self, ids: Iterable[int]) -> None:
        """The program has read these."""
        for id_ in ids:
            blocks = self._unread.pop(id_, None)
            if blocks is not None:
                self._unread_bytes -= blocks
                self._here[id_] = blocks
                self._here_bytes += blocks

    def take(self, id_: int, blocks: int) -> None:
        """A copy is on its way."""
        self._flying[id_] = blocks
        self._flying_bytes += blocks

    def landed(self, id_: int, *, ahead: bool) -> None:
        """It is in the store; `ahead`: before anybody asked for it."""
        blocks = self._flying.pop(id_, None)
        if blocks is not None:
            self._flying_bytes -= blocks
            self._unread[id_] = blocks
            self._unread_bytes += blocks
            if not ahead:
                self.read([id_])

    def give_back(self, id_: int) -> bool:
        """A copy is gone, or will not come. False: it is none of these."""
        blocks = self._flying.pop(id_, None)
        if blocks is not None:
            self._flying_bytes -= blocks
            return True
        self.read([id_])
        blocks = self._here.pop(id_, None)
        self._here_bytes -= blocks or 0
        return blocks is not None

    def surplus(self) -> int | None:
        """The copy that has to go next; None: there is room."""
        files = len(self._flying) + len(self._here) + len(self._unread)
        if self.used_bytes <= self.limit_bytes and files <= self.limit_inodes:
            return None
        return next(chain(self._here, self._unread), None)


def share_of(budget: Budget) -> Budget:
    """What is set aside for transit copies."""
    return Budget(
        max(int(budget.size_bytes * SHARE), min(LEAST_BYTES, int(budget.size_bytes * MOST_SHARE))),
        max(int(budget.inodes * SHARE), min(LEAST_INODES, int(budget.inodes * MOST_SHARE))),
    )
