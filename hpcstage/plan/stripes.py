"""Says how long the stripes are in which large files come, and by which a file is divided among nodes. Pure."""

from __future__ import annotations

LEAST_BYTES = 1 << 20
MOST = 16384
"""The most stripes of a file."""
MOST_NODES = 512
"""The most nodes among which stripes are divided."""


def stripe_bytes(size_bytes: int) -> int:
    """Returns the bytes of a stripe of a file of this size: a power of two."""
    length = LEAST_BYTES
    while length * MOST < size_bytes:
        length *= 2
    return length


def stripes_of(size_bytes: int) -> int:
    """Returns the number of stripes of a file of this size."""
    return max(1, -(-size_bytes // stripe_bytes(size_bytes)))
