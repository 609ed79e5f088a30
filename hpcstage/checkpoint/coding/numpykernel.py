"""The kernel where ISA-L is missing: XOR and doubling of whole arrays by numpy.

A sum of products is evaluated as a number is from its digits: from the highest bit of the coefficients down, the sum
is doubled, and the sources whose coefficient has that bit are added. Each doubling serves all sources at once. Elements
are signed bytes: numpy's SIMD loops work on them as fast as on 64-bit words, a shift to the right gives the mask of the
bytes that overflow, and neither the address nor the size of a block matters.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from hpcstage.checkpoint.coding.blocks import Block, Operation, operands
from hpcstage.checkpoint.coding.field import POLYNOMIAL, Row, Rows

SignedBytes = npt.NDArray[np.int8]
Plan = tuple[tuple[int, ...], ...]
_MOST_PIECE_BYTES, _LEAST_PIECE_BYTES = 64 << 10, 16 << 10
_CACHE_BYTES = 768 << 10
"""A piece of each block has to fit into a processor's own cache together with the others."""
_SEVEN, _REDUCER = np.int8(7), np.int8(POLYNOMIAL & 0xFF)


class NumpyKernel:
    """See the module."""

    name = "numpy"

    def product(self, rows: Rows, sources: Sequence[Block], targets: Sequence[Block]) -> Operation:
        """Returns what sets each target i to the sum of `rows[i][j]` times source j."""
        read, written = _signed(*operands(rows, sources, targets))
        plans = [_plan(row) for row in rows]

        def work(pieces: list[SignedBytes], scratch: SignedBytes) -> None:
            for plan, target in zip(plans, pieces[len(read) :], strict=True):
                _sum(plan, pieces, target, scratch)

        return _by_pieces(work, [*read, *written])

    def addition(self, column: Row, source: Block, targets: Sequence[Block]) -> Operation:
        """Returns what adds `column[i]` times the source to each target i."""
        (read,), written = _signed(*operands(tuple((c,) for c in column), (source,), targets))
        top = max(c.bit_length() for c in column)
        power = np.empty(_piece_bytes(1 + len(written)), np.int8)

        def work(pieces: list[SignedBytes], scratch: SignedBytes) -> None:
            multiple = pieces[0]
            for bit in range(top):
                for c, target in zip(column, pieces[1:], strict=True):
                    if c >> bit & 1:
                        np.bitwise_xor(target, multiple, target)
                if bit + 1 < top:
                    multiple = _double(multiple, power[: len(scratch)], scratch)

        return _by_pieces(work, [read, *written])


def _by_pieces(work: Callable[[list[SignedBytes], SignedBytes], None], blocks: Sequence[SignedBytes]) -> Operation:
    size, step = len(blocks[0]), _piece_bytes(len(blocks))
    scratch = np.empty(min(step, size), np.int8)

    def run() -> None:
        for start in range(0, size, step):
            end = min(start + step, size)
            work([block[start:end] for block in blocks], scratch[: end - start])

    return run


def _piece_bytes(blocks: int) -> int:
    """Returns how much of each block is worked on at once; a power of two, so that pieces of aligned blocks are."""
    fitting = 1 << (_CACHE_BYTES // (blocks + 1)).bit_length() - 1
    return max(_LEAST_PIECE_BYTES, min(_MOST_PIECE_BYTES, fitting))


@functools.lru_cache(maxsize=1024)
def _plan(row: Row) -> Plan:
    """Returns for each bit, from the highest that occurs, the sources whose coefficient has it."""
    top = max((c.bit_length() for c in row), default=0)
    return tuple(tuple(j for j, c in enumerate(row) if c >> bit & 1) for bit in reversed(range(top)))


def _sum(plan: Plan, pieces: list[SignedBytes], target: SignedBytes, scratch: SignedBytes) -> None:
    if not plan:
        target.fill(0)
    for number, chosen in enumerate(plan):
        others: Iterator[int] = iter(chosen)
        if number:
            _double(target, target, scratch)
        elif len(chosen) == 1:
            np.copyto(target, pieces[next(others)])
        else:
            np.bitwise_xor(pieces[next(others)], pieces[next(others)], target)
        for source in others:
            np.bitwise_xor(target, pieces[source], target)


def _double(values: SignedBytes, target: SignedBytes, scratch: SignedBytes) -> SignedBytes:
    """Sets the target to twice the values, and returns it; they may be the same array."""
    np.right_shift(values, _SEVEN, scratch)
    np.bitwise_and(scratch, _REDUCER, scratch)
    np.add(values, values, target)
    return np.bitwise_xor(target, scratch, target)


def _signed(*groups: Sequence[npt.NDArray[np.uint8]]) -> Iterator[list[SignedBytes]]:
    for blocks in groups:
        yield [block.view(np.int8) for block in blocks]
