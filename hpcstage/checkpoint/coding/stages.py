"""Carries out the duties of a route: what a node sends and what it keeps, given its own block and what others sent it.

A duty sees nothing else, so the same work is done by nodes that exchange messages and by one process that stands for
all of them. Pure: buffers in, buffers out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from hpcstage.checkpoint.coding.blocks import Block, seen, xor
from hpcstage.checkpoint.coding.coder import Coder
from hpcstage.checkpoint.coding.field import Rows
from hpcstage.checkpoint.coding.routes import Duty, Hop, Route
from hpcstage.checkpoint.coding.stripes import CodedBlock, Stripe

Messages = Mapping[Hop, Sequence[Block]]
"""For each hop its sums, in the order of the hop's rows, or the sender's block alone."""


@dataclass(frozen=True)
class RouteWork:
    """The work of one route: target i becomes the sum of `rows[i][j]` times source j."""

    coder: Coder
    rows: Rows
    sources: tuple[CodedBlock, ...]
    targets: tuple[CodedBlock, ...]

    def keeps(self, duty: Duty) -> bool:
        """Tells whether the duty is that of a target."""
        return duty.block in self.targets

    def sent(self, duty: Duty, own: Block, received: Messages) -> dict[Hop, list[Block]]:
        """Returns what a source sends."""
        sums: list[bytearray] = []
        if any(hop.rows for hop in duty.sends):
            sums = self._sums(self.sources.index(duty.block), own, [received[hop] for hop in duty.receives])
        sent: dict[Hop, list[Block]] = {}
        for hop in duty.sends:
            parts: list[Block] = [sums[row] for row in hop.rows] if hop.rows else [own]
            sent[hop] = [seen(part)[:size] for part, size in zip(parts, hop.sizes_bytes, strict=True)]
        return sent

    def kept(self, duty: Duty, received: Messages) -> bytearray:
        """Returns the block of a target."""
        total, summed, row = bytearray(duty.block.size_bytes), 0, self.targets.index(duty.block)
        for hop in duty.receives:
            column = (1,) if hop.rows else (self.rows[row][self.sources.index(hop.sender)],)
            (part,) = received[hop]
            self.coder.contributing(column, part, [total], summed)()
            summed = max(summed, len(seen(part)))
        return total

    def _sums(self, source: int, own: Block, received: Sequence[Sequence[Block]]) -> list[bytearray]:
        made = []
        for row, target in enumerate(self.targets):
            size = min(len(seen(own)), target.size_bytes)
            first = bytes(received[0][row]) if received else b""
            total = bytearray(first.ljust(size, b"\0"))
            self.coder.contributing((self.rows[row][source],), seen(own)[:size], [total], len(first))()
            for others in received[1:]:
                part = memoryview(total)[: len(seen(others[row]))]
                xor(part, others[row], part)
            made.append(total)
        return made


def encoding_work(coder: Coder, stripe: Stripe) -> RouteWork:
    """Returns the work of a route by which a stripe is encoded."""
    rows = tuple(tuple(row[block.index] for block in stripe.data) for row in coder.code.rows)
    return RouteWork(coder, rows, stripe.data, stripe.parities)


def carried_out(
    route: Route, work: RouteWork, own: Callable[[CodedBlock], Block], heard: Callable[[Hop, int], None] | None = None
) -> dict[CodedBlock, bytearray]:
    """Carries out a whole route in this process; returns the targets' blocks. `heard` is told of each message."""
    messages: dict[Hop, list[Block]] = {}
    made: dict[CodedBlock, bytearray] = {}
    for duty in route.duties:
        received = {hop: messages.pop(hop) for hop in duty.receives}
        if work.keeps(duty):
            made[duty.block] = work.kept(duty, received)
            continue
        for hop, parts in work.sent(duty, own(duty.block), received).items():
            messages[hop] = parts
            if heard is not None:
                heard(hop, sum(len(seen(part)) for part in parts))
    assert not messages
    return made
