"""Carries out the duties of a route: what a node sends and what it keeps, given its own block and what others sent it.

A duty sees nothing else, so the same work is done by nodes that exchange messages and by one process that stands for
all of them. Pure: buffers in, buffers out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hpcstage.checkpoint.coding.blocks import Block, seen
from hpcstage.checkpoint.coding.coder import Coder
from hpcstage.checkpoint.coding.field import Rows
from hpcstage.checkpoint.coding.routes import Duty, Hop
from hpcstage.checkpoint.coding.stripes import CodedBlock, Stripe

Messages = Mapping[Hop, Sequence[Block]]
"""For each hop its sums, in the order of the hop's rows."""


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
        came = received[duty.receives[0]] if duty.receives else ()
        sums = self._sums(self.sources.index(duty.block), own, came)
        return {
            hop: [seen(sums[row])[:size] for row, size in zip(hop.rows, hop.sizes_bytes, strict=True)]
            for hop in duty.sends
        }

    def kept(self, duty: Duty, received: Messages) -> bytearray:
        """Returns the block of a target."""
        (hop,) = duty.receives
        (total,) = received[hop]
        return bytearray(seen(total)).ljust(duty.block.size_bytes, b"\0")

    def _sums(self, source: int, own: Block, came: Sequence[Block]) -> list[bytearray]:
        made = []
        for row, target in enumerate(self.targets):
            size = min(len(seen(own)), target.size_bytes)
            first = bytes(came[row]) if came else b""
            total = bytearray(first.ljust(size, b"\0"))
            self.coder.contributing((self.rows[row][source],), seen(own)[:size], [total], len(first))()
            made.append(total)
        return made


def encoding_work(coder: Coder, stripe: Stripe) -> RouteWork:
    """Returns the work of a route by which a stripe is encoded."""
    rows = tuple(tuple(row[block.index] for block in stripe.data) for row in coder.code.rows)
    return RouteWork(coder, rows, stripe.data, stripe.parities)
