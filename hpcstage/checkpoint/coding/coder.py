"""The coder of one erasure code: encodes stripes, adds one block to parities, restores what was lost.

Owns what blocks of unequal sizes mean: a block that ends earlier than others goes on with zeros, which cost nothing.
Nothing is copied: blocks are whatever has contiguous bytes (memoryviews of mapped files, buffers, arrays).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from hpcstage.checkpoint.coding.blocks import MOST_BYTES, Block, Bytes, Kernel, Operation, nothing, seen
from hpcstage.checkpoint.coding.erasurecode import ErasureCode
from hpcstage.checkpoint.coding.field import Row, Rows


@dataclass(frozen=True)
class Coder:
    """A code and the kernel that computes it. Its methods return operations: see `blocks`."""

    code: ErasureCode
    kernel: Kernel

    def encoding(self, data: Mapping[int, Block], parities: Sequence[Block]) -> Operation:
        """Returns what computes the parities of a stripe from the data blocks that exist, by their numbers.

        Raises a ValueError unless there are as many parities as the code has, each as long as the longest data block.
        """
        if len(parities) != self.code.m or not data.keys() <= set(range(self.code.k)):
            raise ValueError("a stripe has the data blocks and as many parities as its code")
        longest = max((len(seen(block)) for block in data.values()), default=0)
        if any(len(seen(parity)) < longest for parity in parities):
            raise ValueError("a parity is as long as the longest data block, at least")
        whole = list(data) == list(range(self.code.k))
        rows = self.code.rows if whole else tuple(tuple(row[block] for block in data) for row in self.code.rows)
        return self.combining(rows, list(data.values()), parities)

    def restoring(self, known: Mapping[int, Block], lost: Mapping[int, Block]) -> Operation:
        """Returns what computes lost blocks from those that are known, by their numbers in the stripe.

        All other data blocks do not exist. A lost block's target has the size that the block had. Raises TooMuchLost.
        """
        absent = set(range(self.code.k)) - known.keys() - lost.keys()
        missing = set(range(self.code.k, self.code.k + self.code.m)) - known.keys() - lost.keys()
        found = self.code.restoring(lost.keys() | missing, absent)
        rows = [row for block, row in zip(found.lost, found.rows, strict=True) if block in lost]
        targets = [lost[block] for block in found.lost if block in lost]
        return self.combining(tuple(rows), [known[block] for block in found.sources], targets)

    def combining(self, rows: Rows, sources: Sequence[Block], targets: Sequence[Block]) -> Operation:
        """Returns what sets each target i to the sum of `rows[i][j]` times source j, up to the target's end."""
        read, written = list(map(seen, sources)), list(map(seen, targets))
        sizes = {*map(len, read), *map(len, written)}
        if read and written and len(sizes) == 1 and max(sizes) <= MOST_BYTES:
            return self.kernel.product(rows, read, written)
        operations = []
        for start, end in _segments(sizes):
            columns, lines = _reaching(read, end), _reaching(written, end)
            outputs = [written[i][start:end] for i in lines]
            if columns and lines:
                part = tuple(tuple(rows[i][j] for j in columns) for i in lines)
                operations.append(self.kernel.product(part, [read[j][start:end] for j in columns], outputs))
            elif lines:
                operations.append(_zeroing(outputs))
        return _in_order(operations)

    def contributing(self, column: Row, block: Block, sums: Sequence[Block], summed_bytes: int) -> Operation:
        """Returns what adds a block, times `column[i]`, to each sum i: one stage of a chain, or the parities' update.

        The first `summed_bytes` of the sums are added to. What the block has beyond that starts the sums there, so that
        the first node of a chain needs no zeros: it has 0 of them. No sum is shorter than the block.
        """
        source, totals = seen(block), list(map(seen, sums))
        if any(len(total) < len(source) for total in totals):
            raise ValueError("a sum is as long as the block that is added, at least")
        operations = []
        for start, end in _segments([min(summed_bytes, len(source)), len(source)]):
            outputs = [total[start:end] for total in totals]
            if end <= summed_bytes:
                operations.append(self.kernel.addition(column, source[start:end], outputs))
            else:
                operations.append(self.kernel.product(tuple((c,) for c in column), (source[start:end],), outputs))
        return _in_order(operations)


def _segments(sizes_bytes: Collection[int]) -> Iterator[tuple[int, int]]:
    """Cuts at each size that occurs, so that a block reaches through a segment or not at all; none is too long."""
    for start, end in pairwise(sorted({0, *sizes_bytes})):
        for cut in range(start, end, MOST_BYTES):
            yield cut, min(cut + MOST_BYTES, end)


def _reaching(blocks: Sequence[Bytes], end: int) -> list[int]:
    return [number for number, block in enumerate(blocks) if len(block) >= end]


def _zeroing(blocks: Sequence[Bytes]) -> Operation:
    def run() -> None:
        for block in blocks:
            block.fill(0)

    return run


def _in_order(operations: Sequence[Operation]) -> Operation:
    if len(operations) == 1:
        return operations[0]

    def run() -> None:
        for operation in operations:
            operation()

    return run if operations else nothing
