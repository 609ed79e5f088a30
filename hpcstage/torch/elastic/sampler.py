"""A batch sampler for trainings whose number of ranks changes: what is left of an epoch is divided anew, and every
sample counts once.

The module owns the order of an epoch and its steps. `elastic` says who trains and how far the epoch is; `agreement`
divides a step by what nodes hold.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Sized
from dataclasses import dataclass

import torch
from torch.utils.data import Sampler

from hpcstage.torch.samplers.agreement import NodeAgreement
from hpcstage.torch.samplers.balance import evenly


@dataclass(frozen=True)
class StepShare:
    """The samples of one rank in one step."""

    ids: tuple[int, ...]
    """The samples that it reads; one that does not count, where there are fewer samples than ranks."""
    counted: int
    """How many of them count."""
    whole: tuple[int, ...]
    """The samples of all ranks."""


class ElasticSampler(Sampler[list[int]]):
    """Gives batches of indices for this rank: `DataLoader(dataset, batch_sampler=ElasticSampler(dataset, 32))`.

    All ranks together read in each step the next `batch_size` samples for each rank, in the order that PyTorch's
    DistributedSampler has for the same seed and epoch. The last step of an epoch has what is left: ranks may have one
    sample more than others, and nothing is repeated (where there are fewer samples than ranks, the others read one that
    does not count). `Elastic` tells the sampler its epoch, its place in it, and the ranks.

    locality: gives each rank of a step what the disk of its node holds, as `LocalityAwareSampler` does: who holds what
        is agreed on anew, by all ranks, when an epoch begins and after each change of the membership. Each rank has the
        same number of samples as without it.
    paths: the file of each sample, for `locality`; by default a list of paths that the dataset has.

    >>> sampler = ElasticSampler(range(10), 4, shuffle=False)
    >>> list(sampler)
    [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    >>> sampler.begin(epoch=0, position=4, rank=1, world=2)
    >>> list(sampler)
    [[5, 7, 9]]
    """

    def __init__(
        self,
        dataset: Sized,
        batch_size: int,
        *,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = False,
        locality: bool = False,
        paths: Sequence[str] | None = None,
    ) -> None:
        if batch_size < 1:
            raise ValueError(f"batch_size is {batch_size}; it must be 1 or more")
        if paths is not None and len(paths) != len(dataset):
            raise ValueError(f"{len(paths)} paths for {len(dataset)} samples")
        self.samples = len(dataset)
        self.batch_size = batch_size
        self.seed = seed
        self.shuffle = shuffle
        self.drop_last = drop_last
        self.epoch = self.position = self.rank = 0
        self.world = 1
        self._order: torch.Tensor | None = None
        self._order_epoch = -1
        self._nodes: NodeAgreement | None = None
        if locality:
            self._nodes = NodeAgreement(dataset, paths, repr((self.samples, batch_size, seed, shuffle, drop_last)))

    def begin(self, *, epoch: int, position: int, rank: int, world: int) -> None:
        """Has the next iteration begin at a place of an epoch, for one of so many ranks. With `locality` all of them
        call it, at the same place."""
        self.epoch, self.position, self.rank, self.world = epoch, position, rank, world
        if self._nodes is not None:
            self._nodes.agree(rank, world, epoch)

    def is_over(self, position: int) -> bool:
        """Returns whether no step of the epoch is left at a place."""
        return not self.step_size(position)

    def step_size(self, position: int) -> int:
        """Returns how many samples all ranks together have in the step that begins at a place; 0 behind the last."""
        left, stride = self.samples - position, self.batch_size * self.world
        return stride if left >= stride else 0 if self.drop_last else max(0, left)

    def share(self, position: int) -> StepShare:
        """Returns what this rank has in the step that begins at a place."""
        whole = tuple(self._epoch_order()[position : position + self.step_size(position)].tolist())
        mine = tuple(self._part(whole))
        return StepShare(mine or whole[:1], len(mine), whole)

    def __iter__(self) -> Iterator[list[int]]:
        """Yields the batches of this rank, to the end of the epoch."""
        position = self.position
        while size := self.step_size(position):
            yield list(self.share(position).ids)
            position += size

    def __len__(self) -> int:
        """Returns the number of steps that are left of the epoch."""
        whole, rest = divmod(self.samples - self.position, self.batch_size * self.world)
        return whole + (rest > 0 and not self.drop_last)

    def _part(self, batch: Sequence[int]) -> Sequence[int]:
        if self._nodes is not None:
            return self._nodes.part(batch, self.rank, self.world)
        return evenly(batch, self.rank, self.world)

    def _epoch_order(self) -> torch.Tensor:
        if self._order is None or self._order_epoch != self.epoch:
            generator = torch.Generator()
            generator.manual_seed(self.seed + self.epoch)
            shuffled = torch.randperm(self.samples, generator=generator)
            self._order = shuffled if self.shuffle else torch.arange(self.samples)
            self._order_epoch = self.epoch
        return self._order
