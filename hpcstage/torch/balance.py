"""Implements Yang and Cong's Algorithm 1: who gives how many samples to whom, so that all have what they should. Pure.

By means of two heaps, the largest surplus gives to the largest deficit, again and again. Moving the fewest samples is
easy: every order of moves carries the same number. Finding the fewest moves is NP-complete; this needs less than twice
as many.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import NamedTuple


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


def pour(levels: Sequence[int], count: int) -> list[int]:
    """Gives so many things to the lowest levels, so that the lowest becomes as high as can be; returns how many each
    gets.

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
