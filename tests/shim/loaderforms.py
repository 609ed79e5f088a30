"""A training program that knows nothing of hpcstage: every form of sampler and loader, one after the other.

    loaderforms.py DIRECTORY RESULT [SOCKET]

writes for each form what was read in which order and a digest of all random states and of a weight. With a socket it
says the form's name there, so that a test can tell whose announcements are whose.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import random
import socket
import struct
import sys
import warnings

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from hpcstage.torch import BundleRandomSampler

FILES = 40
GENERATOR = torch.Generator()


class Files(Dataset):
    def __init__(self, root: str) -> None:
        self.samples = [(os.path.join(root, f"f{index:03d}"), index % 3) for index in range(FILES)]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[int, float]:
        with open(self.samples[index][0], "rb") as file:
            return int(file.read()), random.random() + np.random.rand() + torch.rand(()).item()


class NoLength(Files):
    def __len__(self) -> int:
        raise TypeError("no length")


class Stream(IterableDataset):
    def __iter__(self):
        return iter([(1, 0.5), (2, 0.5)])


class Harmless(RandomSampler):
    pass


class Overridden(RandomSampler):
    def __iter__(self):
        return iter([*super().__iter__()][::-1])


class Counting(Sampler):
    """Has side effects, and draws from everywhere."""

    def __init__(self, n: int) -> None:
        self.n = n
        self.runs = 0

    def __iter__(self):
        self.runs += 1
        random.random()
        np.random.rand()
        return iter(torch.randperm(self.n).tolist()[self.runs :])

    def __len__(self) -> int:
        return self.n


class Raising(Sampler):
    def __iter__(self):
        yield 3
        raise OSError("no more")


class Infinite(Sampler):
    def __iter__(self):
        return itertools.count()


def epochs(loader, count: int = 2, before=None, take: int | None = None):
    for epoch in range(count):
        if before is not None:
            before(epoch)
        order = []
        try:
            for values, extra in itertools.islice(loader, take):
                order += torch.as_tensor(values).reshape(-1).tolist()
                learn(extra)
        except (OSError, RuntimeError) as error:
            order.append(type(error).__name__)
        yield order


WEIGHT = torch.zeros(4)


def learn(extra) -> None:
    WEIGHT.add_(torch.rand(4) * float(torch.as_tensor(extra).double().sum()))


def interleaved(root):
    loaders = [DataLoader(Files(root), 4, shuffle=True), DataLoader(Subset(Files(root), range(10)), 3)]
    orders = [[], []]
    for batches in itertools.zip_longest(*loaders):
        for order, batch in zip(orders, batches, strict=True):
            if batch is not None:
                order += batch[0].tolist()
    return orders


def distributed(root, **options):
    sampler = DistributedSampler(Files(root), num_replicas=3, rank=1, seed=5, **options)
    return epochs(DataLoader(Files(root), 4, sampler=sampler), before=sampler.set_epoch)


def kept_alive(root):
    loader = DataLoader(Files(root), 4, shuffle=True)
    first = iter(loader)
    order = next(first)[0].tolist()
    return [order, *epochs(loader, 1), order + [i for values, _ in first for i in values.tolist()]]


def shuffled(n: int, **options):
    return lambda root: epochs(DataLoader(Files(root), n, shuffle=True, **options))


def sampled(make, **options):
    return lambda root: epochs(DataLoader(Files(root), 4, sampler=make(Files(root)), **options))


FORMS = {
    "sequential": lambda root: epochs(DataLoader(Files(root), 4)),
    "shuffle": shuffled(4),
    "shuffle, last dropped": shuffled(7, drop_last=True),
    "shuffle, generator": shuffled(4, generator=GENERATOR),
    "shuffle, 2 workers": shuffled(4, num_workers=2),
    "shuffle, 2 workers kept": shuffled(4, num_workers=2, persistent_workers=True),
    "shuffle, spawned": shuffled(4, num_workers=1, multiprocessing_context="spawn"),
    "no batches": shuffled(None),
    "with replacement": sampled(lambda data: RandomSampler(data, replacement=True)),
    "fewer": sampled(lambda data: RandomSampler(data, num_samples=11)),
    "more": sampled(lambda data: RandomSampler(data, num_samples=95, generator=GENERATOR)),
    "subset random": sampled(lambda data: SubsetRandomSampler([5, 6, 7, 30, 31])),
    "weighted": sampled(lambda data: WeightedRandomSampler([0.1] * 20 + [1.0] * 20, 17)),
    "weighted, once each": sampled(lambda data: WeightedRandomSampler([0.1] * 40, 17, replacement=False)),
    "bundles": sampled(lambda data: BundleRandomSampler(data, 0.25)),
    "harmless subclass": sampled(Harmless),
    "sequence": sampled(lambda data: range(30, 2, -2)),
    "batches": lambda root: epochs(
        DataLoader(Files(root), batch_sampler=BatchSampler(RandomSampler(Files(root)), 6, True))
    ),
    "list of batches": lambda root: epochs(DataLoader(Files(root), batch_sampler=[[1, 2], [9, 3, 4]])),
    "batch as sampler": lambda root: epochs(DataLoader(Files(root), 2, sampler=SequentialSampler(range(9)))),
    "subset": lambda root: epochs(DataLoader(Subset(Files(root), list(range(39, 20, -1))), 4, shuffle=True)),
    "concat": lambda root: epochs(DataLoader(ConcatDataset([Files(root), Files(root)]), 4, shuffle=True)),
    "distributed": distributed,
    "distributed, last dropped": lambda root: distributed(root, drop_last=True),
    "distributed, in order": lambda root: distributed(root, shuffle=False),
    "interleaved": interleaved,
    "abandoned": lambda root: epochs(DataLoader(Files(root), 4, shuffle=True), take=2),
    "abandoned, 2 workers": lambda root: epochs(DataLoader(Files(root), 4, shuffle=True, num_workers=2), take=2),
    "abandoned, 2 workers kept": lambda root: epochs(
        DataLoader(Files(root), 4, shuffle=True, num_workers=2, persistent_workers=True), take=2
    ),
    "two iterators": kept_alive,
    "known but raises": sampled(lambda data: WeightedRandomSampler([0.0] * 3, 2)),
    # not to be announced
    "overridden": sampled(Overridden),
    "side effects": sampled(lambda data: Counting(20)),
    "raising": sampled(lambda data: Raising()),
    "infinite": lambda root: epochs(DataLoader(Files(root), 4, sampler=Infinite()), take=3),
    "too long": lambda root: epochs(
        DataLoader(Files(root), 4, sampler=RandomSampler(Files(root), replacement=True, num_samples=10**12)), take=3
    ),
    "one-shot": lambda root: epochs(DataLoader(Files(root), batch_sampler=iter([[1], [2, 3]]))),
    "unknown inside": lambda root: epochs(DataLoader(Files(root), batch_sampler=BatchSampler(Counting(20), 4, False))),
    "stream": lambda root: epochs(DataLoader(Stream(), 2)),
    "in memory": lambda root: epochs(DataLoader(TensorDataset(torch.arange(9), torch.arange(9)), 2, shuffle=True)),
    # again to be announced
    "no length": lambda root: epochs(DataLoader(NoLength(root), 4, sampler=SubsetRandomSampler(range(20)))),
}


def seed() -> None:
    WEIGHT.zero_()
    torch.manual_seed(1)
    random.seed(2)
    np.random.seed(3)
    GENERATOR.manual_seed(4)
    torch.randn(3)


def digest() -> str:
    states = (torch.get_rng_state().numpy().tobytes(), GENERATOR.get_state().numpy().tobytes(),
              repr(random.getstate()), repr(np.random.get_state()), WEIGHT.numpy().tobytes())  # fmt: skip
    return hashlib.sha256(repr(states).encode()).hexdigest()


def say(sock: str, form: str) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.connect(sock)
        connection.send(struct.pack("<BBHI", 1, 3, 0, os.getpid()) + b"form " + form.encode())
        connection.recv(8)


def main() -> None:
    root, result, *sock = sys.argv[1:]
    warnings.simplefilter("ignore", UserWarning)
    outcome = {}
    for name, form in FORMS.items():
        if sock:
            say(sock[0], name)
        seed()
        digests, orders = [], []
        for order in form(root):
            orders.append(order)
            digests.append(digest())
        outcome[name] = {"orders": orders, "digests": digests}
    with open(result, "w") as file:
        json.dump(outcome, file)


if __name__ == "__main__":
    main()
