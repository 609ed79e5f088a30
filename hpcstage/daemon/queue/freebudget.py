"""Counts what is taken of a node's budget: by copies in the store, by transfers under way and by directories. Pure.

A copy takes whole blocks and one inode, a directory a block and an inode. A node that keeps only a share of the files
sets a part of the budget aside for temporary copies, which only pass through it: the oldest go when that part is full.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain, islice

from hpcstage.daemon.queue.states import LOOK_LIMIT, States
from hpcstage.plan.blocks import BLOCK_BYTES, blocks_bytes
from hpcstage.plan.budget import for_files
from hpcstage.plan.types import Budget


class HeldBytes(dict[int, int]):
    """The bytes that copies take, by id, the oldest first, and their sum."""

    size_bytes = 0

    def add(self, id_: int, blocks: int) -> None:
        """Adds a copy."""
        self[id_] = blocks
        self.size_bytes += blocks

    def remove(self, id_: int) -> bool:
        """Removes a copy. Returns False if it is none of these."""
        if id_ not in self:
            return False
        self.size_bytes -= self.pop(id_)
        return True


class TemporaryCopies:
    """The budget of temporary copies, and the copies that take it: those on their way, those that came ahead of the
    program and have yet to be read, and those that were read."""

    def __init__(self) -> None:
        self.limit = Budget(0, 0)
        self.dropped: list[int] = []
        """Ids of copies that have to be deleted; the caller that deletes them clears the list."""
        self._flying = HeldBytes()
        self._unread = HeldBytes()
        self._read = HeldBytes()

    @property
    def used_bytes(self) -> int:
        """The bytes that all temporary copies take, those on their way included."""
        return self._flying.size_bytes + self._unread.size_bytes + self._read.size_bytes

    @property
    def count(self) -> int:
        """The number of all temporary copies."""
        return len(self._flying) + len(self._unread) + len(self._read)

    def can_hold(self, blocks: int) -> bool:
        """Returns whether a copy would fit if there was no other."""
        return blocks <= self.limit.size_bytes and self.limit.inodes > 0

    def fits(self, blocks: int) -> bool:
        """Returns whether a copy fits once every copy in the store has gone."""
        return self._flying.size_bytes + blocks <= self.limit.size_bytes and len(self._flying) < self.limit.inodes

    def must_wait(self, blocks: int) -> bool:
        """Returns whether a copy fits only once copies on their way have come."""
        return self.can_hold(blocks) and not self.fits(blocks)

    def fits_ahead(self, blocks: int) -> bool:
        """Returns whether a copy fits without dropping one that has yet to be read."""
        size_bytes, files = self._flying.size_bytes + self._unread.size_bytes, len(self._flying) + len(self._unread)
        return size_bytes + blocks <= self.limit.size_bytes and files < self.limit.inodes

    def here(self) -> list[int]:
        """Returns the copies in the store, in the order in which they go."""
        return [*self._read, *self._unread]

    def oldest_unread(self, most: int) -> list[int]:
        """Returns up to `most` copies that came ahead of the program, the oldest first; it may have read them by
        now."""
        return list(islice(self._unread, most))

    def read(self, ids: Iterable[int]) -> None:
        """Notes that the program has read these copies."""
        for id_ in ids:
            blocks = self._unread.get(id_, 0)
            if self._unread.remove(id_):
                self._read.add(id_, blocks)

    def passed(self) -> None:
        """Notes that the program requests a file that is not here: it has probably gone past the oldest copies."""
        oldest = self.oldest_unread(LOOK_LIMIT)
        self.read(oldest[: len(oldest) // 4])

    def take(self, id_: int, blocks: int) -> None:
        """Counts a copy that is on its way."""
        self._flying.add(id_, blocks)

    def landed(self, id_: int, *, ahead: bool) -> None:
        """Notes that a copy is in the store; `ahead` says that it came before the program asked for it."""
        blocks = self._flying[id_]
        self._flying.remove(id_)
        (self._unread if ahead else self._read).add(id_, blocks)

    def give_back(self, id_: int) -> bool:
        """Gives back the budget of a copy that is gone or will not come. Returns False if it is no temporary copy."""
        return self._flying.remove(id_) or self._unread.remove(id_) or self._read.remove(id_)

    def surplus(self) -> int | None:
        """Returns the copy that has to go next; None while all fit."""
        if self.used_bytes <= self.limit.size_bytes and self.count <= self.limit.inodes:
            return None
        return next(chain(self._read, self._unread), None)


class FreeBudget:
    """Counts what is left of the budget; copies under way have taken their part of it."""

    def __init__(self, states: States, budget: Budget, directories: int) -> None:
        self.temporary = TemporaryCopies()
        self._states = states
        self._whole = for_files(budget, directories)
        self._left_bytes, self._left_inodes = self._whole.size_bytes, self._whole.inodes
        self._reserved: dict[int, int] = {}

    @property
    def used_bytes(self) -> int:
        """The bytes that all copies take."""
        return self._whole.size_bytes - self.temporary.limit.size_bytes - self._left_bytes + self.temporary.used_bytes

    @property
    def used_files(self) -> int:
        """The number of all copies."""
        return self._whole.inodes - self.temporary.limit.inodes - self._left_inodes + self.temporary.count

    @property
    def is_full(self) -> bool:
        """Whether nothing more fits; never while a part is set aside for temporary copies, which go on."""
        return not self.temporary.limit.size_bytes and (self._left_inodes <= 0 or self._left_bytes < BLOCK_BYTES)

    def set_aside(self, limit: Budget | None) -> None:
        """Sets a part of the budget aside for temporary copies; None: the node keeps everything."""
        before, after = self.temporary.limit, limit or Budget(0, 0)
        self._left_bytes += before.size_bytes - after.size_bytes
        self._left_inodes += before.inodes - after.inodes
        self.temporary.limit = after

    def reserve(self, id_: int) -> bool:
        """Reserves budget for a transfer. Returns False if there is not enough."""
        blocks = blocks_bytes(self._states.size(id_))
        if self._states.keeps(id_):
            if blocks > self._left_bytes or self._left_inodes <= 0:
                return False
            self.give_back(-blocks, -1)
        elif not self.temporary.fits(blocks):
            return False
        else:
            self._pass(id_, blocks)
        self._reserved[id_] = blocks
        return True

    def release(self, id_: int) -> None:
        """Gives back what was reserved for a transfer that has ended."""
        self._give_back(id_, self._reserved.pop(id_))

    def stored(self, id_: int, size_bytes: int, *, ahead: bool) -> None:
        """Counts a copy of this size that is in the store; `ahead`: it came before the program asked for it."""
        blocks = blocks_bytes(size_bytes)
        if self._states.keeps(id_):
            self.give_back(-blocks, -1)
        else:
            self._pass(id_, blocks)
            self.temporary.landed(id_, ahead=ahead)

    def drop(self, id_: int) -> None:
        """Gives back the budget of a copy that is not in the store any more."""
        self._give_back(id_, blocks_bytes(self._states.size(id_)))

    def give_back(self, blocks: int, files: int) -> None:
        """Gives back the budget of many copies at once, in bytes of whole blocks; negative numbers take it."""
        self._left_bytes += blocks
        self._left_inodes += files

    def keep(self, ids: range) -> None:
        """Counts temporary copies as copies that this node keeps: `give_back` will be called for all of these ids."""
        for id_ in self.temporary.here():
            if id_ in ids:
                self.temporary.give_back(id_)
                self.give_back(-blocks_bytes(self._states.size(id_)), -1)

    def keep_own(self) -> None:
        """Counts temporary copies of files that this node keeps from now on as such, where there is budget for them."""
        for id_ in self.temporary.here():
            blocks = blocks_bytes(self._states.size(id_))
            if self._states.keeps(id_) and blocks <= self._left_bytes and self._left_inodes > 0:
                self.temporary.give_back(id_)
                self.give_back(-blocks, -1)

    def _give_back(self, id_: int, blocks: int) -> None:
        if not (self.temporary.count and self.temporary.give_back(id_)):
            self.give_back(blocks, 1)

    def _pass(self, id_: int, blocks: int) -> None:
        """Counts a temporary copy; others make way for it."""
        self.temporary.take(id_, blocks)
        while (old := self.temporary.surplus()) is not None:
            self.drop(old)
            self._states.wait_again(old)
            self.temporary.dropped.append(old)
