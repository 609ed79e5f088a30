"""Says which shares of one dataset nodes that are alike keep, and from where they get the rest. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from hpcstage.plan.budget import for_files, for_kept
from hpcstage.plan.placement.placements import Placing, decide
from hpcstage.plan.types import Budget


@dataclass(frozen=True)
class Hits:
    """The shares of reads by where they are served; they add up to 1."""

    local: float
    peers: float
    source: float


@dataclass(frozen=True)
class Sharing:
    """A way in which nodes that are alike keep one dataset.

    In each epoch every node reads another random p-th part of it, as a DistributedSampler deals it. A node that holds
    copies of its own has (private) what it has read, after e epochs 1 - (1 - 1/p)^e of the dataset, as far as its
    budget goes; (replicate) all files; (partition) its p-th part of those that are placed. Files that are placed
    nowhere come from the source, every time.
    """

    kind: Placing
    nodes: int
    placed: float
    """The share of the dataset that some node keeps."""

    @property
    def kept(self) -> float:
        """The share of the dataset that one node keeps in the end."""
        return self.placed / self.nodes if self.kind is Placing.PARTITION else self.placed

    def hits(self, epoch: int) -> Hits:
        """Returns where the reads of an epoch are served.

        In the first epoch (1), placed files that a node does not fetch itself come from others.
        """
        if self.kind is Placing.PRIVATE:
            local = min(self.placed, 1 - (1 - 1 / self.nodes) ** (epoch - 1))
            return Hits(local, 0.0, 1 - local)
        local = self.placed / self.nodes if epoch == 1 else self.kept
        return Hits(local, self.placed - local, 1 - self.placed)

    def staged(self) -> Hits:
        """Returns where reads are served once all is copied."""
        return Hits(self.kept, self.placed - self.kept, 1 - self.placed)


def alike(kind: Placing, nodes: int, budget_share: float) -> Sharing:
    """Returns the sharing of nodes whose budgets each hold the share `budget_share` of the dataset (1: all of it)."""
    share = max(0.0, min(1.0, budget_share))
    return Sharing(kind, nodes, min(1.0, share * nodes) if kind is Placing.PARTITION else share)


def mean_hits(hits: Iterable[Hits]) -> Hits:
    """Returns the mean of several epochs."""
    columns = list(zip(*((one.local, one.peers, one.source) for one in hits), strict=True))
    return Hits(*(sum(column) / len(column) for column in columns))


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
    """Bytes that one node gets from others: with partition in each epoch, else once."""
    unplaced_bytes: float
    """Bytes of which nodes keep nothing."""


def nodes_plan(
    files: int, size_bytes: int, disk_bytes: int, room: Budget | None, asked: str, nodes: int
) -> tuple[NodesPlan, Sharing]:
    """Plans the job for `nodes` nodes that are alike, with `files` of `size_bytes`, which take `disk_bytes` on a disk.
    `room` is a node's budget for files; None: not known."""
    budget = room or Budget(disk_bytes, files)
    kind, why = decide(asked, disk_bytes, files, [budget] * nodes)
    kept = budget if kind.keeps_all else for_kept(budget)
    by_bytes = kept.size_bytes / disk_bytes if disk_bytes else 1.0
    sharing = alike(kind, nodes, min(by_bytes, kept.inodes / files if files else 1.0))
    is_private, staged = kind is Placing.PRIVATE, sharing.staged()
    fetched = sharing.placed if is_private else sharing.placed / nodes
    peers = staged.peers / nodes if kind is Placing.PARTITION else sharing.kept - fetched
    plan = NodesPlan(
        nodes,
        kind.value,
        why,
        None if room is None else room.size_bytes,
        None if room is None else room.inodes,
        fetched_bytes=fetched * size_bytes,
        kept_bytes=sharing.kept * size_bytes,
        peers_bytes=peers * size_bytes,
        unplaced_bytes=0.0 if is_private else (1 - sharing.placed) * size_bytes,
    )
    return plan, sharing


def room_for_files(budget: Budget | None, directories: int) -> Budget | None:
    """Returns a node's budget for files, beside so many directories; None where the budget is not known."""
    return None if budget is None else for_files(budget, directories)
