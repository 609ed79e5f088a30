"""Small training programs that differ in how PyTorch is told what to read. They know nothing of hpcstage.

Owns the forms of samplers and loaders. Prints one line of JSON: a fingerprint of what was read in which order, of the
weights, and of every random state after each epoch, so that two runs can be compared to the bit.

    python loaders.py --data DIR --form random --workers 2 --epochs 2
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import pickle
import random
import resource
import time
from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import nn
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    DistributedSampler,
    RandomSampler,
    Sampler,
    Subset,
    SubsetRandomSampler,
    WeightedRandomSampler,
    random_split,
)

FEATURES = 64
Item = tuple[int, torch.Tensor]
Loaders = list[DataLoader[Item]]


def features(path: str) -> torch.Tensor:
    """What a file says, as a short vector."""
    with open(path, "rb") as file:
        raw = np.frombuffer(file.read(), dtype=np.uint8)
    rows = raw[: len(raw) // FEATURES * FEATURES].reshape(-1, FEATURES)
    return torch.from_numpy(rows.mean(axis=0, dtype=np.float32) / 128 - 1)


class Folder(Dataset[Item]):
    """In the manner of torchvision's ImageFolder: `samples` holds (path, class)."""

    def __init__(self, paths: list[str]) -> None:
        self.samples = [(path, number % 10) for number, path in enumerate(paths)]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Item:
        path, label = self.samples[index]
        return index, features(path) + 0.1 * label


class Pairs(Dataset[Item]):
    """An image and its mask: two files per sample, named relative to a root."""

    def __init__(self, root: str, names: list[str]) -> None:
        self.root = root
        half = len(names) // 2
        self.images, self.masks = names[:half], names[half : 2 * half]

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Item:
        image = features(os.path.join(self.root, self.images[index]))
        return index, image + features(os.path.join(self.root, self.masks[index]))


