"""Divides the bytes of a group's nodes into stripes, up to k data blocks of k nodes and m parities on m others, and
says how a stripe is encoded.

Every node's bytes stay where they are; only parities are stored besides. Nodes may have different amounts: where a node
has no block for a stripe, the block does not exist, and parities are as long as the longest block of their stripe.
Nothing is padded. Pure: every node computes the same from the sizes.

The nodes stand in a circle, and stripe s begins at node s: the first m nodes from there hold its parities, the next k
its data. In as many stripes as there are nodes, each node gives k blocks and holds m parities. A group may have more
than k + m nodes; any m of them may be lost.

A stripe is encoded by a chain: each node adds its block, times its coefficients, to the m sums that come from its
neighbour, and hands them on; the last one gives each sum to the node that keeps it. Blocks go in ascending order of
their sizes, so that sums are never longer than the block of the node that sends them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING

from hpcstage.checkpoint.coding.erasurecode import NoErasureCode, Row

if TYPE_CHECKING:
    from hpcstage.checkpoint.coding.kernels import Kernel


@dataclass(frozen=True)
class CodedBlock:
    """One block of a stripe."""

    index: int
    """Its number in the stripe: data from 0, parities from k."""
    node: int
    number: int
    """Its number on the node: among the node's data blocks, or among the parities that it holds."""
    size_bytes: int


@dataclass(frozen=True)
class Duty:
    """What the node of a block does in the stripe: adds the block to the sums that came and sends them on, or keeps the
    parity that came."""

    block: CodedBlock
    sender: CodedBlock | None
    """None: the node begins the sums."""
    receivers: tuple[CodedBlock, ...]
    """One gets all sums, several get one each; none: the node keeps a parity."""
    m: int

    @property
    def keeps(self) -> bool:
        """Whether the node keeps a parity."""
        return not self.receivers

    @property
    def received_bytes(self) -> int:
        """Returns the bytes of the message that comes."""
        return 0 if self.sender is None else self.sender.size_bytes * (1 if self.keeps else self.m)

    @property
    def sent_bytes(self) -> int:
        """Returns the bytes of each message that goes."""
        return self.block.size_bytes * self.m // len(self.receivers) if self.receivers else 0


@dataclass(frozen=True)
class Stripe:
    """The blocks of one stripe that exist, ascending by index."""

    number: int
    data: tuple[CodedBlock, ...]
    parities: tuple[CodedBlock, ...]

    @property
    def nodes(self) -> frozenset[int]:
        """Returns the nodes that have a part in the stripe."""
        return frozenset(block.node for block in (*self.data, *self.parities))

    def duties(self) -> Iterator[Duty]:
        """Gives the duties of all blocks, each behind the one that it receives from."""
        chain, m = sorted(self.data, key=lambda block: (block.size_bytes, block.index)), len(self.parities)
        for before, (block, after) in zip([None, *chain], pairwise(chain), strict=False):
            yield Duty(block, before, (after,), m)
        yield Duty(chain[-1], chain[-2] if len(chain) > 1 else None, self.parities, m)
        for parity in self.parities:
            yield Duty(parity, chain[-1], (), m)

    def duty(self, node: int) -> Duty | None:
        """Returns the duty of a node, which has one block of a stripe at most."""
        return next((duty for duty in self.duties() if duty.block.node == node), None)


@dataclass(frozen=True)
class Striping:
    """How the blocks of a group's nodes are put together. Nodes are numbered from 0, by their places in the group."""

    nodes: int
    k: int
    m: int
    block_bytes: int

    def __post_init__(self) -> None:
        if self.nodes < self.k + self.m or min(self.k, self.m, self.block_bytes) < 1:
            raise NoErasureCode(f"{self.k}+{self.m} blocks need at least as many nodes, not {self.nodes}")

    def count(self, sizes_bytes: Sequence[int]) -> int:
        """Returns the number after that of the last stripe of nodes that have so many bytes each."""
        if len(sizes_bytes) != self.nodes:
            raise ValueError(f"{self.nodes} nodes have so many sizes, not {len(sizes_bytes)}")
        last = ((node, -(-size // self.block_bytes) - 1) for node, size in enumerate(sizes_bytes) if size)
        return max((self.place(node, block)[0] + 1 for node, block in last), default=0)

    def stripes(self, sizes_bytes: Sequence[int]) -> Iterator[Stripe]:
        """Gives all stripes, ascending."""
        for number in range(self.count(sizes_bytes)):
            if stripe := self.stripe(number, sizes_bytes):
                yield stripe

    def stripe(self, number: int, sizes_bytes: Sequence[int]) -> Stripe | None:
        """Returns one stripe; None where no node has a block for it."""
        cycle, turn = divmod(number, self.nodes)
        data = []
        for index in range(self.k):
            node = (turn + self.m + index) % self.nodes
            block = cycle * self.k + self._turns[node].index(turn)
            size = min(self.block_bytes, sizes_bytes[node] - block * self.block_bytes)
            if size > 0:
                data.append(CodedBlock(index, node, block, size))
        if not data:
            return None
        longest = max(block.size_bytes for block in data)
        places = ((row, (turn + row) % self.nodes) for row in range(self.m))
        parities = (CodedBlock(self.k + row, node, cycle * self.m + row, longest) for row, node in places)
        return Stripe(number, tuple(data), tuple(parities))

    def place(self, node: int, block: int) -> tuple[int, int]:
        """Returns the stripe that a node's block belongs to, and its index there. It depends on no size: a node's bytes
        may grow without a block changing its place."""
        cycle, position = divmod(block, self.k)
        turn = self._turns[node][position]
        return cycle * self.nodes + turn, (node - turn - self.m) % self.nodes

    def parity_places(self, sizes_bytes: Sequence[int]) -> int:
        """Returns how many places for parities each node has; the numbers of those that it holds are lower."""
        return -(-self.count(sizes_bytes) // self.nodes) * self.m

    @cached_property
    def _turns(self) -> list[list[int]]:
        """By node: the stripes of a cycle in which it has data."""
        ahead = range(self.m, self.m + self.k)
        return [sorted((node - steps) % self.nodes for steps in ahead) for node in range(self.nodes)]


def summed(kernel: Kernel, column: Row, own: bytearray, before: bytearray | None, head_bytes: int = 0) -> bytearray:
    """Returns a message with a block, times its coefficients, added to the sums `before`, which came in such a message.

    A message has room for a head, then the sums one behind the other. One whose sums are as long as the block is
    changed and returned; sums that are shorter go on with zeros. None: the block begins the sums.
    """
    size, m = len(own), len(column)
    message = bytearray(head_bytes + m * size) if before is None or len(before) != head_bytes + m * size else before
    sums = _parts(message, head_bytes, size)
    if before is None:
        kernel.product(tuple((c,) for c in column), (own,), sums)
        return message
    if message is not before:
        for part, target in zip(_parts(before, head_bytes, (len(before) - head_bytes) // m), sums, strict=True):
            target[: len(part)] = part
    kernel.addition(column, own, sums)
    return message


def _parts(message: bytearray, start: int, size: int) -> list[memoryview]:
    return [memoryview(message)[at : at + size] for at in range(start, len(message), size)]
