"""A batch sampler that gives each rank, of every global mini-batch, what the disk of its node already holds.

The module owns the global order and the steps of an epoch; `agreement` says who holds what. All ranks together read in
each step what PyTorch's DistributedSampler would have them read, so the gradient of a step is the same (paper: Yang and
Cong, theorem 1). Which rank reads a sample differs, and therefore the sampler is opt-in.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Sized

import torch
import torch.distributed as dist
from torch.utils.data import Sampler

from hpcstage.torch.samplers.agreement import NodeAgreement


class LocalityAwareSampler(Sampler[list[int]]):
    """Gives batches of indices for this rank: `DataLoader(dataset, batch_sampler=LocalityAwareSampler(dataset, 32))`.

    In step k all ranks together read the samples that they read in step k of `DataLoader(dataset, 32,
    sampler=DistributedSampler(dataset, seed=seed))`. Of these a rank gets what its node holds, and the ranks of a node
    share that evenly. A sample that no node holds goes to the node that will read it from the source, or to the ranks
    with the fewest samples. Each rank gets the same number of samples. Call `set_epoch` before each epoch: then all
    ranks agree on who holds what. All of them must therefore begin an epoch alike, as they must for training.

    Outside of `hpcstage run`, without torch.distributed, and as long as one rank's node does not know the files, all
    ranks get what a DistributedSampler would give them.

    dataset: it has a length, and a list of paths that is found by its shape unless `paths` is given.
    batch_size: the number of samples of one rank in a step.
    drop_last: as in DistributedSampler, leaves out the samples that do not divide evenly among the ranks. Otherwise
        some are repeated, as there.
    drop_last_batch: as the DataLoader's `drop_last`, leaves out the last batch if it is not full.
    num_replicas, rank: as in DistributedSampler; if they are not those of torch.distributed, ranks cannot agree.

    >>> sampler = LocalityAwareSampler(range(10), 4, shuffle=False)
    >>> list(sampler)
    [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    """

    def __init__(
        self,
        dataset: Sized,
        batch_size: int,
        *,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = False,
        drop_last_batch: bool = False,
        num_replicas: int | None = None,
        rank: int | None = None,
        paths: Sequence[str] | None = None,
    ) -> None:
        joined = dist.is_available() and dist.is_initialized()
        world, own = (dist.get_world_size(), dist.get_rank()) if joined else (1, 0)
        self.num_replicas = world if num_replicas is None else num_replicas
        self.rank = own if rank is None else rank
        if not 0 <= self.rank < self.num_replicas:
            raise ValueError(f"rank {self.rank} of {self.num_replicas}")
        if batch_size < 1:
            raise ValueError(f"batch_size is {batch_size}; it must be 1 or more")
        if paths is not None and len(paths) != len(dataset):
            raise ValueError(f"{len(paths)} paths for {len(dataset)} samples")
        self.batch_size = batch_size
        self.seed = seed
        self.shuffle = shuffle
        self.drop_last = drop_last
        self.drop_last_batch = drop_last_batch
        self.epoch = 0
        self._samples = len(dataset)
        same = repr((self._samples, batch_size, seed, shuffle, drop_last, drop_last_batch))
        self._nodes = NodeAgreement(dataset, paths, same)
        self._begin = 0
        self._given = 0

    # ---- the epoch

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch that begins next, which has another order and another look at who holds what."""
        if epoch != self.epoch:
            self._begin = self._given = 0
        self.epoch = epoch

    @property
    def sampler(self) -> LocalityAwareSampler:
        """Returns this sampler, because Lightning calls `set_epoch` of a batch sampler's sampler. Lightning must not
        replace this sampler by one of its own: give `Trainer(use_distributed_sampler=False)`."""
        return self

    def __len__(self) -> int:
        """Returns the number of steps of an epoch, which is the same on every rank."""
        steps, left = divmod(self._per_rank, self.batch_size)
        return steps + (left > 0 and not self.drop_last_batch)

    def __iter__(self) -> Iterator[list[int]]:
        """Yields the batches of this rank."""
        begin, self._begin = self._begin, 0
        order = self._order()
        if self._nodes.epoch != self.epoch:  # once in an epoch, however often it is asked for
            self._nodes.agree(self.rank, self.num_replicas, self.epoch)
        for step in range(begin, len(self)):
            self._given = step + 1
            batch = order[step * self._stride : (step + 1) * self._stride]
            yield self._nodes.part(batch, self.rank, self.num_replicas)

    @property
    def _per_rank(self) -> int:
        return (self._samples if self.drop_last else self._samples + self.num_replicas - 1) // self.num_replicas

    @property
    def _stride(self) -> int:
        return self.batch_size * self.num_replicas

    def _order(self) -> list[int]:
        """Returns what all ranks read, step by step: DistributedSampler's order, padded or cut as there."""
        if self.shuffle:
            generator = torch.Generator()
            generator.manual_seed(self.seed + self.epoch)
            order: list[int] = torch.randperm(self._samples, generator=generator).tolist()
        else:
            order = list(range(self._samples))
        whole = self._per_rank * self.num_replicas
        return (order * (1 + whole // max(1, len(order))))[:whole] if whole > len(order) else order[:whole]

    # ---- stopping and going on

    def state_dict(self, used: int | None = None) -> dict[str, int]:
        """Returns the place in the epoch. `used` is how many of its batches training has used; without it, all batches
        that were given are taken as used. A DataLoader with workers takes batches ahead of training, so `used` is
        needed there; torchdata's StatefulDataLoader, which calls this method, sees to that itself."""
        return {"epoch": self.epoch, "seed": self.seed, "steps": self._given if used is None else used}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Goes on at that place: the rest of the epoch has the same global batches. By then other ranks and nodes may
        hold the samples; the number of ranks and the batch size must be the same."""
        if state["seed"] != self.seed:
            raise ValueError(f"the state is of seed {state['seed']}, the sampler has seed {self.seed}")
        self.epoch = state["epoch"]
        self._begin = self._given = state["steps"]
