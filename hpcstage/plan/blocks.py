"""Counts the blocks that files take on a local disk, and the stripes in which large files come. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import repeat
from operator import add, floordiv

BLOCK_BYTES = 4096
LARGE_BYTES = 16 << 20
"""Larger files come in stripes, by several threads."""
LEAST_STRIPE_BYTES = 1 << 20
MOST_STRIPES = 16384
"""The most stripes of a file."""


def blocks(size_bytes: int) -> int:
    """Returns the number of whole blocks of a file of this size."""
    return -(-size_bytes // BLOCK_BYTES)


def blocks_bytes(size_bytes: int) -> int:
    """Returns the bytes of these blocks."""
    return -(-size_bytes // BLOCK_BYTES) * BLOCK_BYTES


def blocks_of(sizes: Iterable[int]) -> Iterable[int]:
    """Gives `blocks` of each size, without a loop of Python's."""
    return map(floordiv, map(add, sizes, repeat(BLOCK_BYTES - 1)), repeat(BLOCK_BYTES))


def stripe_bytes(size_bytes: int) -> int:
    """Returns the bytes of a stripe of a file of this size: a power of two."""
    length = LEAST_STRIPE_BYTES
    while length * MOST_STRIPES < size_bytes:
        length *= 2
    return length
