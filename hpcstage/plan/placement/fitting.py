"""Computes how much of the order fits into the budget. Pure.

A copy takes whole blocks and one inode, a directory one inode and a block; the daemon's queue counts likewise.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from hpcstage.plan.blocks import BLOCK_BYTES, blocks_bytes
from hpcstage.plan.dataset.manifest import Manifest
from hpcstage.plan.types import Budget


@dataclass(frozen=True)
class Fit:
    """The part of the order that can be staged: from its beginning to the first file that does not fit."""

    files: int
    size_bytes: int
    """Bytes on the local disk, in whole blocks."""
    inodes: int
    fits: bool
    share: float
    """The share of the dataset's bytes that fits (of its files, where all are empty)."""
    needed_bytes: int
    """Bytes that all files would take on the local disk."""
    needed_inodes: int


def fit(manifest: Manifest, ids: Iterable[int], budget: Budget) -> Fit:
    """Fills the budget in the order of `ids`, which are all files' (see `orders.complete`)."""
    counter = _Counter(manifest)
    files = content = 0
    taken: tuple[int, int] = (0, 0)
    fits = True
    for file_id in ids:
        size = counter.add(file_id)
        fits = fits and counter.size_bytes <= budget.size_bytes and counter.inodes <= budget.inodes
        if fits:
            files, content, taken = files + 1, content + size, (counter.size_bytes, counter.inodes)
    total = manifest.total_bytes
    share = content / total if total else files / max(1, len(manifest))
    return Fit(files, *taken, fits, 1.0 if fits else share, counter.size_bytes, counter.inodes)


class _Counter:
    """Adds up blocks and inodes; counts each directory once."""

    def __init__(self, manifest: Manifest) -> None:
        self._manifest = manifest
        self._known: set[tuple[int, bytes]] = set()
        self.size_bytes = 0
        self.inodes = 0

    def add(self, file_id: int) -> int:
        size = self._manifest.size(file_id)
        self.size_bytes += blocks_bytes(size)
        self.inodes += 1
        path = self._manifest.path(file_id)
        directory = path[: max(0, path.rfind(b"/"))]
        self._add_directory(self._manifest.dataset_of(file_id), directory)
        return size

    def _add_directory(self, dataset: int, directory: bytes) -> None:
        while (dataset, directory) not in self._known:
            self._known.add((dataset, directory))
            self.inodes += 1
            self.size_bytes += BLOCK_BYTES
            if not directory:
                return
            directory = directory[: max(0, directory.rfind(b"/"))]
