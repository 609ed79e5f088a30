"""Owns `BundleRandomSampler`, a random order from which the page cache gains (Lee and Bahn, JIIBC 24-2, 2024).

The module owns the sampler's epochs, its place in them and its state. `bundles` makes the order itself.

In a random order, a cache that keeps what was used last has dropped most of the samples when the next epoch comes to
them: with space for half of the dataset it misses 85 % of the reads. With this sampler an epoch begins with what the
previous one read last, and only what does not fit is missed: 50 %. Linux does not keep what was used last unless it is
told to; `pages` tells it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sized
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch.utils.data import Sampler

from hpcstage.torch.bundles import Bundles

if TYPE_CHECKING:
    from hpcstage.torch.bundles import Indices

_CHUNK = 8192


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
    of class, and such a run would be a batch of one class, from which nothing is learnt. `consecutive=True` takes runs
    instead, for data that is in no such order and whose neighbours lie in one file. Either way every sample is read
    once per epoch.

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
        alternate: bool = True,
        seed: int = 0,
        num_replicas: int | None = None,
        rank: int | None = None,
        drop_last: bool = False,
        *,
        consecutive: bool = False,
    ) -> None:
        """Makes the sampler. `seed` must be the same on all ranks. Raises ValueError for values out of range."""
        super().__init__()
        replicas, self.rank = _place(num_replicas, rank)
        self.bundles = Bundles(len(dataset), bundle_ratio, alternate, seed, replicas, drop_last, consecutive)
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
            "alternate": bundles.alternate,
            "seed": bundles.seed,
            "num_replicas": bundles.replicas,
            "drop_last": bundles.drop_last,
            "consecutive": bundles.consecutive,
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
