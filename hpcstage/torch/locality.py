"""A batch sampler that gives each rank, of every global mini-batch, what the disk of its node already holds.

Owns the global order and the steps of an epoch; who holds what comes from `roster`, how a step is divided from
`shares`. All ranks together read in each step what PyTorch's DistributedSampler would have them read, so the gradient
of a step is the same (paper: Yang and Cong, theorem 1); which rank reads a sample is not. It is therefore opt-in.
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
    """What the ranks agreed on. It is changed in place: whoever puts a sampler's attributes back leaves it as it is."""

    met: bool = False
    seats: Seats | None = None
    epoch: int | None = None
    held: Held | None = None
    gather: Gather | None = field(default=None, repr=False)
    holdings: NodeHoldings | None = None


class LocalityAwareSampler(Sampler[list[int]]):
    """Batches of indices for this rank, `DataLoader(dataset, batch_sampler=LocalityAwareSampler(dataset, 32))`.

    Step k of all ranks together has the samples that step k of `DataLoader(dataset, 32,
    sampler=DistributedSampler(dataset, seed=seed))` has over all ranks. Within it a rank gets what its node holds, the
    ranks of a node share that evenly, and what no node holds goes where it is read from the source, or to the ranks
    with the least. Call `set_epoch` before each epoch: then all ranks agree on who holds what, by one collective. All
    of them must therefore begin an epoch alike, as they must for training.

    Outside of `hpcstage run`, without torch.distributed, and as long as one rank's node does not know the files, all
    ranks get what a DistributedSampler would give them.

    dataset: has a length and a list of paths that is found by its shape, or `paths` is given.
    batch_size: of one rank.
    drop_last: the DistributedSampler's: leave out the samples that do not go evenly into the ranks. Else some are
        repeated, as there.
    drop_last_batch: the DataLoader's `drop_last`: leave out the last batch if it is not full.
    balance: the same number of samples for each rank in each step. Without it no sample that a node holds is moved, and
        gradients have to be weighted: see `hpcstage.torch.weights`.
    num_replicas, rank: as in DistributedSampler; where they are not those of `group`, ranks cannot agree.
    group: the ranks of torch.distributed that share the dataset; default: all.

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
        """The epoch that begins next: another order, and another look at who holds what."""
        if epoch != self.epoch:
            self._begin = self._given = 0
        self.epoch = epoch

    @property
    def sampler(self) -> LocalityAwareSampler:
        """Itself: Lightning calls `set_epoch` of a batch sampler's sampler. It must not put one of its own in the place
        of this: `Trainer(use_distributed_sampler=False)`."""
        return self

    def __len__(self) -> int:
        """Steps of an epoch, on every rank the same."""
        steps, left = divmod(self._per_rank, self.batch_size)
        return steps + (left > 0 and not self.drop_last_batch)

    def __iter__(self) -> Iterator[list[int]]:
        """The batches of this rank."""
        begin, self._begin = self._begin, 0
        order, held = self._order(), self._holders()
        for step in range(begin, len(self)):
            self._given = step + 1
            yield self._own(order[step * self._stride : (step + 1) * self._stride], held)

    def global_size(self, step: int) -> int:
        """How many samples all ranks together have in a step: with `balance=False` the gradient's weight needs it."""
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
        """What all ranks read, step by step: DistributedSampler's order, padded or cut as there."""
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
        """Agreed once in an epoch, however often it is asked for."""
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
        """What must be the same on all ranks."""
        flags = (self.shuffle, self.drop_last, self.drop_last_batch, self.balance)
        return repr((self._samples, self.num_replicas, self.batch_size, self.seed, *flags))

    # ---- stopping and going on

    def state_dict(self, used: int | None = None) -> dict[str, int]:
        """Where the epoch is. `used`: how many batches of it training has used; without it, all that were given count.
        A DataLoader with workers takes batches ahead of training, so there it has to be said; torchdata's
        StatefulDataLoader, which calls this, knows."""
        return {"epoch": self.epoch, "seed": self.seed, "steps": self._given if used is None else used}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Goes on there: the rest of the epoch has the same global batches. Ranks and nodes that hold samples may be
        others by then; the number of ranks and the batch size may not."""
        if state["seed"] != self.seed:
            raise ValueError(f"the state is of seed {state['seed']}, the sampler has seed {self.seed}")
        self.epoch = state["epoch"]
        self._begin = self._given = state["steps"]
