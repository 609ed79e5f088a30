"""Divides files that are larger than any node's budget among all nodes, by stripes. Pure, and the same on every node.

A stripe is kept by the node whose place among the nodes is what its number leaves when it is divided by how many they
are. That node reads it at the source. Beside its own stripes each node sets room aside for some of the others', which
come when they are needed and go again.
"""

from __future__ import annotations

from collections.abc import Sequence

from hpcstage.plan.blocks import BLOCK_BYTES, MOST_NODES, blocks_bytes, stripe_bytes, stripes_of
from hpcstage.plan.placement.owners import FreeBudgets

LEAST_DIVIDED_BYTES = 64 << 20
"""Smaller files are left at the source."""
MOST_DIVIDED = 8
"""The most files of a job that are divided: each takes a place among the files on their way for the whole run."""
WINDOW_BYTES, LEAST_WINDOW = 32 << 20, 8
"""The room for stripes of other nodes: so many bytes, or so many stripes where these are long."""


def window_stripes(length: int) -> int:
    """Returns how many stripes of other nodes a node has room for, by the bytes of a stripe."""
    return max(LEAST_WINDOW, WINDOW_BYTES // length)


def own_bytes(size_bytes: int, place: int, nodes: int) -> int:
    """Returns the bytes of a file's stripes that the node at this place keeps."""
    length, count = stripe_bytes(size_bytes), stripes_of(size_bytes)
    missing = count * length - size_bytes if (count - 1) % nodes == place else 0
    return len(range(place, count, nodes)) * length - missing


def room_bytes(size_bytes: int, place: int, nodes: int) -> int:
    """Returns the bytes that a node needs for its part of a file, in whole blocks."""
    length = stripe_bytes(size_bytes)
    return blocks_bytes(own_bytes(size_bytes, place, nodes)) + window_stripes(length) * length


def divide(sizes: Sequence[int], most_bytes: int, free: FreeBudgets) -> tuple[int, ...]:
    """Returns the ids of files that are larger than `most_bytes`, at most MOST_DIVIDED, of which every node has room
    for its part beside what it keeps whole, and takes that room."""
    nodes, least_bytes = len(free.blocks), max(LEAST_DIVIDED_BYTES, most_bytes + 1)
    found: list[int] = []
    if not 1 < nodes <= MOST_NODES or max(sizes, default=0) < least_bytes:
        return ()
    for file_id in (file_id for file_id, size in enumerate(sizes) if size >= least_bytes):
        needed = [room_bytes(sizes[file_id], place, nodes) // BLOCK_BYTES for place in range(nodes)]
        if all(free.has(node, blocks) for node, blocks in enumerate(needed)):
            for node, blocks in enumerate(needed):
                free.take(node, blocks)
            found.append(file_id)
        if len(found) == MOST_DIVIDED:
            break
    return tuple(found)
