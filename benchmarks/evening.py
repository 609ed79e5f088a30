"""Evening out batches, with the sampler's own code: how much is moved (paper 004, figure 6), and in how many moves.

Owns no time: what is counted follows from seeds. A dataset is dealt to the nodes evenly, global batches are drawn as
the sampler draws them, and `divide` gives them to ranks; what a rank gets and its node does not hold was moved.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from typing import Any

import torch

from benchmarks import equations
from hpcstage.torch.balance import balance
from hpcstage.torch.shares import Held, divide

SAMPLES = 1_281_167
"""ImageNet-1K."""


def imbalance(batch: int, nodes: int, steps: int, seed: int) -> dict[str, Any]:
    """In percent of a global batch: the quartiles of what is moved over some steps, `batch` samples on each node."""
    generator = torch.Generator().manual_seed(seed)
    owner = (torch.randperm(SAMPLES, generator=generator) % nodes).tolist()
    held = Held(owner)
    moved: list[float] = []
    while len(moved) < steps:
        order = torch.randperm(SAMPLES, generator=generator).tolist()
        whole = batch * nodes
        for begin in range(0, min(len(order) // whole, steps - len(moved)) * whole, whole):
            parts = divide(order[begin : begin + whole], held, [1] * nodes, balanced=True)
            away = sum(owner[sample] != node for node, rows in enumerate(parts) for row in rows for sample in row)
            moved.append(100 * away / whole)
    low, median, high = statistics.quantiles(moved, n=4)
    expected = 100 * equations.imbalance(batch, nodes)
    return {"low": low, "median": median, "high": high, "formula": expected, "steps": len(moved)}


def against_optimum(learners: int, cases: int, seed: int) -> dict[str, Any]:
    """Algorithm 1's moves over the fewest that do, on counts as batches give them and on small made-up ones."""
    rng = random.Random(seed)
    ratios, as_good = [], 0
    for case in range(cases):
        values = _drawn(rng, learners) if case % 2 else _made_up(rng, learners)
        best = fewest_moves(values)
        if best:
            ratios.append(len(balance(values)) / best)
            as_good += ratios[-1] == 1
    return {
        "worst": max(ratios),
        "mean": statistics.mean(ratios),
        "optimal": as_good / len(ratios),
        "cases": len(ratios),
    }


def _drawn(rng: random.Random, learners: int) -> list[int]:
    """32 balls per bin."""
    counts = [-32] * learners
    for _ in range(32 * learners):
        counts[rng.randrange(learners)] += 1
    return counts


def _made_up(rng: random.Random, learners: int) -> list[int]:
    values = [rng.randint(-6, 6) for _ in range(learners - 1)]
    return [*values, -sum(values)]


def fewest_moves(imbalances: Sequence[int]) -> int:
    """The optimum by brute force over all subsets: a group that is even among itself saves a move."""
    values = [value for value in imbalances if value]
    sums, groups = [0] * (1 << len(values)), [0] * (1 << len(values))
    for mask in range(1, 1 << len(values)):
        low = mask & -mask
        sums[mask] = sums[mask ^ low] + values[low.bit_length() - 1]
        best = max(groups[mask ^ (1 << at)] for at in range(len(values)) if mask >> at & 1)
        groups[mask] = best + (sums[mask] == 0)
    return len(values) - groups[-1]
