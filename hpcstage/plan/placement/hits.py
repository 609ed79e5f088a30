"""Computes how reads are served where nodes share their copies: hit rates by placement, nodes and epoch. Pure.

In each epoch every node reads another random p-th part of the dataset, as a DistributedSampler deals it.

    private    a node holds what it has read: after e epochs 1 - (1 - 1/p)^e of the dataset, as far as its budget goes
    replicate  a node holds what its budget allows, others hold the rest of the placed files
    partition  a node holds its p-th part of the placed files, others hold the rest

Files that are placed nowhere come from the source, every time. Private nodes also copy files that they have not read
yet, as far as the source is not busy: they may find more than this locally, and read up to all files each.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import log

from hpcstage.plan.placement.placements import Placing


@dataclass(frozen=True)
class Hits:
    """The shares of reads by where they are served; they add up to 1."""

    local: float
    peers: float
    source: float


@dataclass(frozen=True)
class Sharing:
    """A way in which nodes that are alike keep one dataset."""

    kind: Placing
    nodes: int
    placed: float
    """The share of the dataset that some node keeps."""
    kept: float
    """The share of the dataset that one node keeps, on average."""

    def hits(self, epoch: int) -> Hits:
        """Returns where the reads of an epoch are served.

        In the first epoch (1), placed files that a node does not fetch itself come from others.
        """
        if self.kind is Placing.PRIVATE:
            seen = 1 - (1 - 1 / self.nodes) ** (epoch - 1)
            local = min(self.kept, seen)
            return Hits(local, 0.0, 1 - local)
        passed_on = epoch == 1 or self.kind is Placing.PARTITION
        local = self.placed / self.nodes if passed_on else self.kept
        return Hits(local, self.placed - local, 1 - self.placed)

    def later(self, epochs: int) -> Hits:
        """Returns the mean hits of the epochs after the first."""
        if self.kind is not Placing.PRIVATE:
            return self.hits(2)
        if self.nodes == 1:
            return Hits(self.kept, 0.0, 1 - self.kept)
        count, missed = max(1, epochs - 1), 1 - 1 / self.nodes
        growing = count if self.kept == 1 else min(count, int(log(1 - self.kept) / log(missed)))
        unseen = missed * (1 - missed**growing) / (1 - missed)
        local = (growing - unseen + (count - growing) * self.kept) / count
        return Hits(local, 0.0, 1 - local)

    def source_share(self, epochs: int) -> float:
        """Returns how often the dataset leaves the source in all epochs together."""
        if self.kind is Placing.PRIVATE:
            return 1 + (epochs - 1) * self.later(epochs).source
        return self.placed + epochs * (1 - self.placed)


def alike(kind: Placing, nodes: int, budget_share: float) -> Sharing:
    """Returns the sharing of nodes whose budgets each hold the share `budget_share` of the dataset (1: all of it)."""
    budget_share = max(0.0, min(1.0, budget_share))
    placed = budget_share if kind is Placing.PRIVATE else min(1.0, budget_share * nodes)
    return Sharing(kind, nodes, placed, placed / nodes if kind is Placing.PARTITION else budget_share)
