"""Ranks that load or train with PyTorch's DistributedSampler or with LocalityAwareSampler: gloo, a file per sample.

    python started.py 4 locality.py --data DIR --sampler locality --epochs 3 --out FILE

`--preprocess-s` is slept for each sample: what a node's processors would be busy
with, without those of this machine. `--train` learns to tell classes from the files' bytes, in float64. Rank 0 writes
when each epoch began and ended, and of a training the averaged gradient of each step of the first epoch and the
accuracy on samples that nobody trained with.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from hpcstage.torch.samplers.locality import LocalityAwareSampler

CLASSES, FEATURES, CONTRAST, ALIKE = 10, 256, 24.0, 0.2
SAMPLERS = ("regular", "locality")


def sample_bytes(index: int, seed: int) -> bytes:
    """A sample of class `index % CLASSES`: noise, and what its class has in common."""
    common = torch.randn(FEATURES, generator=torch.Generator().manual_seed(index % CLASSES))
    noise = torch.randn(FEATURES, generator=torch.Generator().manual_seed(1000 + seed * 1_000_000 + index))
    return bytes((128 + CONTRAST * (ALIKE * common + noise)).clamp(0, 255).to(torch.uint8).tolist())


def write_samples(root: Path, count: int, seed: int) -> None:
    """Files that a training can learn from."""
    root.mkdir(parents=True)
    for index in range(count):
        (root / f"{index:06d}.bin").write_bytes(sample_bytes(index, seed))


def features(data: bytes) -> torch.Tensor:
    """What the network sees of a file."""
    return (torch.frombuffer(bytearray(data[:FEATURES]), dtype=torch.uint8).double() - 128) / CONTRAST


class Files(Dataset[Any]):
    """One sample per file of a directory."""

    def __init__(self, root: Path, preprocess_s: float) -> None:
        self.samples = [(path, number % CLASSES) for number, path in enumerate(sorted(map(str, root.iterdir())))]
        self._preprocess_s = preprocess_s

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        path, label = self.samples[index]
        with open(path, "rb") as file:
            data = file.read()
        time.sleep(self._preprocess_s)
        return features(data), label


def loader_of(given: argparse.Namespace, dataset: Files) -> tuple[DataLoader[Any], Any]:
    """The loader of an arm, and the sampler whose epoch has to be set."""
    if given.sampler == "regular":
        regular: DistributedSampler[Any] = DistributedSampler(dataset, seed=given.seed)
        return DataLoader(dataset, given.batch, sampler=regular, num_workers=given.workers), regular
    ours = LocalityAwareSampler(dataset, given.batch, seed=given.seed)
    return DataLoader(dataset, batch_sampler=ours, num_workers=given.workers), ours


def run(given: argparse.Namespace) -> None:
    """One rank."""
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    loader, sampler = loader_of(given, Files(given.data, given.preprocess_s))
    found: dict[str, Any] = {"epochs_s": []}
    learner = Learner() if given.train else None
    for epoch in range(given.epochs):
        sampler.set_epoch(epoch)
        dist.barrier()
        began = time.monotonic()
        for batch in loader:
            if learner is not None:
                learner.step(*batch)
        dist.barrier()
        found["epochs_s"].append(time.monotonic() - began)
        if learner is not None and epoch == 0:
            found["gradients"], learner.gradients = torch.stack(learner.gradients), []
    if learner is not None:
        found["accuracy"] = learner.accuracy(given.held_out)
    if dist.get_rank() == 0:
        torch.save(found, given.out)
    dist.destroy_process_group()


class Learner:
    """A small network, the same on all ranks."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        layers = nn.Sequential(nn.Linear(FEATURES, 64), nn.ReLU(), nn.Linear(64, CLASSES)).double()
        self.model = nn.parallel.DistributedDataParallel(layers)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05)
        self.gradients: list[torch.Tensor] = []

    def step(self, inputs: torch.Tensor, labels: torch.Tensor) -> None:
        """One step of all ranks."""
        self.optimizer.zero_grad()
        loss = nn.functional.cross_entropy(self.model(inputs), labels)
        loss.backward()  # type: ignore[no-untyped-call]
        self.gradients.append(torch.cat([p.grad.flatten() for p in self.model.parameters() if p.grad is not None]))
        self.optimizer.step()

    def accuracy(self, count: int) -> float:
        """In percent, on samples of another seed."""
        inputs = torch.stack([features(sample_bytes(index, seed=1)) for index in range(count)])
        with torch.no_grad():
            right = self.model.module(inputs).argmax(1) == torch.arange(count) % CLASSES
        return 100 * float(right.double().mean())


def main(argv: Sequence[str] | None = None) -> int:
    """The program."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--sampler", choices=SAMPLERS, default="regular")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--preprocess-s", type=float, default=0.0)
    parser.add_argument("--train", action="store_true")
    parser.add_argument("--held-out", type=int, default=2000)
    parser.add_argument("--out", type=Path, required=True)
    run(parser.parse_args(argv))
    return 0


if __name__ == "__main__":
    sys.exit(main())
