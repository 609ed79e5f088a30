"""Carries out the duties of one node in the stripes of an encoding: reads, computes, keeps; sends nothing.

Owns the files: the generation that is read, and that of the parities. The loop asks `tasks` what can be done; `work`,
`close` and `give_up` run in the thread of the lane.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence

from hpcstage.checkpoint.coding.blocks import seen
from hpcstage.checkpoint.generations.files import Files
from hpcstage.checkpoint.generations.reading import LocalSource
from hpcstage.checkpoint.protection.members import MemberChecksums, MemberWriter, read_data
from hpcstage.checkpoint.protection.orders import EncodeOrder
from hpcstage.exchange.coding.tasks import StripeTasks, Task
from hpcstage.exchange.coding.wire import BlockHead

_SYNCED_BYTES = 64 << 20
"""Parities go to the disk in steps of so many bytes, so that the last one does not take long."""


class BecameShorter(OSError):
    """A file of the generation is not as long as it was."""


class EncodingGivenUp(Exception):
    """Ends what is open, without giving it its name."""


Sending = tuple[int, bytearray]
"""The place of a member, and a message for it."""


class StripeWork:
    """Does the work of one node, from the first stripe to parities under their name."""

    def __init__(self, order: EncodeOrder, place: int, sizes_bytes: list[tuple[int, ...]]) -> None:
        """Opens the generation and makes the file of its parities. Raises OSError."""
        totals = [sum(sizes) for sizes in sizes_bytes]
        self.tasks = StripeTasks(order, place, totals)
        self.checksums = MemberChecksums(self.tasks.striping, totals, place)
        self.bytes_read = 0
        self._order = order
        self._own_sizes = sizes_bytes[place]
        self._own = bytearray(order.block_bytes)
        self._files = Files()
        self._unsynced_bytes = 0
        self._writer = MemberWriter(self._files, order.directory, order.generation.number)
        self._opened = contextlib.ExitStack()
        self._source = self._opened.enter_context(LocalSource(order.directory, self._files))
        self._parities = self._opened.enter_context(self._writer.parities())

    def work(self, tasks: Sequence[Task]) -> list[Sending]:
        """Does some tasks; returns what is to be sent. Raises OSError."""
        sendings: list[Sending] = []
        for task in tasks:
            if task.duty.keeps:
                self._keep(task)
            else:
                sendings += self._sent(task)
        return sendings

    def _sent(self, task: Task) -> Iterator[Sending]:
        block, own = task.duty.block, self._own
        if len(own) != block.size_bytes:
            own = bytearray(block.size_bytes)
        offset = task.number * self._order.block_bytes
        if read_data(self._source, self._order.generation.number, self._own_sizes, memoryview(own), offset) < len(own):
            raise BecameShorter(0, "the generation became shorter")
        self.bytes_read += len(own)
        self.checksums.note(block, task.number, own)
        for node, receiver, message in task.duty.sent(own, task.received):
            BlockHead(task.stripe, self._order.digest, block.index, receiver).pack_into(message)
            yield node, message

    def _keep(self, task: Task) -> None:
        content = seen(task.duty.kept(task.received)).data
        self.checksums.note(task.duty.block, task.number, content)
        self._files.write(self._parities, content, task.number * self._order.block_bytes)
        self._unsynced_bytes += len(content)
        if self._unsynced_bytes >= _SYNCED_BYTES:
            self._unsynced_bytes = 0
            os.fdatasync(self._parities)

    def close(self) -> None:
        """Gives the parities their name: they are on the disk. Raises OSError."""
        self._opened.close()

    def give_up(self) -> None:
        """Removes what was made."""
        with contextlib.suppress(EncodingGivenUp, OSError), self._opened:
            raise EncodingGivenUp
        with contextlib.suppress(OSError):
            self._writer.discard()
