"""A rank that trains: gradients of each step by PyTorch's sampler, and by LocalityAwareSampler balanced and not.

python gradient_ranks.py DIRECTORY RANK WORLD
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from locality_ranks import NODE_DIR, ROOT, join
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from hpcstage.torch.locality import LocalityAwareSampler
from hpcstage.torch.weights import WeightedMean, gradient_weight

SAMPLES, INPUTS, BATCH, SEED = 210, 12, 8, 11
Weigh = Callable[[int, int], float]


def dataset() -> TensorDataset:
    """Inputs and values to be learnt, in float64."""
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(SAMPLES, INPUTS, generator=generator, dtype=torch.float64)
    return TensorDataset(inputs, torch.sin(inputs.sum(1, keepdim=True)))


def gradients(batches: Iterable[Any], weigh: Weigh, mean: WeightedMean | None = None) -> list[torch.Tensor]:
    """The averaged gradient of each step of a training, and the weights at its end."""
    torch.manual_seed(3)
    layers = nn.Sequential(nn.Linear(INPUTS, 16), nn.Tanh(), nn.Linear(16, 1)).double()
    model = DistributedDataParallel(layers)
    if mean is not None:
        model.register_comm_hook(mean, WeightedMean.hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for step, (inputs, values) in enumerate(batches):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), values)
        (loss * weigh(step, len(inputs))).backward()
        found.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
        optimizer.step()
    return [*found, torch.cat([p.detach().flatten() for p in model.parameters()])]


def main(directory: Path, rank: int, world: int) -> None:
    """All ways, on the same data."""
    join(directory, rank, world)
    os.environ[NODE_DIR] = os.fspath(directory / f"node{rank % 2}")
    data = dataset()
    paths = [f"{ROOT}/{n:03}" for n in range(SAMPLES)]
    regular = DistributedSampler(data, seed=SEED)
    regular.set_epoch(1)
    found = {"regular": gradients(DataLoader(data, BATCH, sampler=regular), lambda *_: 1.0)}
    sizes = {}
    for name, balance in (("balanced", True), ("loss", False), ("hook", False), ("unweighted", False)):
        sampler = LocalityAwareSampler(data, BATCH, seed=SEED, balance=balance, paths=paths)
        sampler.set_epoch(1)
        sizes[name] = [len(batch) for batch in sampler]
        mean = WeightedMean() if name == "hook" else None

        def weigh(step: int, local: int, name: str = name, sampler: Any = sampler, mean: Any = mean) -> float:
            if mean is not None:
                mean.set(local, sampler.global_size(step))
            return gradient_weight(local, sampler.global_size(step), world) if name == "loss" else 1.0

        found[name] = gradients(DataLoader(data, batch_sampler=sampler), weigh, mean)
    torch.save((found, sizes), directory / f"found.{rank}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
