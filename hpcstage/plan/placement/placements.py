"""Decides which node reads which file from the source, and which nodes keep it. Pure, and the same on every node.

This module answers the two questions of a node group that need no message: which node fetches an id, and which nodes
hold it. Every node computes the answers from what all nodes know: the manifest's sizes and the nodes' budgets.

    private    each node reads from the source what its own ranks read
    replicate  one node reads a file from the source, and all nodes get a copy; every node has room for all files
    partition  one node reads a file from the source and keeps it; others ask that node

A budget counts whole blocks and one inode per file. The caller subtracts what directories take. Files for which
no node has room are placed nowhere: a node that needs one reads the source.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from enum import Enum
from itertools import compress, repeat
from operator import eq, ne

from hpcstage.plan.budget import ASKED, for_kept
from hpcstage.plan.placement.owners import NOBODY, dealt_within, equal, free_budgets
from hpcstage.plan.types import Budget
from hpcstage.units import format_size


class Placing(str, Enum):
    """A way in which nodes share files."""

    PRIVATE = "private"
    REPLICATE = "replicate"
    PARTITION = "partition"

    @property
    def keeps_all(self) -> bool:
        """Whether every node ends with every file (with PRIVATE: as far as its budget allows)."""
        return self is not Placing.PARTITION


class Placement:
    """Says by id which node fetches it and which nodes keep it; `place` makes it."""

    def __init__(self, kind: Placing, sizes: Sequence[int], nodes: int, owners: array[int]) -> None:
        """Only `place` calls this."""
        self.kind = kind
        self.sizes = sizes
        """Sizes in bytes, by id."""
        self.nodes = nodes
        self._owners = owners

    def fetcher(self, file_id: int, asking: int = 0) -> int:
        """Returns the only node that reads an id from the source; with PRIVATE, and for unplaced ids, `asking`."""
        if self.kind is Placing.PRIVATE:
            return asking
        owner = self._owners[file_id]
        return asking if owner == NOBODY else owner

    def keeps(self, file_id: int, node: int) -> bool:
        """Returns whether a node holds an id for good (with PRIVATE: as far as its own budget goes)."""
        return self.kind.keeps_all or self._owners[file_id] == node

    def own(self, node: int) -> array[int]:
        """Returns the ids that a node fetches from the source, ascending."""
        if self.kind is Placing.PRIVATE:
            return array("I", range(len(self.sizes)))
        return array("I", compress(range(len(self.sizes)), map(eq, self._owners, repeat(node))))

    def others(self, node: int) -> array[int]:
        """Returns the ids that a node asks other nodes for without a request: those that it keeps and does not
        fetch."""
        if self.kind is not Placing.REPLICATE:
            return array("I")
        return array("I", compress(range(len(self.sizes)), map(ne, self._owners, repeat(node))))

    def unplaced(self) -> array[int]:
        """Returns the ids of which nodes keep nothing: a node that needs one reads the source, every time."""
        return array("I", compress(range(len(self.sizes)), map(eq, self._owners, repeat(NOBODY))))


def place(kind: Placing, sizes: Sequence[int], nodes: Sequence[Budget]) -> Placement:
    """Deals ids to nodes, with PARTITION within the budgets. `sizes` are bytes by id, such as `Manifest.sizes`."""
    if not nodes:
        raise ValueError("a placement needs a node")
    if kind is not Placing.PARTITION:
        return Placement(kind, sizes, len(nodes), equal(len(sizes), len(nodes)))
    return Placement(kind, sizes, len(nodes), dealt_within(sizes, free_budgets(nodes)))


def place_shares(kind: Placing, sizes: Sequence[int], nodes: Sequence[Budget]) -> Placement:
    """Places files on nodes that set a part of their budgets for files aside for temporary copies, unless each of them
    keeps all files."""
    return place(kind, sizes, nodes if kind.keeps_all else [for_kept(node) for node in nodes])


def decide(asked: str, size_bytes: int, files: int, nodes: Sequence[Budget]) -> tuple[Placing, str]:
    """Returns the placement of files that take `size_bytes` on a disk (see `needed_bytes`), and why. `asked` is its
    name; `nodes` are the nodes' budgets for files."""
    if asked != Placing.REPLICATE.value:
        return Placing(asked), ASKED
    if len(nodes) < 2:
        return Placing.PRIVATE, "there is one node"
    if all(size_bytes <= n.size_bytes and files <= n.inodes for n in nodes):
        return Placing.REPLICATE, "every node has room for all files"
    together, inodes = sum(max(0, n.size_bytes) for n in nodes), sum(max(0, n.inodes) for n in nodes)
    if size_bytes <= together and files <= inodes:
        return Placing.PARTITION, "not every node has room for all files"
    short = (
        f"{format_size(size_bytes)} and {files:,} inodes are needed, all nodes together have {format_size(together)}"
    )
    return Placing.PARTITION, f"{short} and {inodes:,}; the rest is read from the source"
