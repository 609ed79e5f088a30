"""Decides which node reads which file from the source, and which nodes keep it. Pure, and the same on every node.

This module answers the two questions of a node group that need no message: which node fetches an id, and which nodes
hold it. Every node computes the answers from what all nodes know: the manifest's sizes, the nodes' budgets and a seed.
There is no table of nodes times files.

    private    each node reads from the source what its own ranks read
    replicate  one node reads a file from the source; all nodes whose budget allows it get a copy
    partition  one node reads a file from the source and keeps it; others ask that node

A budget counts whole blocks and one inode per file. The caller subtracts what directories take. An id that
fits on no node is placed nowhere: a node that needs it reads the source.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import chain, compress

from hpcstage.plan.blocks import blocks as blocks_in
from hpcstage.plan.blocks import blocks_of
from hpcstage.plan.budget import ASKED, for_kept
from hpcstage.plan.placement.owners import NOBODY, Dealt, dealt_within, equal, free_budgets, needed_bytes
from hpcstage.plan.types import Budget
from hpcstage.units import format_size

AUTO = "auto"
"""The placement that `decide` chooses."""


class Placing(str, Enum):
    """A way in which nodes share files."""

    PRIVATE = "private"
    REPLICATE = "replicate"
    PARTITION = "partition"

    def keeps_all(self, *, copies_fit: bool) -> bool:
        """Returns whether every node ends with every file (with PRIVATE: as far as its budget allows). `copies_fit`:
        all files fit on every node."""
        return self is Placing.PRIVATE or (self is Placing.REPLICATE and copies_fit)


@dataclass(frozen=True)
class PlacementInput:
    """The input from which a placement was made."""

    sizes: Sequence[int]
    """Sizes in bytes, by id."""
    nodes: tuple[Budget, ...]
    copies_fit: bool
    """Whether all files fit on every node."""


@dataclass(frozen=True)
class Span:
    """The part of the id list, from the node's place on, in which a node keeps copies of what others own."""

    ids: int
    """Length of the span; the node's own ids and unplaced ids in it are no copies."""
    files: int
    size_bytes: int


class Placement:
    """Says by id which node fetches it and which nodes keep it; `place` makes it."""

    def __init__(self, kind: Placing, files: PlacementInput, owners: Dealt) -> None:
        """Only `place` calls this."""
        self.kind = kind
        self.nodes = len(files.nodes)
        self.files = files
        self._owners = owners
        self._spans: dict[int, Span] = {}

    @property
    def keeps_all(self) -> bool:
        """Whether every node ends with every file."""
        return self.kind.keeps_all(copies_fit=self.files.copies_fit)

    def fetcher(self, file_id: int, asking: int = 0) -> int:
        """Returns the only node that reads an id from the source; with PRIVATE, and for unplaced ids, `asking`."""
        if self.kind is Placing.PRIVATE:
            return asking
        owner = self._owners.owner(file_id)
        return asking if owner == NOBODY else owner

    def unplaced(self, file_id: int) -> bool:
        """Returns whether nodes keep nothing of an id: a node that needs it reads the source, every time."""
        return self.kind is not Placing.PRIVATE and self._owners.owner(file_id) == NOBODY

    def keeps(self, file_id: int, node: int) -> bool:
        """Returns whether a node holds an id for good (with PRIVATE: as far as its own budget goes)."""
        if self.kind is Placing.PRIVATE:
            return True
        owner = self._owners.owner(file_id)
        if self.kind is Placing.PARTITION or owner in (node, NOBODY):
            return owner == node
        if self.files.copies_fit:
            return True
        count = len(self.files.sizes)
        return (file_id - count * node // self.nodes) % count < self.span(node).ids

    def own(self, node: int) -> array[int]:
        """Returns the ids that a node fetches from the source, ascending."""
        return array("I", range(len(self.files.sizes))) if self.kind is Placing.PRIVATE else self._owners.ids_of(node)

    def others(self, node: int) -> array[int]:
        """Returns the ids that a node asks other nodes for without a request: those that it keeps and does not
        fetch."""
        if self.kind is not Placing.REPLICATE:
            return array("I")
        count, owner = len(self.files.sizes), self._owners.owner
        if not self.files.copies_fit:
            return array("I", (i for i in range(count) if owner(i) != node and self.keeps(i, node)))
        mask = bytearray(b"\1") * count
        for file_id in self._owners.ids_of(node):
            mask[file_id] = 0
        return array("I", compress(range(count), mask))

    def owned(self) -> list[tuple[int, int]]:
        """Returns per node how many files it fetches, and their bytes (not with PRIVATE)."""
        return self._owners.totals(self.files.sizes)

    def span(self, node: int) -> Span:
        """Returns what a node holds of others' files, with REPLICATE where not all copies fit.

        The time that this takes grows with the number of these files.
        """
        if node not in self._spans:
            self._spans[node] = self._measured_span(node)
        return self._spans[node]

    def _measured_span(self, node: int) -> Span:
        files = self.files
        free = free_budgets([files.nodes[node]])
        own = self._owners.ids_of(node)
        free.take(0, sum(blocks_of(map(files.sizes.__getitem__, own))), len(own))
        count, held, size = len(files.sizes), 0, 0
        start = count * node // self.nodes
        for position, file_id in enumerate(chain(range(start, count), range(start))):
            if self._owners.owner(file_id) in (node, NOBODY):
                continue
            blocks = blocks_in(files.sizes[file_id])
            if not free.has(0, blocks):
                return Span(position, held, size)
            free.take(0, blocks)
            held, size = held + 1, size + files.sizes[file_id]
        return Span(count, held, size)


def place(kind: Placing, sizes: Sequence[int], nodes: Sequence[Budget]) -> Placement:
    """Deals ids to nodes within the budgets. `sizes` are bytes by id, such as `Manifest.sizes`."""
    if not nodes:
        raise ValueError("a placement needs a node")
    fits = kind is Placing.PRIVATE or copies_fit(sizes, nodes)
    files = PlacementInput(sizes, tuple(nodes), fits)
    if kind is Placing.PRIVATE or (kind is Placing.REPLICATE and fits):
        return Placement(kind, files, Dealt(equal(len(sizes), len(nodes)), len(sizes), array("I"), array("H")))
    return Placement(kind, files, dealt_within(sizes, free_budgets(nodes)))


def choose(size_bytes: int, files: int, nodes: Sequence[Budget]) -> tuple[Placing, str]:
    """Returns what `auto` means for files that take `size_bytes` on a disk (see `needed_bytes`), and why."""
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


def decide(asked: str, size_bytes: int, files: int, nodes: Sequence[Budget]) -> tuple[Placing, str]:
    """Returns the placement that was asked for (its name, or `auto`), and why. `nodes` are their budgets for files."""
    return choose(size_bytes, files, nodes) if asked == AUTO else (Placing(asked), ASKED)


def place_shares(kind: Placing, sizes: Sequence[int], nodes: Sequence[Budget]) -> Placement:
    """Places files on nodes that set a part of their budgets for files aside for temporary copies, unless each of them
    keeps all files."""
    keeps_all = kind.keeps_all(copies_fit=copies_fit(sizes, nodes))
    return place(kind, sizes, nodes if keeps_all else [for_kept(node) for node in nodes])


def copies_fit(sizes: Sequence[int], nodes: Sequence[Budget]) -> bool:
    """Returns whether all files fit on every node."""
    if min(node.inodes for node in nodes) < len(sizes):
        return False
    return needed_bytes(sizes) <= min(node.size_bytes for node in nodes)
