"""Counts what is taken of the budget: by copies in the store, by transfers under way and by directories. Pure.

A copy takes whole blocks and one inode, a directory a block and an inode.
"""

from __future__ import annotations

from hpcstage.plan.blocks import BLOCK_BYTES, blocks_bytes
from hpcstage.plan.types import Budget


class Room:
    """The budget less what was taken. `used_bytes` and `used_files` count the copies, those under way included."""

    def __init__(self, budget: Budget, directories: int) -> None:
        self._left_bytes = budget.size_bytes - directories * BLOCK_BYTES
        self._left_inodes = budget.inodes - directories
        self._directories = directories
        self._reserved: dict[int, int] = {}
        self.used_bytes = 0
        self.used_files = 0

    @property
    def used_inodes(self) -> int:
        """The inodes of the copies and of the directories set aside for them."""
        return self.used_files + self._directories

    @property
    def is_full(self) -> bool:
        """Whether not even the smallest file fits."""
        return self._left_inodes <= 0 or self._left_bytes < BLOCK_BYTES

    def reserve(self, id_: int, size_bytes: int) -> bool:
        """Reserves budget for a transfer. Returns False if there is not enough."""
        blocks = blocks_bytes(size_bytes)
        if blocks > self._left_bytes or self._left_inodes <= 0:
            return False
        self._reserved[id_] = blocks
        self.give_back(-blocks, -1)
        return True

    def release(self, id_: int) -> None:
        """Gives back what was reserved for a transfer that has ended."""
        self.give_back(self._reserved.pop(id_), 1)

    def take(self, id_: int, size_bytes: int) -> None:
        """Counts a copy of this size that is in the store."""
        del id_
        self.give_back(-blocks_bytes(size_bytes), -1)

    def drop(self, id_: int, size_bytes: int) -> None:
        """Gives back the budget of a copy that is not in the store any more."""
        del id_
        self.give_back(blocks_bytes(size_bytes), 1)

    def give_back(self, blocks: int, files: int) -> None:
        """Gives back the budget of many copies at once, in bytes of whole blocks; negative numbers take it."""
        self._left_bytes += blocks
        self._left_inodes += files
        self.used_bytes -= blocks
        self.used_files -= files
