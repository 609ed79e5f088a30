"""Carries out one duty: makes messages for others, or a block to keep, of a node's own block and what came from others.

A duty of a stripe whose blocks are all there and of full length is the same in every cycle, but for the numbers; it
adds to the sums in the buffer in which they came, and sends that on. The stripes at the end, where blocks are shorter
or missing, do as `coding.stages` says. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from hpcstage.checkpoint.coding.blocks import Block, Kernel, seen
from hpcstage.checkpoint.coding.routes import Duty, Hop
from hpcstage.checkpoint.coding.stages import RouteWork
from hpcstage.checkpoint.coding.stripes import CodedBlock
from hpcstage.exchange.coding.wire import BLOCK_HEAD_BYTES

Sending = tuple[int, int, bytearray]
"""The node of the receiver, the index of its block, and a message that has room for its head."""
Received = Mapping[int, memoryview]
"""By the index of the sender's block: the message, with its head."""


class NodeDuty(Protocol):
    """The duty of one node in one stripe, or in all that are like it."""

    block: CodedBlock
    keeps: bool
    sizes: dict[int, int]
    """The bytes of each message that it waits for, without the head, by the index of the sender's block."""

    def sent(self, own: bytearray, received: Received) -> Sequence[Sending]:
        """Returns what a source sends. Its own block and the messages may be changed."""

    def kept(self, received: Received) -> Block:
        """Returns the block of a target."""


class GeneralDuty:
    """A duty in a stripe of any shape."""

    def __init__(self, duty: Duty, work: RouteWork) -> None:
        self.block = duty.block
        self.keeps = work.keeps(duty)
        self.sizes = {hop.sender.index: hop.size_bytes for hop in duty.receives}
        self._duty = duty
        self._work = work

    def sent(self, own: bytearray, received: Received) -> Sequence[Sending]:
        """See NodeDuty."""
        made = []
        for hop, parts in self._work.sent(self._duty, own, self._split(received)).items():
            message = bytearray(BLOCK_HEAD_BYTES)
            for part in parts:
                message += seen(part).data  # an array would be added up
            made.append((hop.receiver.node, hop.receiver.index, message))
        return made

    def kept(self, received: Received) -> Block:
        """See NodeDuty."""
        return self._work.kept(self._duty, self._split(received))

    def _split(self, received: Received) -> dict[Hop, list[memoryview]]:
        found = {}
        for hop in self._duty.receives:
            parts, at = [], BLOCK_HEAD_BYTES
            for size in hop.sizes_bytes:
                parts.append(received[hop.sender.index][at : at + size])
                at += size
            found[hop] = parts
        return found


class FullDuty:
    """A duty in a stripe of full blocks."""

    def __init__(self, duty: Duty, work: RouteWork, kernel: Kernel) -> None:
        self.block = duty.block
        self.keeps = work.keeps(duty)
        self.sizes = {hop.sender.index: hop.size_bytes for hop in duty.receives}
        self._sends = duty.sends
        self._kernel = kernel
        self._m = len(work.targets)
        self._size = duty.block.size_bytes
        if not self.keeps:
            place = work.sources.index(duty.block)
            self._column = tuple(row[place] for row in work.rows)

    def sent(self, own: bytearray, received: Received) -> Sequence[Sending]:
        """See NodeDuty."""
        sums = self._summed(own, received)
        if len(self._sends) == 1:
            return [(*_to(self._sends[0]), sums)]
        made = []
        for hop in self._sends:
            start = BLOCK_HEAD_BYTES + hop.rows[0] * self._size
            made.append((*_to(hop), bytearray(BLOCK_HEAD_BYTES) + memoryview(sums)[start : start + self._size]))
        return made

    def kept(self, received: Received) -> Block:
        """See NodeDuty."""
        (message,) = received.values()
        return message[BLOCK_HEAD_BYTES:]

    def _summed(self, own: bytearray, received: Received) -> bytearray:
        """Returns a message with the sums: the one that came, where one did."""
        if not received:
            made = bytearray(BLOCK_HEAD_BYTES + self._m * self._size)
            self._kernel.product(tuple((c,) for c in self._column), (own,), self._parts(memoryview(made)))()
            return made
        (sums,) = received.values()
        self._kernel.addition(self._column, own, self._parts(sums))()
        assert isinstance(sums.obj, bytearray)
        return sums.obj

    def _parts(self, message: memoryview) -> list[memoryview]:
        starts = range(BLOCK_HEAD_BYTES, BLOCK_HEAD_BYTES + self._m * self._size, self._size)
        return [message[start : start + self._size] for start in starts]


def _to(hop: Hop) -> tuple[int, int]:
    return hop.receiver.node, hop.receiver.index
