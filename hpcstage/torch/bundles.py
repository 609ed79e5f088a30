"""Computes the order of reading in bundles, without PyTorch. Pure: takes numbers, returns indices.

The module owns which samples form a bundle, the order of an epoch, and each rank's part of it. `bundle` makes a sampler
of it.

All samples are dealt to bundles once, by a permutation that the seed fixes. In an epoch the bundles are read one after
the other, each in a new random order; every other epoch begins with the bundle that the epoch before read last.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Indices = NDArray[np.int64]

_SEEDS = 1 << 64
_DEAL, _EPOCH = 0, 1
"""The two kinds of permutation that are drawn from a seed."""
_TOLERANCE = 1e-9
"""Within this tolerance 1 / 0.1 and the like are taken for whole numbers."""


@dataclass(frozen=True)
class Bundles:
    """Cuts a dataset into bundles, and gives the order of every epoch. Values out of range raise ValueError."""

    samples: int
    ratio: float = 0.1
    """The largest part of the dataset in one bundle: there are 1 / ratio bundles, rounded up, of equal size."""
    alternate: bool = True
    """Whether odd epochs read the bundles backward."""
    seed: int = 0
    replicas: int = 1
    drop_last: bool = False
    """Whether samples that do not divide by the replicas are left out; otherwise samples are read twice to fill up."""
    consecutive: bool = False
    """Whether a bundle is a run of the dataset's own order, and not a random choice."""

    def __post_init__(self) -> None:
        """Checks the values."""
        if self.samples < 0:
            raise ValueError(f"{self.samples} samples")
        if not 0 < self.ratio <= 1:
            raise ValueError(f"bundle_ratio {self.ratio}: it is above 0 and at most 1")
        if self.replicas < 1:
            raise ValueError(f"num_replicas {self.replicas}: there is at least 1")

    @property
    def per_rank(self) -> int:
        """Returns how many samples each rank reads in an epoch: as many as with `DistributedSampler`."""
        return self.samples // self.replicas if self.drop_last else -(-self.samples // self.replicas)

    @property
    def count(self) -> int:
        """Returns the number of bundles: not more than each rank has samples, but at least one."""
        wanted = math.ceil(1 / self.ratio - _TOLERANCE)
        return max(1, min(wanted, self.samples // self.replicas))

    def sizes(self) -> Indices:
        """Returns the samples of each bundle, in forward order: each number divides by the replicas, but for what the
        last has over."""
        rows = self.samples // self.replicas
        sizes = np.diff(rows * np.arange(self.count + 1) // self.count) * self.replicas
        sizes[-1] += self._over
        return sizes

    def backward(self, epoch: int) -> bool:
        """Returns whether an epoch reads the last bundle first."""
        return self.alternate and epoch % 2 == 1

    def order(self, epoch: int) -> Indices:
        """Returns what all ranks read together, in rows of one sample for each rank."""
        # A stable sort by bundle keeps the random order inside each.
        shuffled = self._permutation(_EPOCH, epoch)
        bundles = self._bundle_by_position[shuffled]
        if self.backward(epoch):
            bundles = self.count - 1 - bundles
        order = self._dealt[shuffled[np.argsort(bundles, kind="stable")]]
        if self.backward(epoch) and self._over:
            order = self._over_last(order)
        return np.resize(order, self.per_rank * self.replicas)

    def part(self, epoch: int, rank: int) -> Indices:
        """Returns what one rank reads, in reading order."""
        if not 0 <= rank < self.replicas:
            raise ValueError(f"rank {rank} of {self.replicas}: it is from 0 to {self.replicas - 1}")
        return self.order(epoch)[rank :: self.replicas]

    @property
    def _over(self) -> int:
        return self.samples % self.replicas

    def _over_last(self, order: Indices) -> Indices:
        """Puts the few samples that do not fill a row last in either direction, so that ranks change bundles at the
        same row."""
        end = int(self.sizes()[-1])
        start = end - self._over
        return np.concatenate((order[:start], order[end:], order[start:end]))

    @cached_property
    def _dealt(self) -> Indices:
        """Returns the dataset's indices, bundle by bundle."""
        return np.arange(self.samples) if self.consecutive else self._permutation(_DEAL)

    @cached_property
    def _bundle_by_position(self) -> NDArray[np.integer]:
        # NumPy sorts numbers of 16 bits in linear time.
        kind = np.int16 if self.count <= np.iinfo(np.int16).max else np.int64
        return np.repeat(np.arange(self.count, dtype=kind), self.sizes())

    def _permutation(self, *purpose: int) -> Indices:
        """Returns a permutation that is the same for ever: NumPy has frozen the numbers of its older generator, but not
        those of its newer one."""
        seeds = np.random.SeedSequence(self.seed % _SEEDS, spawn_key=purpose)
        return np.random.RandomState(np.random.MT19937(seeds)).permutation(self.samples)
