"""The budget of a node that keeps only a share of the files, divided between its own copies and transit copies. Pure.

A transit copy only passes through the node.
"""

from __future__ import annotations

from collections.abc import Callable

from hpcstage.daemon.queue.passing import Transit
from hpcstage.daemon.queue.room import Room
from hpcstage.plan.blocks import blocks_bytes
from hpcstage.plan.types import Budget


class GroupRoom(Room):
    """Counts the two parts of the budget. `is_passing` says whether the copy of an id is a transit copy; `drop_surplus`
    removes one for which there is no budget any more."""

    def __init__(
        self,
        budget: Budget,
        directories: int,
        is_passing: Callable[[int], bool],
        drop_surplus: Callable[[int], None],
    ) -> None:
        super().__init__(budget, directories)
        self.transit = Transit()
        self._is_passing = is_passing
        self._drop_surplus = drop_surplus

    def set_aside(self, limit: Budget | None) -> None:
        """Sets a share of the budget aside for transit copies; None: the node keeps everything."""
        given, inodes = (limit.size_bytes, limit.inodes) if limit else (0, 0)
        self._left_bytes += self.transit.limit_bytes - given
        self._left_inodes += self.transit.limit_inodes - inodes
        self.transit.limit_bytes, self.transit.limit_inodes = given, inodes

    @property
    def is_full(self) -> bool:
        """Whether nothing more fits; never while a share is set aside, since a full store must not end transit."""
        return not self.transit.limit_bytes and super().is_full

    def reserve(self, id_: int, size_bytes: int) -> bool:
        """See Room."""
        if not self._is_passing(id_):
            return super().reserve(id_, size_bytes)
        blocks = blocks_bytes(size_bytes)
        if not self.transit.fits(blocks):
            return False
        self._reserved[id_] = blocks
        self._pass(id_, blocks)
        return True

    def _pass(self, id_: int, blocks: int) -> None:
        self.used_bytes += blocks
        self.used_files += 1
        self.transit.take(id_, blocks)
        while (old := self.transit.surplus()) is not None:
            self._drop_surplus(old)

    def release(self, id_: int) -> None:
        """See Room."""
        if self.transit.give_back(id_):
            self.used_bytes -= self._reserved.pop(id_)
            self.used_files -= 1
        else:
            super().release(id_)

    def take(self, id_: int, size_bytes: int) -> None:
        """See Room."""
        if self._is_passing(id_):
            self._pass(id_, blocks_bytes(size_bytes))
        else:
            super().take(id_, size_bytes)

    def drop(self, id_: int, size_bytes: int) -> None:
        """See Room."""
        if self.transit.give_back(id_):
            self.used_bytes -= blocks_bytes(size_bytes)
            self.used_files -= 1
        else:
            super().drop(id_, size_bytes)

    def now_kept(self, size_bytes: int) -> None:
        """Counts a former transit copy as one that this node keeps."""
        self._left_bytes -= blocks_bytes(size_bytes)
        self._left_inodes -= 1
