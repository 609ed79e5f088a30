"""Divides a global mini-batch among ranks: each takes what its node holds, and what is left over is evened out. Pure.

The module owns the division of one step, with Yang and Cong's Algorithm 1: the largest surplus gives to the largest
deficit, again and again. Every order of moves carries the same number of samples; finding the fewest moves is
NP-complete, and this needs less than twice as many. Samples are known by their index, nodes and ranks by their number.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import NamedTuple

NOBODY = -1
"""The owner of a sample that no node has."""


def evenly(batch: Sequence[int], rank: int, world: int) -> list[int]:
    """Returns a rank's part where nobody knows who holds what: that of PyTorch's DistributedSampler."""
    return list(batch[rank::world])


def divide(batch: Sequence[int], owners: Sequence[int], ranks: Sequence[int]) -> list[list[list[int]]]:
    """Returns the parts of all ranks of all nodes: `owners` names a node that has it for each sample, `ranks` how many
    ranks each node has. All ranks get the same number of samples; the batch must be divisible by the number of ranks.

    >>> divide([0, 1, 2, 3], [0, 0, 0, 1], [1, 1])
    [[[0, 1]], [[3, 2]]]
    """
    parties = (*ranks, 0)
    parts: list[list[int]] = [[] for _ in parties]
    for sample in batch:
        parts[owners[sample]].append(sample)  # the last party is nobody
    quota = len(batch) // sum(ranks)
    for move in balance([len(part) - count * quota for part, count in zip(parts, parties, strict=True)]):
        source = parts[move.source]
        parts[move.target] += source[-move.samples :]
        del source[-move.samples :]
    return [_split(part, count) for part, count in zip(parts[:-1], ranks, strict=True)]


def _split(part: list[int], ranks: int) -> list[list[int]]:
    """Divides a part evenly among the ranks of a node."""
    return [part[len(part) * rank // ranks : len(part) * (rank + 1) // ranks] for rank in range(ranks)]


class Move(NamedTuple):
    """One party gives so many samples to another."""

    source: int
    target: int
    samples: int


def balance(imbalance: Sequence[int]) -> list[Move]:
    """Returns the moves that even out the surplus (above zero) or deficit (below zero) of each party; O(p log p).

    If the surplus is larger than the deficit, some of it stays where it is; and the other way round.

    >>> balance([-2, 2, 0])
    [Move(source=1, target=0, samples=2)]
    """
    surplus = [(-value, who) for who, value in enumerate(imbalance) if value > 0]
    deficit = [(value, who) for who, value in enumerate(imbalance) if value < 0]
    heapq.heapify(surplus)
    heapq.heapify(deficit)
    moves = []
    while surplus and deficit:
        (most, source), (least, target) = surplus[0], deficit[0]
        count = min(-most, -least)
        moves.append(Move(source, target, count))
        _lower(surplus, count)
        _lower(deficit, count)
    return moves


def _lower(heap: list[tuple[int, int]], count: int) -> None:
    """Lowers what the first party of the heap has to give or to take by so many samples."""
    value, who = heap[0]
    if value + count:
        heapq.heapreplace(heap, (value + count, who))
    else:
        heapq.heappop(heap)
