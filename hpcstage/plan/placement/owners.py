"""Decides which node owns which id within the nodes' budgets: ids that a deal puts on a full node go to others.

This module owns the arithmetic of budgets, in blocks and inodes, and the list of exceptions to a deal. The result is
the same on every node, as it follows from sizes, budgets and the deal alone.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heapreplace
from itertools import accumulate
from operator import add, le

from hpcstage.plan.blocks import BLOCK_BYTES, blocks_of
from hpcstage.plan.blocks import blocks as blocks_in
from hpcstage.plan.types import Budget

_MOST_BLOCKS = 1 << 16
_MOST_SLOTS = 1 << 16
_SLOTS_PER_NODE = 64
_PARTS = 256
_MASK = (1 << 64) - 1
NOBODY = 0xFFFF
"""The owner of an id that fits on no node."""


class Deal:
    """Divides the ids below `files` among nodes, in equal or weighted parts."""

    def __init__(self, files: int, slots: array[int], nodes: int) -> None:
        """Only `equal` and `weighted` call this; `slots` holds the node of each slot."""
        self.files = files
        self.nodes = nodes
        self._span = len(slots)
        self._slots = slots + slots
        count = -(-files // self._span)
        self._turns = array("I", (_mixed(block, 0) % self._span for block in range(count)))

    def owner(self, file_id: int) -> int:
        """Returns the node that an id is dealt to."""
        block, position = divmod(file_id, self._span)
        return self._slots[position + self._turns[block]]

    def ids_of(self, node: int) -> array[int]:
        """Returns the ids that a node is dealt, ascending, in a time that grows with their number."""
        span, turns = self._span, self._turns
        firsts = range(0, len(turns) * span, span)
        found: list[int] = []
        for mine in (slot for slot in range(span) if self._slots[slot] == node):
            found += [first + (mine - turn) % span for first, turn in zip(firsts, turns, strict=True)]
        found.sort()
        while found and found[-1] >= self.files:
            found.pop()
        return array("I", found)

    def sums(self, values: Sequence[int]) -> list[int]:
        """Returns per node the sum of its ids' values; `values` are those of the first ids."""
        by_slot = [0] * self._span
        for block in range(-(-len(values) // self._span)):
            by_slot = self._added(by_slot, block, values)
        return self._by_node(by_slot)

    def common_end(self, values: Sequence[int], counts: Sequence[int], limits: Sequence[int]) -> int:
        """Returns how many of the first ids can be dealt so that no node exceeds its limit of values or its count.

        The result is a whole number of blocks, at most one of _PARTS parts less than the largest possible.
        """
        blocks = self.files // self._span
        by_slot, step = [0] * self._span, max(1, blocks // _PARTS)
        per_block = self._by_node([1] * self._span)
        for block in range(blocks):
            by_slot = self._added(by_slot, block, values)
            if (block + 1) % step == 0 and not (
                all(map(le, self._by_node(by_slot), limits))
                and all(each * (block + 1) <= count for each, count in zip(per_block, counts, strict=True))
            ):
                return (block + 1 - step) * self._span
        return blocks // step * step * self._span

    def _added(self, by_slot: list[int], block: int, values: Sequence[int]) -> list[int]:
        span = self._span
        part = list(values[block * span : (block + 1) * span])
        part += [0] * (span - len(part))
        at = span - self._turns[block]
        return list(map(add, by_slot, part[at:] + part[:at]))

    def counts(self, end: int) -> list[int]:
        """Returns per node how many of the first `end` ids it is dealt."""
        whole = end // self._span
        by_slot = [whole] * self._span
        for file_id in range(whole * self._span, end):
            by_slot[(file_id % self._span + self._turns[whole]) % self._span] += 1
        return self._by_node(by_slot)

    def _by_node(self, by_slot: list[int]) -> list[int]:
        total = [0] * self.nodes
        for slot, value in enumerate(by_slot):
            total[self._slots[slot]] += value
        return total


def equal(files: int, nodes: int) -> Deal:
    """Makes a deal in which every node gets equally many ids of each whole block."""
    rounds = max(1, -(-files // (nodes * _MOST_BLOCKS)))
    slots = array("H")
    for number in range(rounds):
        slots.extend(_shuffled(list(range(nodes)), _mixed(number, 1)))
    return Deal(files, slots, nodes)


def weighted(files: int, weights: Sequence[int]) -> Deal:
    """Makes a deal in which every node gets ids in proportion to its weight; a node of weight 0 gets none."""
    nodes, total = len(weights), sum(weights)
    if not total:
        return equal(files, nodes)
    wanted = max(nodes, min(_SLOTS_PER_NODE * nodes, _MOST_SLOTS))
    parts = [wanted * weight // total for weight in weights]
    # The slots that rounding leaves go to the largest nodes, for which one more matters least.
    largest = sorted(range(nodes), key=lambda n: (-weights[n], n))
    for node in largest[: wanted - sum(parts)]:
        parts[node] += 1
    slots = [node for node, part in enumerate(parts) for _ in range(part)]
    return Deal(files, array("H", _shuffled(slots, _mixed(0, 1))), nodes)


def _shuffled(items: list[int], seed: int) -> list[int]:
    # The random module is not used: its shuffle may change between versions of Python, and nodes must agree.
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


@dataclass
class FreeBudgets:
    """The free blocks and inodes of each node."""

    blocks: list[int]
    inodes: list[int]

    def has(self, node: int, blocks: int) -> bool:
        """Returns whether one more file of `blocks` blocks fits on a node."""
        return self.blocks[node] >= blocks and self.inodes[node] > 0

    def take(self, node: int, blocks: int, inodes: int = 1) -> None:
        """Takes blocks and inodes of a node's free ones."""
        self.blocks[node] -= blocks
        self.inodes[node] -= inodes

    def fill(self, ids: Sequence[int], sizes: Sequence[int]) -> tuple[array[int], array[int]]:
        """Gives each id to the node with most free blocks; returns the ids that fit, in order, and their nodes."""
        heap = [(-blocks, node) for node, blocks in enumerate(self.blocks) if self.inodes[node] > 0]
        heapify(heap)
        smallest = blocks_in(min(map(sizes.__getitem__, ids), default=0))
        given, nodes = array("I"), array("H")
        for file_id in ids:
            if not heap or -heap[0][0] < smallest:
                break
            needed = blocks_in(sizes[file_id])
            if -heap[0][0] < needed:
                continue
            node = heap[0][1]
            self.take(node, needed)
            if self.inodes[node] > 0:
                heapreplace(heap, (-self.blocks[node], node))
            else:
                heappop(heap)
            given.append(file_id)
            nodes.append(node)
        return given, nodes


class Dealt:
    """A deal of the first ids, and exceptions to it. An exception takes six bytes, and there is a bit for every id."""

    def __init__(self, deal: Deal, end: int, moved: array[int], to: array[int]) -> None:
        """The deal holds for ids below `end`, except for those in `moved`.

        `moved` holds ids, ascending, on either side of `end`; `to` holds the node of each, or NOBODY.
        """
        self._deal, self._end = deal, end
        self._ids, self._to = moved, to
        self._odd = bytearray(deal.files // 8 + 1 if moved else 0)
        for file_id in self._ids:
            self._odd[file_id >> 3] |= 1 << (file_id & 7)

    def owner(self, file_id: int) -> int:
        """Returns the owner of an id, or NOBODY."""
        if self._odd and self._is_odd(file_id):
            return self._to[bisect_left(self._ids, file_id)]
        return self._deal.owner(file_id) if file_id < self._end else NOBODY

    def ids_of(self, node: int) -> array[int]:
        """Returns the ids that a node owns, ascending."""
        found = self._deal.ids_of(node)
        found = found[: bisect_left(found, self._end)]
        if not self._odd:
            return found
        kept = [file_id for file_id in found if not self._is_odd(file_id)]
        kept += [file_id for file_id, to in zip(self._ids, self._to, strict=True) if to == node]
        return array("I", sorted(kept))

    def totals(self, sizes: Sequence[int]) -> list[tuple[int, int]]:
        """Returns per node how many files it owns, and their bytes."""
        counts, total = self._deal.counts(self._end), self._deal.sums(sizes[: self._end])
        for file_id, to in zip(self._ids, self._to, strict=True):
            if file_id < self._end:
                before = self._deal.owner(file_id)
                counts[before] -= 1
                total[before] -= sizes[file_id]
            if to != NOBODY:
                counts[to] += 1
                total[to] += sizes[file_id]
        return list(zip(counts, total, strict=True))

    def _is_odd(self, file_id: int) -> int:
        return self._odd[file_id >> 3] >> (file_id & 7) & 1


def needed_bytes(sizes: Sequence[int]) -> int:
    """Returns the bytes that all files take on one disk."""
    return sum(blocks_of(sizes)) * BLOCK_BYTES


def free_budgets(budgets: Sequence[Budget]) -> FreeBudgets:
    """Makes the free blocks and inodes of nodes with these budgets."""
    return FreeBudgets([max(0, b.size_bytes) // BLOCK_BYTES for b in budgets], [max(0, b.inodes) for b in budgets])


def dealt_within(sizes: Sequence[int], free: FreeBudgets) -> Dealt:
    """Deals all ids so that no node gets more than fits; `free` then holds what is still free."""
    needed = sum(blocks_of(sizes))
    deal = _deal(len(sizes), needed, free)
    if needed <= sum(free.blocks) and len(sizes) <= sum(free.inodes):
        return _all_dealt(deal, sizes, free)
    return _first_dealt(deal, sizes, free)


def _all_dealt(deal: Deal, sizes: Sequence[int], free: FreeBudgets) -> Dealt:
    """Deals all ids where all nodes together can hold them; ids beyond a node's budget go to others, largest first."""
    blocks, counts = deal.sums(_Blocks(sizes)), deal.counts(len(sizes))
    homeless: list[int] = []
    for node in range(deal.nodes):
        if blocks[node] <= free.blocks[node] and counts[node] <= free.inodes[node]:
            free.take(node, blocks[node], counts[node])
        else:
            homeless += _surplus(deal.ids_of(node), sizes, free, node)
    homeless.sort(key=lambda file_id: (-sizes[file_id], file_id))
    found = dict.fromkeys(homeless, NOBODY)
    found.update(zip(*free.fill(homeless, sizes), strict=True))
    ids = array("I", sorted(homeless))
    return Dealt(deal, len(sizes), ids, array("H", map(found.__getitem__, ids)))


def _first_dealt(deal: Deal, sizes: Sequence[int], free: FreeBudgets) -> Dealt:
    """Deals the first ids while they fit on all nodes, where not all ids fit; then places others that still fit."""
    end = deal.common_end(_Blocks(sizes), free.inodes, free.blocks)
    blocks, counts = deal.sums(_Blocks(sizes[:end])), deal.counts(end)
    for node in range(deal.nodes):
        free.take(node, blocks[node], counts[node])
    return Dealt(deal, end, *free.fill(range(end, len(sizes)), sizes))


def _deal(files: int, needed: int, free: FreeBudgets) -> Deal:
    """Makes equal parts where they fit; else smaller nodes get what they can hold, and the others more."""
    typical = max(1, needed // max(1, files))
    caps = [min(blocks, inodes * typical) for blocks, inodes in zip(free.blocks, free.inodes, strict=True)]
    level = _level(caps, needed)
    if min(caps) >= level:
        return equal(files, len(caps))
    return weighted(files, [min(cap, level) for cap in caps])


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


def _surplus(ids: array[int], sizes: Sequence[int], free: FreeBudgets, node: int) -> array[int]:
    """Takes blocks and inodes for the first of a node's ids; returns those that do not fit."""
    ends = list(accumulate(blocks_of(map(sizes.__getitem__, ids))))
    kept = min(bisect_right(ends, free.blocks[node]), free.inodes[node])
    free.take(node, ends[kept - 1] if kept else 0, kept)
    return ids[kept:]


class _Blocks(Sequence[int]):
    """Gives sizes as blocks, slice by slice, without a second column in memory."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self._sizes = sizes

    def __len__(self) -> int:
        return len(self._sizes)

    def __getitem__(self, part: slice) -> list[int]:  # type: ignore[override]
        return list(blocks_of(self._sizes[part]))
