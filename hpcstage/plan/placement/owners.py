"""Decides which node owns which id within the nodes' budgets: a table with a node for each id.

This module owns the arithmetic of budgets, in blocks and inodes. The table is the same on every node, as it follows
from sizes and budgets alone. It takes two bytes for each id.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heapreplace

from hpcstage.plan.blocks import BLOCK_BYTES, blocks_of
from hpcstage.plan.blocks import blocks as blocks_in
from hpcstage.plan.types import Budget

_MOST_TURNS = 1 << 16
"""The pattern of nodes is repeated at most so many times: with more it would take long to lay out."""
_SLOTS_PER_NODE, _MOST_SLOTS = 64, 1 << 16
"""The length of a pattern of unequal parts: it is as exact as one of so many slots can be."""
_MASK = (1 << 64) - 1
NOBODY = 0xFFFF
"""The owner of an id that fits on no node."""


def needed_bytes(sizes: Sequence[int]) -> int:
    """Returns the bytes that all files take on one disk."""
    return sum(blocks_of(sizes)) * BLOCK_BYTES


@dataclass
class FreeBudgets:
    """The free blocks and inodes of each node."""

    blocks: list[int]
    inodes: list[int]

    def has(self, node: int, blocks: int) -> bool:
        """Returns whether one more file of `blocks` blocks fits on a node."""
        return self.blocks[node] >= blocks and self.inodes[node] > 0

    def take(self, node: int, blocks: int) -> None:
        """Takes the blocks of a file, and an inode, of a node's free ones."""
        self.blocks[node] -= blocks
        self.inodes[node] -= 1


def free_budgets(budgets: Sequence[Budget]) -> FreeBudgets:
    """Makes the free blocks and inodes of nodes with these budgets."""
    return FreeBudgets([max(0, b.size_bytes) // BLOCK_BYTES for b in budgets], [max(0, b.inodes) for b in budgets])


def equal(files: int, nodes: int) -> array[int]:
    """Deals the ids below `files` to the nodes in equal parts, neighbours to different ones."""
    rounds = max(1, -(-files // (nodes * _MOST_TURNS)))
    return _dealt(files, [node for number in range(rounds) for node in _shuffled(range(nodes), _mixed(number, 1))])


def dealt_within(sizes: Sequence[int], free: FreeBudgets) -> array[int]:
    """Deals all ids so that no node gets more than fits; `free` then holds what is still free.

    Ids beyond a node's budget go to the node with most room; those without room on any are NOBODY's.
    """
    needed, room = sum(blocks_of(sizes)), sum(free.blocks)
    owners, homeless = _parts(len(sizes), needed, free), array("I")
    for file_id, blocks in enumerate(blocks_of(sizes)):
        node = owners[file_id]
        if free.has(node, blocks):
            free.take(node, blocks)
        else:
            owners[file_id] = NOBODY
            homeless.append(file_id)
    # Largest first, as then all find room where there is enough; where there is not, the first come first.
    waiting = sorted(homeless, key=lambda file_id: -sizes[file_id]) if needed <= room else homeless
    heap = [(-blocks, node) for node, blocks in enumerate(free.blocks) if free.inodes[node] > 0]
    heapify(heap)
    for file_id in waiting:
        if not heap:
            break
        blocks, (most, node) = blocks_in(sizes[file_id]), heap[0]
        if -most < blocks:
            continue
        free.take(node, blocks)
        owners[file_id] = node
        if free.inodes[node] > 0:
            heapreplace(heap, (-free.blocks[node], node))
        else:
            heappop(heap)
    return owners


def _parts(files: int, needed: int, free: FreeBudgets) -> array[int]:
    """Deals equal parts where they fit; else smaller nodes get what they can hold, and the others more."""
    typical = max(1, needed // max(1, files))
    caps = [min(blocks, inodes * typical) for blocks, inodes in zip(free.blocks, free.inodes, strict=True)]
    level = _level(caps, needed)
    weights = [min(cap, level) for cap in caps]
    if min(caps) >= level or not any(weights):
        return equal(files, len(caps))
    wanted = max(len(caps), min(_SLOTS_PER_NODE * len(caps), _MOST_SLOTS))
    parts = [wanted * weight // sum(weights) for weight in weights]
    # The slots that rounding leaves go to the largest nodes, for which one more matters least.
    for node in sorted(range(len(caps)), key=lambda n: -weights[n])[: wanted - sum(parts)]:
        parts[node] += 1
    return _dealt(files, _shuffled([node for node, part in enumerate(parts) for _ in range(part)], _mixed(0, 1)))


def _level(caps: Sequence[int], needed: int) -> int:
    """Returns the size of an equal part at which all nodes hold everything, where smaller nodes are filled.

    It is at most the size of the largest node.
    """
    left = needed
    for index, cap in enumerate(sorted(caps)):
        part = -(-left // (len(caps) - index))
        if cap >= part:
            return part
        left -= cap
    return max(caps)


def _dealt(files: int, pattern: Sequence[int]) -> array[int]:
    """Repeats a pattern of nodes, turned differently each time: what repeats in the list must not fall to one node."""
    span, twice = len(pattern), array("H", [*pattern, *pattern])
    owners = array("H")
    for number in range(-(-files // span)):
        turn = _mixed(number, 0) % span
        owners.extend(twice[turn : turn + span])
    del owners[files:]
    return owners


def _shuffled(nodes: Sequence[int], seed: int) -> list[int]:
    # The random module is not used: its shuffle may change between versions of Python, and nodes must agree.
    items = list(nodes)
    for last in range(len(items) - 1, 0, -1):
        other = _mixed(last, seed) % (last + 1)
        items[last], items[other] = items[other], items[last]
    return items


def _mixed(number: int, seed: int) -> int:
    """Returns a well mixed 64-bit number (the finaliser of splitmix64)."""
    value = (number * 0x9E3779B97F4A7C15 + seed * 0xD1B54A32D192ED03 + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ value >> 30) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ value >> 27) * 0x94D049BB133111EB) & _MASK
    return value ^ value >> 31
