"""Plans a job on several nodes: each node's part. Pure.

It assumes that all nodes have the budget that was found where the plan is made.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import log

from hpcstage.plan.budget import for_files, for_kept
from hpcstage.plan.placement.owners import needed_bytes
from hpcstage.plan.placement.placements import AUTO, Placement, Placing, decide, place_shares
from hpcstage.plan.types import Budget

MOST_LOOKED_AT = 4_000_000
"""At most about this many ids are looked at where each node needs a pass of its own."""


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
    budget goes; (replicate) what its budget allows, and others the rest of the placed files; (partition) its p-th part
    of these. Files that are placed nowhere come from the source, every time.
    """

    kind: Placing
    nodes: int
    placed: float
    """The share of the dataset that some node keeps."""
    kept: float
    """The share of the dataset that one node keeps, on average."""

    def hits(self, epoch: int) -> Hits:
        """Returns where the reads of an epoch are served.

        In the first epoch (1), placed files that a node does not fetch itself come from others.
        """
        if self.kind is Placing.PRIVATE:
            seen = 1 - (1 - 1 / self.nodes) ** (epoch - 1)
            local = min(self.kept, seen)
            return Hits(local, 0.0, 1 - local)
        passed_on = epoch == 1 or self.kind is Placing.PARTITION
        local = self.placed / self.nodes if passed_on else self.kept
        return Hits(local, self.placed - local, 1 - self.placed)

    def later(self, epochs: int) -> Hits:
        """Returns the mean hits of the epochs after the first."""
        if self.kind is not Placing.PRIVATE:
            return self.hits(2)
        if self.nodes == 1:
            return Hits(self.kept, 0.0, 1 - self.kept)
        count, missed = max(1, epochs - 1), 1 - 1 / self.nodes
        growing = count if self.kept == 1 else min(count, int(log(1 - self.kept) / log(missed)))
        unseen = missed * (1 - missed**growing) / (1 - missed)
        local = (growing - unseen + (count - growing) * self.kept) / count
        return Hits(local, 0.0, 1 - local)

    def source_share(self, epochs: int) -> float:
        """Returns how often the dataset leaves the source in all epochs together."""
        if self.kind is Placing.PRIVATE:
            return 1 + (epochs - 1) * self.later(epochs).source
        return self.placed + epochs * (1 - self.placed)


def alike(kind: Placing, nodes: int, budget_share: float, fitting: float = 1.0) -> Sharing:
    """Returns the sharing of nodes whose budgets each hold the share `budget_share` of the dataset (1: all of it), of
    which the share `fitting` is in files that a node has room for."""
    budget_share = max(0.0, min(fitting, budget_share))
    placed = budget_share if kind is Placing.PRIVATE else min(fitting, budget_share * nodes)
    return Sharing(kind, nodes, placed, placed / nodes if kind is Placing.PARTITION else budget_share)


@dataclass(frozen=True)
class Part:
    """One node's part, in files and in bytes of content."""

    node: int
    fetched_files: int
    fetched_bytes: int
    """Bytes that the node reads from the source, once."""
    kept_files: int
    kept_bytes: int
    others_files: int
    others_bytes: int
    """Bytes from other nodes: those that the node keeps and does not fetch; with partition those it reads per epoch."""


@dataclass(frozen=True)
class NodesPlan:
    """The plan of the job for `nodes` nodes."""

    nodes: int
    kind: str
    why: str
    room_bytes: int | None
    """Bytes of each node for files; None: unknown, taken as enough."""
    room_inodes: int | None
    unplaced_files: int
    unplaced_bytes: int
    """Those of which nodes keep nothing."""
    parts: tuple[Part, ...]


