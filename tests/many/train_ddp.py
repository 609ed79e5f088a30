"""Trains a small network on files: PyTorch's DistributedSampler, gloo, started by torchrun. Writes the weights."""

from __future__ import annotations

import gc
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

INPUTS = 256


class Files(Dataset):  # type: ignore[type-arg]
    """One sample per file; its label follows from its content."""

    def __init__(self, root: Path) -> None:
        self.samples = sorted(str(path) for path in root.rglob("*.bin"))

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        with open(self.samples[index], "rb") as file:
            data = torch.frombuffer(bytearray(file.read()), dtype=torch.uint8)
        return data[:INPUTS].float() / 255, data.long().sum() % 10


def main(root: Path, epochs: int, workers: int, out: Path) -> None:
    """The program."""
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(
        nn.Sequential(nn.Linear(INPUTS, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 10))
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    dataset = Files(root)
    sampler: DistributedSampler[Any] = DistributedSampler(dataset, seed=7)
    loader = DataLoader(dataset, batch_size=8, sampler=sampler, num_workers=workers)
    losses = []
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for inputs, labels in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(inputs), labels)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            losses.append(loss.item())
    if dist.get_rank() == 0:
        torch.save({"weights": model.module.state_dict(), "losses": losses}, out)
    # Python ends while gloo's thread still lets go of the last gradients: PyTorch then aborts. The barrier comes after.
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
    gc.collect()  # the model holds the process group, whose threads must end before Python does
