"""Divides the bytes of a group's nodes into stripes: up to k data blocks of k nodes, and m parities on m others.

Every node's bytes stay where they are; only parities are stored besides. Nodes may have different amounts: where a node
has no block for a stripe, the block does not exist, and parities are as long as the longest block of their stripe.
Nothing is padded. Pure: every node computes the same from the sizes.

The nodes stand in a circle, and stripe s begins at node s: the first m nodes from there hold its parities, the next k
its data. In as many stripes as there are nodes, each node gives k blocks and holds m parities. A group may have more
than k + m nodes; any m of them may be lost.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from hpcstage.checkpoint.coding.erasurecode import NoErasureCode


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
class Stripe:
    """The blocks of one stripe that exist, ascending by index."""

    number: int
    data: tuple[CodedBlock, ...]
    parities: tuple[CodedBlock, ...]

    @property
    def nodes(self) -> frozenset[int]:
        """Returns the nodes that have a part in the stripe."""
        return frozenset(block.node for block in (*self.data, *self.parities))


@dataclass(frozen=True)
class Striping:
    """How the blocks of a group's nodes are put together. Nodes are numbered from 0, by their places in the group."""

    nodes: int
    k: int
    m: int
    block_bytes: int
    rotated: bool = True
    """False: the first m nodes hold all parities and have no data, as in the paper; figures compare the two."""

    def __post_init__(self) -> None:
        if self.nodes < self.k + self.m or min(self.k, self.m, self.block_bytes) < 1:
            raise NoErasureCode(f"{self.k}+{self.m} blocks need at least as many nodes, not {self.nodes}")

    def stripes(self, sizes_bytes: Sequence[int]) -> Iterator[Stripe]:
        """Gives all stripes of nodes that have so many bytes each, ascending."""
        for number in range(self._last(sizes_bytes) + 1):
            if stripe := self.stripe(number, sizes_bytes):
                yield stripe

    def count(self, sizes_bytes: Sequence[int]) -> int:
        """Returns the number after that of the last stripe."""
        return self._last(sizes_bytes) + 1

    def changed(self, sizes_bytes: Sequence[int], blocks: Sequence[Collection[int]]) -> Iterator[Stripe]:
        """Gives the stripes of an increment, ascending, with the data blocks that changed and no others.

        `blocks` are each node's changed ones. `sizes_bytes` are those before or after, whichever is larger: to the
        parities, a block that grew had zeros there, and one that shrank has.
        """
        places = (self.place(node, block)[0] for node, numbers in enumerate(blocks) for block in numbers)
        chosen = [frozenset(numbers) for numbers in blocks]
        for number in sorted(set(places)):
            stripe = self.stripe(number, sizes_bytes)
            if stripe and (data := [block for block in stripe.data if block.number in chosen[block.node]]):
                yield self._of(number, data)

    def stripe(self, number: int, sizes_bytes: Sequence[int]) -> Stripe | None:
        """Returns one stripe; None where no node has a block for it."""
        cycle, turn = divmod(number, self._period)
        data = []
        for index in range(self.k):
            node = (turn + self.m + index) % self.nodes
            turns = self._turns(node)
            block = cycle * len(turns) + turns.index(turn)
            size = min(self.block_bytes, sizes_bytes[node] - block * self.block_bytes)
            if size > 0:
                data.append(CodedBlock(index, node, block, size))
        return self._of(number, data) if data else None

    def place(self, node: int, block: int) -> tuple[int, int]:
        """Returns the stripe that a node's block belongs to, and its index there. It depends on no size: a node's bytes
        may grow without a block changing its place."""
        turns = self._turns(node)
        cycle, position = divmod(block, len(turns))
        return cycle * self._period + turns[position], (node - turns[position] - self.m) % self.nodes

    def parity_bytes(self, sizes_bytes: Sequence[int]) -> list[int]:
        """Returns how many bytes of parities each node holds."""
        held = [0] * self.nodes
        for stripe in self.stripes(sizes_bytes):
            for parity in stripe.parities:
                held[parity.node] += parity.size_bytes
        return held

    def parity_places(self, sizes_bytes: Sequence[int]) -> list[int]:
        """Returns how many places for parities each node has; the numbers of those that it holds are lower."""
        last = self._last(sizes_bytes)
        if not self.rotated:
            return [last + 1 if node < self.m else 0 for node in range(self.nodes)]
        return [self._parity_places(node, last) for node in range(self.nodes)]

    def _parity_places(self, node: int, last: int) -> int:
        turns = enumerate((node - row) % self.nodes for row in range(self.m))
        numbers = [(last - turn) // self.nodes * self.m + row for row, turn in turns if turn <= last]
        return max(numbers, default=-1) + 1

    def _last(self, sizes_bytes: Sequence[int]) -> int:
        """Returns the number of the last stripe; -1 where there is none."""
        return max((self.place(node, count - 1)[0] for node, count in self._counts(sizes_bytes) if count), default=-1)

    def _of(self, number: int, data: Sequence[CodedBlock]) -> Stripe:
        cycle, turn = divmod(number, self._period)
        size, each = max(block.size_bytes for block in data), self.m if self.rotated else 1
        parities = (
            CodedBlock(self.k + row, (turn + row) % self.nodes, cycle * each + (row if self.rotated else 0), size)
            for row in range(self.m)
        )
        return Stripe(number, tuple(data), tuple(parities))

    @property
    def _period(self) -> int:
        return self.nodes if self.rotated else 1

    def _counts(self, sizes_bytes: Sequence[int]) -> Iterable[tuple[int, int]]:
        if len(sizes_bytes) != self.nodes:
            raise ValueError(f"{self.nodes} nodes have so many sizes, not {len(sizes_bytes)}")
        return enumerate(-(-size // self.block_bytes) for size in sizes_bytes)

    def _turns(self, node: int) -> tuple[int, ...]:
        """Returns the stripes of a cycle in which a node has data."""
        turns = _turns(self, node)
        if not turns:
            raise ValueError(f"node {node} holds parities only and has no data")
        return turns


@lru_cache(maxsize=1024)
def _turns(striping: Striping, node: int) -> tuple[int, ...]:
    ahead = range(striping.m, striping.m + striping.k)
    period = striping.nodes if striping.rotated else 1
    return tuple(turn for turn in range(period) if (node - turn) % striping.nodes in ahead)
