"""Yang and Cong's Algorithm 1: who gives how many samples to whom so that all have what they should. Pure.

Two heaps, the largest surplus gives to the largest deficit, again and again. To move the fewest samples is easy: every
order of moves carries the same. To need the fewest moves is NP-complete; this needs less than twice as many.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import NamedTuple


class Move(NamedTuple):
    """So many samples from one to another."""

    source: int
    target: int
    samples: int


def balance(imbalance: Sequence[int]) -> list[Move]:
    """The moves that even out a surplus (above zero) and a deficit (below) of each; O(p log p).

    Where the surplus is larger than the deficit, some of it stays where it is; and the other way round.

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
    """The first of the heap has so many less to give or to take."""
    value, who = heap[0]
    if value + count:
        heapq.heapreplace(heap, (value + count, who))
    else:
        heapq.heappop(heap)


def pour(levels: Sequence[int], count: int) -> list[int]:
    """So many things to the lowest levels: how many each gets, so that the lowest of them is as high as can be.

    >>> pour([-3, 0, -1], 4)
    [3, 0, 1]
    """
    order = sorted(range(len(levels)), key=levels.__getitem__)
    wet, total = 0, 0
    while wet < len(order) and levels[order[wet]] * wet - total < count:
        total += levels[order[wet]]
        wet += 1
    given = [0] * len(levels)
    if wet:
        level, over = divmod(count + total, wet)
        for position, who in enumerate(order[:wet]):
            given[who] = level + (position < over) - levels[who]
    return given
