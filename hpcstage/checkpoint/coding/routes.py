"""The way of the blocks of a stripe between its nodes: who sends what to whom, computes what and keeps what.

A chain: each node adds its block, times its coefficients, to the sums that come from its neighbour, and hands them on;
the last one gives each sum to the node that keeps it. It restores, too: sources are then the blocks that survived,
targets the lost ones. Blocks go in ascending order of their sizes, so that the sums are never longer than the block of
the node that sends them. Pure: bytes are counted here, moved elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from hpcstage.checkpoint.coding.stripes import CodedBlock


@dataclass(frozen=True)
class Hop:
    """One message: sums for the targets `rows`, `sizes_bytes` of each."""

    sender: CodedBlock
    receiver: CodedBlock
    rows: tuple[int, ...]
    sizes_bytes: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        """Returns the bytes of the message."""
        return sum(self.sizes_bytes)


@dataclass(frozen=True)
class Duty:
    """The part that a node has in a stripe, by the block that it gives or keeps."""

    block: CodedBlock
    receives: tuple[Hop, ...]
    sends: tuple[Hop, ...]
    multiplied_bytes: int
    """The bytes of products that it computes and adds up."""


@dataclass(frozen=True)
class NodeLoad:
    """The work of one node, over any number of routes."""

    sent_bytes: int = 0
    received_bytes: int = 0
    multiplied_bytes: int = 0
    messages: int = 0
    """The messages that it sends."""

    def __add__(self, other: NodeLoad) -> NodeLoad:
        return NodeLoad(
            self.sent_bytes + other.sent_bytes,
            self.received_bytes + other.received_bytes,
            self.multiplied_bytes + other.multiplied_bytes,
            self.messages + other.messages,
        )


@dataclass(frozen=True)
class Route:
    """One stripe's way. A duty stands behind those that it receives from."""

    duties: tuple[Duty, ...]

    def loads(self) -> dict[int, NodeLoad]:
        """Returns the work of each node. What a node gives to itself is no message."""
        made: dict[int, NodeLoad] = {}
        for duty in self.duties:
            sent = [hop.size_bytes for hop in duty.sends if hop.receiver.node != duty.block.node]
            received = [hop.size_bytes for hop in duty.receives if hop.sender.node != duty.block.node]
            load = NodeLoad(sum(sent), sum(received), duty.multiplied_bytes, len(sent))
            made[duty.block.node] = made.get(duty.block.node, NodeLoad()) + load
        return made


def pipeline(sources: Sequence[CodedBlock], targets: Sequence[CodedBlock]) -> Route:
    """Returns the route."""
    chain = _ascending(sources)
    hops = [_sums(sender, receiver, targets) for sender, receiver in pairwise(chain)]
    return _route(chain, targets, [*hops, *_delivered(chain[-1], targets)])


def total_loads(routes: Iterable[Route]) -> dict[int, NodeLoad]:
    """Returns the work of each node over many stripes."""
    made: dict[int, NodeLoad] = {}
    for route in routes:
        for node, load in route.loads().items():
            made[node] = made.get(node, NodeLoad()) + load
    return made


def _ascending(sources: Sequence[CodedBlock]) -> list[CodedBlock]:
    return sorted(sources, key=lambda block: (block.size_bytes, block.index))


def _sums(sender: CodedBlock, receiver: CodedBlock, targets: Sequence[CodedBlock]) -> Hop:
    sizes = tuple(min(sender.size_bytes, target.size_bytes) for target in targets)
    return Hop(sender, receiver, tuple(range(len(targets))), sizes)


def _delivered(last: CodedBlock, targets: Sequence[CodedBlock]) -> list[Hop]:
    return [Hop(last, target, (row,), (min(last.size_bytes, target.size_bytes),)) for row, target in enumerate(targets)]


def _route(sources: Sequence[CodedBlock], targets: Sequence[CodedBlock], hops: Sequence[Hop]) -> Route:
    return Route(tuple(_duty(block, block in targets, targets, hops) for block in (*sources, *targets)))


def _duty(block: CodedBlock, keeps: bool, targets: Sequence[CodedBlock], hops: Sequence[Hop]) -> Duty:
    receives = tuple(hop for hop in hops if hop.receiver == block)
    sends = tuple(hop for hop in hops if hop.sender == block)
    multiplied = 0 if keeps else sum(min(block.size_bytes, target.size_bytes) for target in targets)
    return Duty(block, receives, sends, multiplied)
