"""Deals ids to nodes by a pattern that any node can evaluate for one id or for all of its own, without a table.

This module owns the pattern. Budgets are in `owners`, the meaning of an owner in `placements`.

The ids are cut into blocks; each has as many ids as the pattern has slots. Each slot belongs to a node, and each block
rotates the pattern by another amount. So every node gets its part of every block, neighbours in a directory go to
different nodes, and files that repeat in the list (an image, its label, an image, ...) do not all go to one node.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from operator import add, le

_MOST_BLOCKS = 1 << 16
_MOST_SLOTS = 1 << 16
_SLOTS_PER_NODE = 64
_PARTS = 256
_MASK = (1 << 64) - 1


class Deal:
    """Divides the ids below `files` among nodes, in equal or weighted parts."""

    def __init__(self, files: int, slots: array[int], nodes: int, seed: int) -> None:
        """Only `equal` and `weighted` call this; `slots` holds the node of each slot."""
        self.files = files
        self.nodes = nodes
        self._span = len(slots)
        self._slots = slots + slots
        count = -(-files // self._span)
        self._turns = array("I", (_mixed(block, seed) % self._span for block in range(count)))

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


def equal(files: int, nodes: int, seed: int) -> Deal:
    """Makes a deal in which every node gets equally many ids of each whole block."""
    rounds = max(1, -(-files // (nodes * _MOST_BLOCKS)))
    slots = array("H")
    for number in range(rounds):
        slots.extend(_shuffled(list(range(nodes)), _mixed(number, seed + 1)))
    return Deal(files, slots, nodes, seed)


def weighted(files: int, weights: Sequence[int], seed: int) -> Deal:
    """Makes a deal in which every node gets ids in proportion to its weight; a node of weight 0 gets none."""
    nodes, total = len(weights), sum(weights)
    if not total:
        return equal(files, nodes, seed)
    wanted = max(nodes, min(_SLOTS_PER_NODE * nodes, _MOST_SLOTS))
    parts = [wanted * weight // total for weight in weights]
    # The slots that rounding leaves go to the largest nodes, for which one more matters least.
    largest = sorted(range(nodes), key=lambda n: (-weights[n], n))
    for node in largest[: wanted - sum(parts)]:
        parts[node] += 1
    slots = [node for node, part in enumerate(parts) for _ in range(part)]
    return Deal(files, array("H", _shuffled(slots, _mixed(0, seed + 1))), nodes, seed)


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
