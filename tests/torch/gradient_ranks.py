"""A rank that trains: gradients of each step by PyTorch's sampler, by LocalityAwareSampler, and of uneven batches.

python gradient_ranks.py DIRECTORY RANK WORLD
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from locality_ranks import NODE_DIR, ROOT, join
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from hpcstage.torch.elastic.scaling import WeightedMean
from hpcstage.torch.samplers.locality import LocalityAwareSampler

SAMPLES, INPUTS, BATCH, SEED = 210, 12, 8, 11


def dataset() -> TensorDataset:
    """Inputs and values to be learnt, in float64."""
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(SAMPLES, INPUTS, generator=generator, dtype=torch.float64)
    return TensorDataset(inputs, torch.sin(inputs.sum(1, keepdim=True)))


def gradients(batches: Iterable[Any], mean: WeightedMean | None = None) -> list[torch.Tensor]:
    """The averaged gradient of each step of a training, and the weights at its end. With `mean`, batches come with the
    size of the global one."""
    torch.manual_seed(3)
    layers = nn.Sequential(nn.Linear(INPUTS, 16), nn.Tanh(), nn.Linear(16, 1)).double()
    model = DistributedDataParallel(layers)
    if mean is not None:
        model.register_comm_hook(mean, WeightedMean.hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for inputs, values, *whole in batches:
        optimizer.zero_grad()
        if mean is not None:
            mean.set(len(inputs), *whole)
        nn.functional.mse_loss(model(inputs), values).backward()
        found.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
        optimizer.step()
    return [*found, torch.cat([p.detach().flatten() for p in model.parameters()])]


def uneven(data: TensorDataset, rank: int, world: int) -> Iterable[Any]:
    """The global batches of PyTorch's sampler, of which each rank has more than the one before."""
    ranks = [DistributedSampler(data, world, other, seed=SEED) for other in range(world)]
    for sampler in ranks:
        sampler.set_epoch(1)
    order = [index for together in zip(*ranks, strict=True) for index in together]
    shares = world * (world + 1) // 2
    for begin in range(0, len(order), BATCH * world):
        batch = order[begin : begin + BATCH * world]
        first, last = (len(batch) * (at * (at + 1) // 2) // shares for at in (rank, rank + 1))
        yield *data[batch[first:last]], len(batch)


def main(directory: Path, rank: int, world: int) -> None:
    """All ways, on the same data."""
    join(directory, rank, world)
    os.environ[NODE_DIR] = os.fspath(directory / f"node{rank % 2}")
    data = dataset()
    paths = [f"{ROOT}/{n:03}" for n in range(SAMPLES)]
    regular = DistributedSampler(data, seed=SEED)
    local = LocalityAwareSampler(data, BATCH, seed=SEED, paths=paths)
    for sampler in (regular, local):
        sampler.set_epoch(1)
    found = {
        "regular": gradients(DataLoader(data, BATCH, sampler=regular)),
        "locality": gradients(DataLoader(data, batch_sampler=local)),
        "weighted": gradients(uneven(data, rank, world), WeightedMean()),
        "unweighted": gradients(part[:2] for part in uneven(data, rank, world)),
    }
    torch.save(found, directory / f"found.{rank}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
