"""Says what each node of a job fetches, keeps and gets from others, where all nodes are alike. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hpcstage.plan.budget import for_kept
from hpcstage.plan.placement.owners import needed_bytes
from hpcstage.plan.placement.placements import Placing, decide
from hpcstage.plan.types import Budget


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
