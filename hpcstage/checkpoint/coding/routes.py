"""The ways that the blocks of a stripe go between its nodes: who sends what to whom, computes what and keeps what.

Three forms with the same result, and the same bytes between the nodes in total: the size of each data block times the
number of parities. They differ in how many of these bytes meet at one node, and in how many steps lie between the first
block and the last.

    pipeline   a chain: each node adds its block, times its coefficients, to the sums that come from its neighbour, and
               hands them on; the last one gives each sum to the node that keeps it
    broadcast  each node sends its block to every node that keeps a parity, which computes its own
    fan-in     a binary tree: each node adds the sums of two others to its own

The same routes restore: sources are then the blocks that survived, targets the lost ones. Blocks go in ascending order
of their sizes, so that the sums are never longer than the block of the node that sends them. Pure: bytes are counted
here, moved elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from hpcstage.checkpoint.coding.stripes import CodedBlock


@dataclass(frozen=True)
class Hop:
    """One message: sums for the targets `rows`, `sizes_bytes` of each, or the sender's own block, if there are none."""

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
    added_bytes: int
    """The bytes of sums that it adds to other sums besides."""


@dataclass(frozen=True)
class NodeLoad:
    """The work of one node, over any number of routes."""

    sent_bytes: int = 0
    received_bytes: int = 0
    multiplied_bytes: int = 0
    added_bytes: int = 0
    messages: int = 0
    """The messages that it sends."""

    def __add__(self, other: NodeLoad) -> NodeLoad:
        return NodeLoad(
            self.sent_bytes + other.sent_bytes,
            self.received_bytes + other.received_bytes,
            self.multiplied_bytes + other.multiplied_bytes,
            self.added_bytes + other.added_bytes,
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
            load = NodeLoad(sum(sent), sum(received), duty.multiplied_bytes, duty.added_bytes, len(sent))
            made[duty.block.node] = made.get(duty.block.node, NodeLoad()) + load
        return made

    @property
    def steps(self) -> int:
        """Returns how many messages follow one another at most."""
        depths: dict[CodedBlock, int] = {}
        for duty in self.duties:
            depths[duty.block] = max((depths[hop.sender] + 1 for hop in duty.receives), default=0)
        return max(depths.values(), default=0)


Form = Callable[[Sequence[CodedBlock], Sequence[CodedBlock]], Route]


def pipeline(sources: Sequence[CodedBlock], targets: Sequence[CodedBlock]) -> Route:
    """Returns the route of a chain."""
    chain = _ascending(sources)
    hops = [_sums(sender, receiver, targets) for sender, receiver in pairwise(chain)]
    return _route(chain, targets, [*hops, *_delivered(chain[-1], targets)])


def fan_in(sources: Sequence[CodedBlock], targets: Sequence[CodedBlock]) -> Route:
    """Returns the route of a binary tree, whose root gives the sums to the targets."""
    tree = _ascending(sources)
    tree.reverse()
    hops = [_sums(tree[child], tree[(child - 1) // 2], targets) for child in range(len(tree) - 1, 0, -1)]
    return _route(tree[::-1], targets, [*hops, *_delivered(tree[0], targets)])


def broadcast(sources: Sequence[CodedBlock], targets: Sequence[CodedBlock]) -> Route:
    """Returns the route of blocks that go to every target as they are."""
    order = _ascending(sources)
    hops = [
        Hop(source, target, (), (min(source.size_bytes, target.size_bytes),)) for source in order for target in targets
    ]
    return _route(order, targets, hops)


FORMS: dict[str, Form] = {"pipeline": pipeline, "broadcast": broadcast, "fan-in": fan_in}


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
    if keeps:
        multiplied = sum(hop.size_bytes for hop in receives if not hop.rows)
        return Duty(block, receives, sends, multiplied, 0)
    codes = any(hop.rows for hop in sends)
    multiplied = sum(min(block.size_bytes, target.size_bytes) for target in targets) if codes else 0
    return Duty(block, receives, sends, multiplied, sum(hop.size_bytes for hop in receives[1:]))
