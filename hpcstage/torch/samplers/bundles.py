"""Owns `BundleRandomSampler`, a random order from which the page cache gains (Lee and Bahn, JIIBC 24-2, 2024).

All samples are dealt to bundles once, by a permutation that the seed fixes. In an epoch the bundles are read one after
the other, each in a new random order; every other epoch begins with the bundle that the epoch before read last.

In a random order, a cache that keeps what was used last has dropped most of the samples when the next epoch comes to
them: with space for half of the dataset it misses 85 % of the reads. With this sampler an epoch begins with what the
previous one read last, and only what does not fit is missed: 50 %. Linux does not keep what was used last unless it is
told to; `pages` tells it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sized
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch.distributed as dist
from torch.utils.data import Sampler

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Indices = NDArray[np.int64]

_CHUNK = 8192
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
    seed: int = 0
    replicas: int = 1
    drop_last: bool = False
    """Whether samples that do not divide by the replicas are left out; otherwise samples are read twice to fill up."""

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
        return epoch % 2 == 1

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
        return self._permutation(_DEAL)

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


class BundleRandomSampler(Sampler[int]):
    """Shuffles inside of bundles of the dataset, and reads the bundles forward in one epoch and backward in the next.

    >>> from torch.utils.data import DataLoader
    >>> dataset = list(range(1000))
    >>> sampler = BundleRandomSampler(dataset, bundle_ratio=0.1)
    >>> loader = DataLoader(dataset, batch_size=100, sampler=sampler)
    >>> for epoch in range(2):
    ...     sampler.set_epoch(epoch)
    ...     batches = [set(batch.tolist()) for batch in loader]
    ...     last, first = (batches[-1], None) if epoch == 0 else (last, batches[0])
    >>> first == last  # what was read last is read first
    True

    The dataset should read its files with `hpcstage.torch.read_file`, which makes Linux keep them by their last use;
    without that its page cache gains little from this order (`python -m benchmarks.bundle` shows both).

    A bundle is a random choice of the dataset, fixed by `seed`, and not a run of its order: datasets are often in order
    of class, and such a run would be a batch of one class, from which nothing is learnt. Every sample is read once per
    epoch.

    **The order is not PyTorch's** for the same seed, and depends on the number of ranks. Which samples share a bundle
    never changes; with a small `bundle_ratio` the same samples meet in the batches of each epoch, so keep bundles many
    batches long. `bundle_ratio=1` is a new random order of all samples each epoch.

    **Epochs.** Call `set_epoch` as with `DistributedSampler`; without it, each iteration is the next epoch (from 0 on).
    An iterator takes its epoch when its first index is asked for.

    **Distributed.** Where `torch.distributed` is initialised before the sampler is made, its ranks share an epoch as
    with `DistributedSampler`: they get equal counts, and what is missing is filled up with samples that are read twice;
    with `drop_last`, what is over is left out instead (other samples of the last bundle each epoch). All ranks are in
    the same bundle at each step, but for the last step. Give `num_replicas=1, rank=0` where something else divides the
    batches, such as Accelerate, and `use_distributed_sampler=False` to Lightning's trainer.

    **Resuming.** `state_dict` and `load_state_dict` save and restore the place; torchdata's `StatefulDataLoader` calls
    them, too. A `DataLoader` with workers asks for samples before they are used, so tell the sampler how many samples
    of this epoch were used:

    >>> state = sampler.state_dict(used=3 * 100)
    >>> resumed = BundleRandomSampler(dataset, bundle_ratio=0.1)
    >>> resumed.load_state_dict(state)
    >>> for epoch in range(resumed.epoch, 2):
    ...     resumed.set_epoch(epoch)  # keeps the place, since it is the same epoch
    ...     print(epoch, len(list(resumed)))
    1 700
    """

    def __init__(
        self,
        dataset: Sized,
        bundle_ratio: float = 0.1,
        seed: int = 0,
        num_replicas: int | None = None,
        rank: int | None = None,
        drop_last: bool = False,
    ) -> None:
        """Makes the sampler. `seed` must be the same on all ranks. Raises ValueError for values out of range."""
        super().__init__()
        replicas, self.rank = _place(num_replicas, rank)
        self.bundles = Bundles(len(dataset), bundle_ratio, seed, replicas, drop_last)
        if not 0 <= self.rank < replicas:
            raise ValueError(f"rank {self.rank} of {replicas}: it is from 0 to {replicas - 1}")
        self._next = _Reading(0, 0)
        self._reading: _Reading | None = None

    def __iter__(self) -> Iterator[int]:
        """Yields one rank's part of one epoch; after `load_state_dict`, what is left of it."""
        start, self._next = self._next, self._next.after()
        reading = self._reading = _Reading(start.epoch, start.position)  # `start` stays what a saved attribute names
        order: Indices = self.bundles.part(reading.epoch, self.rank)
        for first in range(reading.position, len(order), _CHUNK):
            for index in order[first : first + _CHUNK].tolist():
                reading.position += 1
                yield index
        reading.ended = True

    def __len__(self) -> int:
        """Returns the samples of a whole epoch on each rank, also where less of it is left after `load_state_dict`."""
        return self.bundles.per_rank

    @property
    def epoch(self) -> int:
        """Returns the epoch that is being read; the next one if none is."""
        return self._current().epoch

    def set_epoch(self, epoch: int) -> None:
        """Makes the next iteration this epoch, from its start, or from where `load_state_dict` left it."""
        self._reading = None
        if self._next.epoch != epoch:
            self._next = _Reading(epoch, 0)

    def state_dict(self, used: int | None = None) -> dict[str, Any]:
        """Returns the place in the training, which is the same on all ranks.

        `used` is how many samples of this epoch this rank has really used, those before a resumption included. Without
        it, all samples that were taken from the sampler are taken as used, and after an epoch's end the place is the
        start of the next.
        """
        current = self._current() if used is None or self._reading is None else self._reading
        position = current.position if used is None else used
        self._check(position)
        return {"epoch": current.epoch, "position": position, "order": self._kind()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Makes the next iteration go on at that place, exactly. Raises ValueError if the samplers differ in anything
        but the rank.

        If the place is an epoch's end, the next iteration has no samples: the loop around it may have more to do there.
        """
        kind = self._kind()
        earlier = state.get("order", {})
        differing = [
            f"{name} is {value} and was {earlier.get(name)}"
            for name, value in kind.items()
            if earlier.get(name) != value
        ]
        if differing:
            raise ValueError(f"this state is of another order: {', '.join(differing)}")
        self._check(state["position"])
        self._reading = None
        self._next = _Reading(state["epoch"], state["position"])

    def _current(self) -> _Reading:
        return self._next if self._reading is None or self._reading.ended else self._reading

    def _kind(self) -> dict[str, Any]:
        """Returns all that decides about the order."""
        bundles = self.bundles
        return {
            "samples": bundles.samples,
            "bundle_ratio": bundles.ratio,
            "seed": bundles.seed,
            "num_replicas": bundles.replicas,
            "drop_last": bundles.drop_last,
        }

    def _check(self, position: int) -> None:
        if not 0 <= position <= len(self):
            raise ValueError(f"{position} samples of an epoch of {len(self)} on each rank")


class _Reading:
    """One iteration: its epoch, and how many samples it has given."""

    def __init__(self, epoch: int, position: int) -> None:
        if epoch < 0:
            raise ValueError(f"epoch {epoch}: the first is 0")
        self.epoch = epoch
        self.position = position
        self.ended = False

    def after(self) -> _Reading:
        return _Reading(self.epoch + 1, 0)


def _place(num_replicas: int | None, rank: int | None) -> tuple[int, int]:
    """Returns the number of processes and the rank of this one. If only one of them is given, `torch.distributed`
    completes it, as in PyTorch."""
    known = dist.is_available() and dist.is_initialized()
    if not known and (num_replicas is None) != (rank is None):
        raise ValueError("num_replicas and rank belong together where torch.distributed is not initialised")
    if num_replicas is None:
        num_replicas = dist.get_world_size() if known else 1
    if rank is None:
        rank = dist.get_rank() if known else 0
    return num_replicas, rank
