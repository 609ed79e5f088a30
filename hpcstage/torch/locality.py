"""A batch sampler that gives each rank, of every global mini-batch, what the disk of its node already holds.

The module owns the global order and the steps of an epoch; `roster` says who holds what, and `shares` how a step is
divided. All ranks together read in each step what PyTorch's DistributedSampler would have them read, so the gradient of
a step is the same (paper: Yang and Cong, theorem 1). Which rank reads a sample differs, and therefore the sampler is
opt-in.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Sized
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import Sampler

from hpcstage.torch.holdings import NodeHoldings, paths_of
from hpcstage.torch.roster import Gather, Seats, agree, gather_in, meet
from hpcstage.torch.shares import Held, divide, evenly


@dataclass
class _Agreed:
    """Holds what the ranks agreed on. It is changed in place: code that puts a sampler's attributes back leaves it
    alone."""

    met: bool = False
    seats: Seats | None = None
    epoch: int | None = None
    held: Held | None = None
    gather: Gather | None = field(default=None, repr=False)
    holdings: NodeHoldings | None = None


class LocalityAwareSampler(Sampler[list[int]]):
    """Gives batches of indices for this rank: `DataLoader(dataset, batch_sampler=LocalityAwareSampler(dataset, 32))`.

    In step k all ranks together read the samples that they read in step k of `DataLoader(dataset, 32,
    sampler=DistributedSampler(dataset, seed=seed))`. Of these a rank gets what its node holds, and the ranks of a node
    share that evenly. A sample that no node holds goes to the node that will read it from the source, or to the ranks
    with the fewest samples. Call `set_epoch` before each epoch: then all ranks agree on who holds what, by one
    collective. All of them must therefore begin an epoch alike, as they must for training.

    Outside of `hpcstage run`, without torch.distributed, and as long as one rank's node does not know the files, all
    ranks get what a DistributedSampler would give them.

    dataset: it has a length, and a list of paths that is found by its shape unless `paths` is given.
    batch_size: the number of samples of one rank in a step.
    drop_last: as in DistributedSampler, leaves out the samples that do not divide evenly among the ranks. Otherwise
        some are repeated, as there.
    drop_last_batch: as the DataLoader's `drop_last`, leaves out the last batch if it is not full.
    balance: gives each rank the same number of samples in each step. Without it no sample that a node holds is moved,
        and gradients have to be weighted: see `hpcstage.torch.weights`.
    num_replicas, rank: as in DistributedSampler; if they are not those of `group`, ranks cannot agree.
    group: the ranks of torch.distributed that share the dataset; all ranks by default.

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
        balance: bool = True,
        num_replicas: int | None = None,
        rank: int | None = None,
        paths: Sequence[str] | None = None,
        group: Any = None,  # noqa: ANN401  a ProcessGroup, which not every build of PyTorch has
    ) -> None:
        joined = dist.is_available() and dist.is_initialized()
        world, own = (dist.get_world_size(group), dist.get_rank(group)) if joined else (1, 0)
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
        self.balance = balance
        self.epoch = 0
        self._samples = len(dataset)
        self._group = group
        self._dataset_paths = (dataset, paths)
        self._agrees = joined and self.num_replicas == world > 1
        self._agreed = _Agreed()
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
        order, held = self._order(), self._holders()
        for step in range(begin, len(self)):
            self._given = step + 1
            yield self._own(order[step * self._stride : (step + 1) * self._stride], held)

    def global_size(self, step: int) -> int:
        """Returns how many samples all ranks together have in a step; with `balance=False` the gradient's weight needs
        it."""
        if not 0 <= step < len(self):
            raise IndexError(f"step {step} of {len(self)}")
        return min(self._stride, self._per_rank * self.num_replicas - step * self._stride)

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

    def _own(self, batch: list[int], held: Held | None) -> list[int]:
        seats = self._agreed.seats
        if held is None or seats is None:
            return evenly(batch, self.rank, self.num_replicas)
        return divide(batch, held, seats.ranks, balanced=self.balance)[seats.node][seats.seat]

    # ---- what the ranks agree on

    def _holders(self) -> Held | None:
        """Returns who holds what; the ranks agree once in an epoch, however often it is asked for."""
        agreed = self._agreed
        if not self._agrees:
            return None
        if not agreed.met:
            self._meet(agreed)
        if agreed.seats is not None and agreed.epoch != self.epoch:
            assert agreed.gather is not None
            assert agreed.holdings is not None
            agreed.held = agree(agreed.gather, agreed.seats, agreed.holdings, self._samples, self.epoch)
            agreed.epoch = self.epoch
        return agreed.held

    def _meet(self, agreed: _Agreed) -> None:
        agreed.gather = gather_in(self._group)
        agreed.holdings = found = NodeHoldings(self._paths())
        agreed.seats = meet(agreed.gather, found.node, self._same(), self.rank, possible=found.possible)
        agreed.met = True

    def _paths(self) -> Sequence[str] | None:
        dataset, paths = self._dataset_paths
        return paths if paths is not None else paths_of(dataset)

    def _same(self) -> str:
        """Returns a text of what must be the same on all ranks."""
        flags = (self.shuffle, self.drop_last, self.drop_last_batch, self.balance)
        return repr((self._samples, self.num_replicas, self.batch_size, self.seed, *flags))

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
