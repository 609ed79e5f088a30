"""Computes what fits: how much of the order on one node, and what each of a job's nodes, which are alike, fetches,
keeps and gets from others. Pure.

A copy takes whole blocks and one inode, a directory one inode and a block; the daemon's queue counts likewise.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from hpcstage.plan.blocks import BLOCK_BYTES, blocks_bytes
from hpcstage.plan.budget import for_kept
from hpcstage.plan.dataset.manifest import Manifest
from hpcstage.plan.placement.owners import needed_bytes
from hpcstage.plan.placement.placements import Placing, decide
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


@dataclass(frozen=True)
class NodesPlan:
    """The plan of a job for `nodes` nodes, all with the budget that was found where the plan is made."""

    nodes: int
    kind: str
    why: str
    room_bytes: int | None
    """Bytes of each node for files; None: unknown, taken as enough."""
    room_inodes: int | None
    fetched_bytes: float
    """Bytes that one node reads from the source, to keep or pass them on; of files that are placed nowhere, none."""
    kept_bytes: float
    """Bytes that one node keeps in the end."""
    peers_bytes: float
    """Bytes that one node gets from others: with partition in each epoch, in which it reads another p-th part, else
    once."""
    unplaced_bytes: float
    """Bytes of which nodes keep nothing."""


def nodes_plan(sizes: Sequence[int], room: Budget | None, asked: str, nodes: int) -> NodesPlan:
    """Plans the job for `nodes` nodes, with files of these sizes. `room` is a node's budget for files; None: not
    known."""
    files, size_bytes, disk_bytes = len(sizes), sum(sizes), needed_bytes(sizes)
    budget = room or Budget(disk_bytes, files)
    kind, why = decide(asked, disk_bytes, files, [budget] * nodes)
    kept = budget if kind.keeps_all else for_kept(budget)
    share = min(1.0, kept.size_bytes / max(1, disk_bytes), kept.inodes / max(1, files))
    too_large = sum(size for size in sizes if size > kept.size_bytes) / max(1, size_bytes)
    share = min(share, 1.0 - too_large)
    placed = min(1.0 - too_large, share * nodes) if kind is Placing.PARTITION else share
    fetched = placed if kind is Placing.PRIVATE else placed / nodes
    if kind is Placing.PARTITION:
        share, peers = fetched, (placed - fetched) / nodes
    else:
        peers = share - fetched
    return NodesPlan(
        nodes,
        kind.value,
        why,
        None if room is None else room.size_bytes,
        None if room is None else room.inodes,
        fetched_bytes=fetched * size_bytes,
        kept_bytes=share * size_bytes,
        peers_bytes=peers * size_bytes,
        unplaced_bytes=0.0 if kind is Placing.PRIVATE else (1 - placed) * size_bytes,
    )
