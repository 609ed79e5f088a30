"""Computes how much of the order fits into the budget. Pure.

A copy takes whole blocks and one inode, a directory one inode and a block; the daemon's queue counts likewise.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
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
    known: set[tuple[int, bytes]] = set()
    files = content = size_bytes = inodes = 0
    taken: tuple[int, int] = (0, 0)
    fits = True
    for file_id in ids:
        size = manifest.size(file_id)
        size_bytes, inodes = size_bytes + blocks_bytes(size), inodes + 1
        for directory in _directories(manifest, file_id):
            if directory in known:
                break
            known.add(directory)
            size_bytes, inodes = size_bytes + BLOCK_BYTES, inodes + 1
        fits = fits and size_bytes <= budget.size_bytes and inodes <= budget.inodes
        if fits:
            files, content, taken = files + 1, content + size, (size_bytes, inodes)
    total = manifest.total_bytes
    share = content / total if total else files / max(1, len(manifest))
    return Fit(files, *taken, fits, 1.0 if fits else share, size_bytes, inodes)


def _directories(manifest: Manifest, file_id: int) -> Iterator[tuple[int, bytes]]:
    """Yields the directories above a file in its dataset, with the dataset, up to the root."""
    dataset, path = manifest.dataset_of(file_id), manifest.path(file_id)
    while path:
        path = path[: max(0, path.rfind(b"/"))]
        yield dataset, path
