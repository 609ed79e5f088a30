"""The order of reading in bundles, without PyTorch. Pure: numbers in, indices out.

Owns which samples are a bundle, the order of an epoch, and each rank's part of it. `bundle` makes a sampler of it.

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
"""Which permutation is drawn from a seed."""
_TOLERANCE = 1e-9
"""1 / 0.1 and the like are whole numbers."""


@dataclass(frozen=True)
class Bundles:
    """How a dataset is cut, and the order of every epoch. Values out of range raise ValueError."""

    samples: int
    ratio: float = 0.1
    """Of the dataset, in one bundle at most: 1 / ratio bundles, rounded up, of equal size."""
    alternate: bool = True
    """Odd epochs read the bundles backward."""
    seed: int = 0
    replicas: int = 1
    drop_last: bool = False
    """What does not divide by the replicas is left out; otherwise samples are read twice to fill up."""
    consecutive: bool = False
    """A bundle is a run of the dataset's own order, and not a random choice."""

    def __post_init__(self) -> None:
        """Checks."""
        if self.samples < 0:
            raise ValueError(f"{self.samples} samples")
        if not 0 < self.ratio <= 1:
            raise ValueError(f"bundle_ratio {self.ratio}: it is above 0 and at most 1")
        if self.replicas < 1:
            raise ValueError(f"num_replicas {self.replicas}: there is at least 1")

    @property
    def per_rank(self) -> int:
        """How many samples each rank reads in an epoch: as many as with `DistributedSampler`."""
        return self.samples // self.replicas if self.drop_last else -(-self.samples // self.replicas)

    @property
    def count(self) -> int:
        """Of bundles: not more than each rank has samples."""
        wanted = math.ceil(1 / self.ratio - _TOLERANCE)
        return max(1, min(wanted, self.samples // self.replicas))

    def sizes(self) -> Indices:
        """Samples by bundle, in forward order: each divides by the replicas, but for what the last has over."""
        rows = self.samples // self.replicas
        sizes = np.diff(rows * np.arange(self.count + 1) // self.count) * self.replicas
        sizes[-1] += self._over
        return sizes

    def backward(self, epoch: int) -> bool:
        """Whether an epoch reads the last bundle first."""
        return self.alternate and epoch % 2 == 1

    def order(self, epoch: int) -> Indices:
        """What all ranks read together, a row of one sample for each rank at a time."""
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
        """What one rank reads, in reading order."""
        if not 0 <= rank < self.replicas:
            raise ValueError(f"rank {rank} of {self.replicas}: it is from 0 to {self.replicas - 1}")
        return self.order(epoch)[rank :: self.replicas]

    @property
    def _over(self) -> int:
        return self.samples % self.replicas

    def _over_last(self, order: Indices) -> Indices:
        """The few that do not fill a row come last in any direction: so ranks change bundles at the same row."""
        end = int(self.sizes()[-1])
        start = end - self._over
        return np.concatenate((order[:start], order[end:], order[start:end]))

    @cached_property
    def _dealt(self) -> Indices:
        """The dataset's indices, bundle by bundle."""
        return np.arange(self.samples) if self.consecutive else self._permutation(_DEAL)

    @cached_property
    def _bundle_by_position(self) -> NDArray[np.integer]:
        # NumPy sorts numbers of 16 bits in linear time.
        kind = np.int16 if self.count <= np.iinfo(np.int16).max else np.int64
        return np.repeat(np.arange(self.count, dtype=kind), self.sizes())

    def _permutation(self, *purpose: int) -> Indices:
        """The same for ever: NumPy has frozen the numbers of its older generator, and those of its newer not."""
        seeds = np.random.SeedSequence(self.seed % _SEEDS, spawn_key=purpose)
        return np.random.RandomState(np.random.MT19937(seeds)).permutation(self.samples)