@dataclass(frozen=True)
class NodesInput:
    """The input of a plan for several nodes."""

    sizes: Sequence[int]
    """Sizes of files in bytes, by id."""
    budget: Budget | None
    directories: int
    """Number of directories, each of which takes a block and an inode on every node."""
    asked: str = AUTO

    @cached_property
    def needed_bytes(self) -> int:
        """The bytes that all files take on a disk."""
        return needed_bytes(self.sizes)

    @cached_property
    def files_budget(self) -> Budget:
        """The free budget of a node for files; where the budget is unknown, it is taken as enough."""
        if self.budget is None:
            return Budget(self.needed_bytes, len(self.sizes))
        return for_files(self.budget, self.directories)

    def kind(self, nodes: int) -> tuple[Placing, str]:
        """Returns the placement of so many nodes, and why."""
        return decide(self.asked, self.needed_bytes, len(self.sizes), [self.files_budget] * nodes)

    def sharing(self, nodes: int, kind: Placing) -> Sharing:
        """Returns the shares that alike nodes keep."""
        budget = self.files_budget
        if not kind.keeps_all(copies_fit=self._share(budget) == 1):
            budget = for_kept(budget)
        return alike(kind, nodes, self._share(budget), self._fitting(budget))

    def _fitting(self, budget: Budget) -> float:
        """Returns the share of the dataset that is in files that a node has room for."""
        if max(self.sizes, default=0) <= budget.size_bytes:
            return 1.0
        return sum(size for size in self.sizes if size <= budget.size_bytes) / sum(self.sizes)

    def _share(self, budget: Budget) -> float:
        """Returns the share of the dataset that fits, limited by bytes on disk or by inodes, whichever is short."""
        by_bytes = budget.size_bytes / self.needed_bytes if self.needed_bytes else 1.0
        by_inodes = budget.inodes / len(self.sizes) if self.sizes else 1.0
        return min(1.0, by_bytes, by_inodes)


def nodes_plan(given: NodesInput, nodes: int) -> NodesPlan:
    """Plans the job for `nodes` nodes that are alike."""
    kind, why = given.kind(nodes)
    placement = place_shares(kind, given.sizes, [given.files_budget] * nodes)
    parts, left_files, left_bytes = parts_of(placement)
    return NodesPlan(
        nodes=nodes,
        kind=kind.value,
        why=why,
        room_bytes=None if given.budget is None else given.files_budget.size_bytes,
        room_inodes=None if given.budget is None else given.files_budget.inodes,
        unplaced_files=left_files,
        unplaced_bytes=left_bytes,
        parts=parts,
    )


def parts_of(placement: Placement) -> tuple[tuple[Part, ...], int, int]:
    """Returns each node's part, and the number and bytes of the files that are placed nowhere."""
    sizes, count = placement.files.sizes, placement.nodes
    total_files, total_bytes = len(sizes), sum(sizes)
    if placement.kind is Placing.PRIVATE:
        alone = (total_files, total_bytes)
        return tuple(Part(node, *alone, *alone, 0, 0) for node in range(count)), 0, 0
    owned = placement.owned()
    placed_files, placed_bytes = sum(files for files, _ in owned), sum(size for _, size in owned)
    parts = []
    if placement.kind is Placing.PARTITION:
        for node, own in enumerate(owned):  # of its p-th part of the dataset it reads from others what it does not keep
            others = round((placed_files - own[0]) / count), round((placed_bytes - own[1]) / count)
            parts.append(Part(node, *own, *own, *others))
    else:
        copies = _copies(placement, owned, placed_files, placed_bytes)
        for node, own in enumerate(owned):
            files, size = copies[node % len(copies)]
            parts.append(Part(node, *own, own[0] + files, own[1] + size, files, size))
    return tuple(parts), total_files - placed_files, total_bytes - placed_bytes


def _copies(placement: Placement, owned: Sequence[tuple[int, int]], files: int, size: int) -> list[tuple[int, int]]:
    """Returns with replicate what each node holds of others' files; only of some nodes where each takes long."""
    if placement.files.copies_fit:
        return [(files - own[0], size - own[1]) for own in owned]
    looked_at = max(1, min(placement.nodes, MOST_LOOKED_AT // max(1, files)))
    spans = [placement.span(node) for node in range(looked_at)]
    return [(span.files, span.size_bytes) for span in spans]
