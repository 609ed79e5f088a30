"""Computes which files a program with a named sampler of PyTorch will read, epoch by epoch. Pure.

This module owns which file an index of the program's dataset is taken for, and how ranks of a node are merged. The
arithmetic of samplers is in `sampling`.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice

from hpcstage.errors import UsageError
from hpcstage.plan.dataset.manifest import Manifest
from hpcstage.plan.dataset.pathlist import PathList
from hpcstage.plan.order import sampling
from hpcstage.plan.order.orders import SAMPLER, from_ids
from hpcstage.plan.types import Order

SEQUENTIAL, RANDOM, DISTRIBUTED = "sequential", "random", "distributed"
ORDERED_EPOCHS = 3
"""The order of copying follows from this many epochs: on a node with some of the ranks each epoch reads new files."""


@dataclass(frozen=True)
class SamplerAsked:
    """A sampler as the user named it, and the loader around it."""

    sampler: str
    seed: int = 0
    epochs: int = 1
    shuffle: bool = True
    sampler_drop_last: bool = False
    """The distributed sampler's own drop_last."""
    replicas: int = 1
    ranks: tuple[int, ...] = (0,)
    """The ranks of the node."""
    batch: int = 1
    drop_last: bool = False
    """The loader's drop_last: the last batch is left out where it is not full."""
    persistent_workers: bool = False

    def text(self) -> str:
        """Describes the sampler for people."""
        if self.sampler == SEQUENTIAL:
            return "sequential"
        if self.sampler == RANDOM:
            return f"random, generator with seed {self.seed}"
        how = f"seed {self.seed}" if self.shuffle else "not shuffled"
        of = "all" if len(self.ranks) == self.replicas else _spans(self.ranks)
        return f"distributed over {self.replicas:,} ranks (here: {of}), {how}"


@dataclass(frozen=True)
class EpochReading:
    """The reads of one epoch on the node."""

    epoch: int
    """The epoch's number from 0, as `set_epoch` counts."""
    indices: array[int]
    """Indices of the program's dataset in reading order; several ranks take turns."""


@dataclass(frozen=True)
class Readings:
    """All epochs that were asked for. The iteration computes each when it reaches it: a moment for a million files."""

    asked: SamplerAsked
    dataset: array[int]
    """Ids of files by index of the program's dataset."""
    about: str
    """Text that says which files are taken for the program's dataset."""

    def __iter__(self) -> Iterator[EpochReading]:
        orders = islice(_epochs(self.asked, len(self.dataset)), self.asked.epochs)
        return (EpochReading(epoch, order) for epoch, order in enumerate(orders))

    @property
    def samples(self) -> int:
        """Returns how many samples the node reads in each epoch, including those read twice to fill up."""
        asked, n = self.asked, len(self.dataset)
        if asked.sampler == DISTRIBUTED:
            n = _rank(asked, n, asked.ranks[0]).samples
        return (n - n % asked.batch if asked.drop_last else n) * len(asked.ranks)

    def rank_at(self, position: int) -> int:
        """Returns the rank that reads at a position of an epoch; positions begin with 0."""
        return self.asked.ranks[position % len(self.asked.ranks)]

    def order(self) -> Order:
        """Returns the order in which the program needs the files first."""
        indices = chain.from_iterable(reading.indices for reading in islice(self, ORDERED_EPOCHS))
        return from_ids(map(self.dataset.__getitem__, indices), max(self.dataset, default=-1) + 1, SAMPLER)


def readings(asked: SamplerAsked, manifest: Manifest, lists: Sequence[PathList] = ()) -> Readings:
    """Computes the reads of a program whose dataset has the lists' files, or else all files. Raises UsageError."""
    dataset, about = _listed(manifest, lists) if lists else _by_class(manifest)
    if not dataset:
        raise UsageError("the sampler's dataset holds no file", "check --data")
    if len(dataset) > sampling.MOST_SAMPLES:
        raise UsageError(f"{len(dataset):,} files are too many for --order sampler", "use --order manifest")
    return Readings(asked, dataset, about)


def _epochs(asked: SamplerAsked, n: int) -> Iterator[array[int]]:
    if asked.sampler == RANDOM:
        orders = sampling.random_epochs(n, asked.seed, persistent_workers=asked.persistent_workers)
        yield from (sampling.batched(order, asked.batch, drop_last=asked.drop_last) for order in orders)
    for epoch in range(asked.epochs):
        if asked.sampler == SEQUENTIAL:
            parts = [sampling.sequential(n)]
        else:
            parts = sampling.orders_of([_rank(asked, n, rank).later(epoch) for rank in asked.ranks])
        yield sampling.interleave([sampling.batched(part, asked.batch, drop_last=asked.drop_last) for part in parts])


def _rank(asked: SamplerAsked, n: int, rank: int) -> sampling.Distributed:
    return sampling.Distributed(n, asked.replicas, rank, asked.shuffle, asked.sampler_drop_last, asked.seed)


def _spans(ranks: Sequence[int]) -> str:
    return f"{ranks[0]}-{ranks[-1]}" if len(ranks) > 1 and ranks[-1] - ranks[0] == len(ranks) - 1 else (
        ", ".join(map(str, ranks))
    )  # fmt: skip


# ---- the program's dataset


def _listed(manifest: Manifest, lists: Sequence[PathList]) -> tuple[array[int], str]:
    found = (manifest.find_source(path) for item in lists for path in item.paths)
    ids = array("I", (file_id for file_id in found if file_id is not None))
    names = " ".join(item.argument for item in lists)
    return ids, f"index i of the program's dataset is taken for the i-th path of {names}"


def _by_class(manifest: Manifest) -> tuple[array[int], str]:
    ids: list[int] = []
    for index in range(len(manifest.datasets)):
        of_dataset = manifest.ids_of(index)
        in_classes = [file_id for file_id in of_dataset if b"/" in manifest.path(file_id)]
        ids += sorted(in_classes or of_dataset, key=lambda file_id: _class_key(manifest.path(file_id)))
    text = (
        f"index i of the program's dataset is taken for the i-th of {len(ids):,} files, sorted by class, then by name"
    )
    beside = len(manifest) - len(ids)
    left_out = f", {beside:,} outside of a class left out" if beside else ""
    return array("I", ids), f"{text}{left_out}, as ImageFolder does"


def _class_key(path: bytes) -> bytes:
    """Returns a key that sorts as ImageFolder does: by class, then by directory, then by file name.

    The order differs from the manifest's, which compares whole paths, so that `a-b/1` comes before `a/1`.
    """
    directory, _, name = path.rpartition(b"/")
    return b"\0".join((directory.partition(b"/")[0], directory, name))