class Backwards(Sampler[int]):
    """A sampler that nobody knows; it draws from a state that is its own."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.rng = random.Random(5)

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[int]:
        offset = self.rng.randrange(self.size)
        return iter([(offset - index) % self.size for index in range(self.size)])


class Picky(RandomSampler):
    """A known sampler whose order was changed."""

    def __iter__(self) -> Iterator[int]:
        return iter(sorted(super().__iter__()))


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(3)


def _loader(options: argparse.Namespace, data: Dataset[Item], **more: object) -> DataLoader[Item]:
    if "batch_sampler" not in more:
        more.setdefault("batch_size", options.batch)
    return DataLoader(data, num_workers=options.workers, **more)  # type: ignore[arg-type]


def make(options: argparse.Namespace, names: list[str]) -> Loaders:
    """The loaders of a form, in the order in which the program uses them."""
    paths = [os.path.join(options.data, name) for name in names]
    folder, size, half = Folder(paths), len(paths), len(paths) // 2

    def one(**more: object) -> Loaders:
        return [_loader(options, folder, **more)]

    def split() -> Loaders:
        train, held = random_split(folder, [size - size // 5, size // 5], generator=_generator())
        return [_loader(options, train, shuffle=True), _loader(options, held)]

    known = RandomSampler(folder, generator=_generator())
    forms: dict[str, Callable[[], Loaders]] = {
        "sequential": one,
        "random": lambda: one(shuffle=True),
        "generator": lambda: one(shuffle=True, generator=_generator()),
        "replacement": lambda: one(sampler=RandomSampler(folder, replacement=True, num_samples=2 * size)),
        "subset-random": lambda: one(sampler=SubsetRandomSampler(range(0, size, 2))),
        "weighted": lambda: one(sampler=WeightedRandomSampler([1.0 + i % 7 for i in range(size)], size)),
        "distributed": lambda: one(sampler=DistributedSampler(folder, num_replicas=3, rank=1, seed=4)),
        "distributed-ordered": lambda: one(
            sampler=DistributedSampler(folder, num_replicas=3, rank=2, shuffle=False, drop_last=True)
        ),
        "batch-sampler": lambda: one(batch_sampler=BatchSampler(known, options.batch, drop_last=True)),
        "drop-last": lambda: one(shuffle=True, drop_last=True),
        "one-by-one": lambda: one(shuffle=True, batch_size=None),
        "persistent": lambda: one(shuffle=True, persistent_workers=options.workers > 0),
        "spawn": lambda: one(shuffle=True, multiprocessing_context="spawn" if options.workers else None),
        "subset": lambda: [_loader(options, Subset(folder, list(range(size - 1, -1, -2))), shuffle=True)],
        "concat": lambda: [_loader(options, ConcatDataset([Folder(paths[half:]), Folder(paths[:half])]), shuffle=True)],
        "train-and-validation": split,
        "image-and-mask": lambda: [_loader(options, Pairs(options.data, names), shuffle=True)],
        "unknown-sampler": lambda: one(sampler=Backwards(size)),
        "changed-sampler": lambda: one(sampler=Picky(folder)),
        "list-of-batches": lambda: one(batch_sampler=[[i, i + 1] for i in range(0, size - 1, 2)]),
    }
    if options.form == "?":
        print("\n".join(forms))
        raise SystemExit(0)
    return forms[options.form]()


class Fingerprint:
    """Hashes of what must not change."""

    def __init__(self) -> None:
        self.read = hashlib.sha256()
        self.states: list[str] = []
        self.samples = 0

    def batch(self, indices: torch.Tensor | int) -> None:
        """What the loader handed out."""
        listed = torch.as_tensor(indices).reshape(-1)
        self.samples += len(listed)
        self.read.update(listed.numpy().tobytes())

    def epoch(self, loaders: Loaders) -> None:
        """The random states now."""
        hashed = hashlib.sha256(torch.get_rng_state().numpy().tobytes())
        hashed.update(pickle.dumps(random.getstate()))
        hashed.update(pickle.dumps(np.random.get_state()))
        for loader in loaders:
            for owner in (loader, loader.sampler, getattr(loader.batch_sampler, "sampler", None)):
                generator = getattr(owner, "generator", None)
                if isinstance(generator, torch.Generator):
                    hashed.update(generator.get_state().numpy().tobytes())
        self.states.append(hashed.hexdigest()[:16])


def train(options: argparse.Namespace, loaders: Loaders) -> dict[str, object]:
    """Every epoch: each loader in turn. The random numbers of the program are drawn in between, as programs do."""
    net = nn.Sequential(nn.Linear(FEATURES, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 1))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.02)
    print_of = Fingerprint()
    first_s: list[float] = []
    for epoch in range(options.epochs):
        for loader in loaders:
            if isinstance(loader.sampler, DistributedSampler):
                loader.sampler.set_epoch(epoch)
            started_s = time.perf_counter()
            for number, (indices, values) in enumerate(loader):
                if number == 0:
                    first_s.append(time.perf_counter() - started_s)
                print_of.batch(indices)
                optimizer.zero_grad()
                net(values.reshape(-1, FEATURES)).square().mean().backward()
                optimizer.step()
                random.random()
                np.random.random()
        print_of.epoch(loaders)
    weights = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in net.parameters()))
    return {
        "samples": print_of.samples,
        "read": print_of.read.hexdigest()[:16],
        "states": print_of.states,
        "weights": weights.hexdigest()[:16],
        "first_batch_s": first_s,
        "peak_kib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
    }


def main() -> None:
    """One program."""
    parser = argparse.ArgumentParser(description="Reads files in one of many ways.")
    parser.add_argument("--data", required=True)
    parser.add_argument("--form", required=True, help="? lists them")
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--out", help="file for the line of JSON (default: standard output)")
    options = parser.parse_args()
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)
    torch.set_num_threads(1)
    names = sorted(entry.name for entry in os.scandir(options.data) if entry.is_file())
    line = json.dumps(train(options, make(options, names)))
    if options.out:
        with open(options.out, "w", encoding="utf-8") as file:
            file.write(line)
    else:
        print(line)


if __name__ == "__main__":
    main()
