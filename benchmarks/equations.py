"""Yang and Cong's cost model of data loading on p nodes, equation by equation. Pure; nothing is assumed here.

D: bytes of the dataset; p: nodes; V: bytes per second that one node trains; R: bytes per second of the source, all
nodes together; U: bytes per second that one node preprocesses; Rc: bytes per second between nodes, all together;
alpha: the share of the dataset that some node keeps; beta: the share that is moved to even out batches.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from hpcstage.plan.placement.placements import Placing


def training_s(dataset_bytes: float, nodes: int, train_bytes_per_s: float) -> float:
    """(1): an epoch's computing, D / pV."""
    return dataset_bytes / (nodes * train_bytes_per_s)


def source_s(dataset_bytes: float, source_bytes_per_s: float) -> float:
    """(2): an epoch's reading from the source, D / R."""
    return dataset_bytes / source_bytes_per_s


def preprocessing_s(dataset_bytes: float, nodes: int, preprocess_bytes_per_s: float) -> float:
    """(3): D / pU."""
    return dataset_bytes / (nodes * preprocess_bytes_per_s)


def loading_s(dataset_bytes: float, nodes: int, source_bytes_per_s: float, preprocess_bytes_per_s: float) -> float:
    """(4): (2) + (3)."""
    return source_s(dataset_bytes, source_bytes_per_s) + preprocessing_s(dataset_bytes, nodes, preprocess_bytes_per_s)


def knee(source_bytes_per_s: float, train_bytes_per_s: float) -> float:
    """(5): with more nodes than R / V an epoch takes as long as the source needs."""
    return source_bytes_per_s / train_bytes_per_s


def true_cost_s(dataset_bytes: float, nodes: int, source_bytes_per_s: float, train_bytes_per_s: float) -> float:
    """(6): an epoch where reading goes on beside training."""
    if nodes <= knee(source_bytes_per_s, train_bytes_per_s):
        return training_s(dataset_bytes, nodes, train_bytes_per_s)
    return source_s(dataset_bytes, source_bytes_per_s)


def cached_s(
    dataset_bytes: float, nodes: int, source_bytes_per_s: float, peers_bytes_per_s: float, alpha: float
) -> float:
    """(7): reading where each node keeps its part: (1 - alpha) D / R + alpha D / Rc x (p - 1) / p."""
    from_source = (1 - alpha) * dataset_bytes / source_bytes_per_s
    return from_source + alpha * dataset_bytes / peers_bytes_per_s * (nodes - 1) / nodes


def local_first_s(
    dataset_bytes: float, source_bytes_per_s: float, peers_bytes_per_s: float, alpha: float, beta: float
) -> float:
    """(8): reading where nodes train on what they hold and even out the rest: (1 - alpha) D / R + alpha D beta / Rb."""
    return (1 - alpha) * dataset_bytes / source_bytes_per_s + alpha * dataset_bytes * beta / peers_bytes_per_s


def imbalance(batch: int, learners: int) -> float:
    """beta: the expected share of a global batch that is moved, `batch` samples for each of the learners.

    How many samples of a batch a learner holds is binomial with mean `batch`; what all miss of it, by the normal
    approximation, is sqrt(variance / 2 pi) each.
    """
    return math.sqrt(batch * (1 - 1 / learners) / (2 * math.pi)) / batch


# ---- the shares of reads by where they are served


@dataclass(frozen=True)
class Hits:
    """The shares of reads by where they are served; they add up to 1."""

    local: float
    peers: float
    source: float


@dataclass(frozen=True)
class Sharing:
    """A way in which nodes that are alike keep one dataset.

    In each epoch every node reads another random p-th part of it, as a DistributedSampler deals it. A node that holds
    copies of its own has (private) what it has read, after e epochs 1 - (1 - 1/p)^e of the dataset, as far as its
    budget goes; (replicate) all files; (partition) its p-th part of those that are placed. Files that are placed
    nowhere come from the source, every time.
    """

    kind: Placing
    nodes: int
    placed: float
    """The share of the dataset that some node keeps."""

    @property
    def kept(self) -> float:
        """The share of the dataset that one node keeps in the end."""
        return self.placed / self.nodes if self.kind is Placing.PARTITION else self.placed

    def hits(self, epoch: int) -> Hits:
        """Returns where the reads of an epoch are served.

        In the first epoch (1), placed files that a node does not fetch itself come from others.
        """
        if self.kind is Placing.PRIVATE:
            local = min(self.placed, 1 - (1 - 1 / self.nodes) ** (epoch - 1))
            return Hits(local, 0.0, 1 - local)
        local = self.placed / self.nodes if epoch == 1 else self.kept
        return Hits(local, self.placed - local, 1 - self.placed)


def alike(kind: Placing, nodes: int, budget_share: float) -> Sharing:
    """Returns the sharing of nodes whose budgets each hold the share `budget_share` of the dataset (1: all of it)."""
    share = max(0.0, min(1.0, budget_share))
    return Sharing(kind, nodes, min(1.0, share * nodes) if kind is Placing.PARTITION else share)
