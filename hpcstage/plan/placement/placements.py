"""Which node reads which file from the source, and which nodes keep it. Pure, and the same on every node.

Owns the two questions of a node group that need no message: who fetches an id, and who holds it. Every node computes
the answers from what all nodes know: the manifest's sizes, the nodes' budgets and a seed. Nothing here is a table of
nodes times files.

    private    each node reads from the source what its own ranks read
    replicate  one node reads a file from the source; all nodes with room end with a copy
    partition  one node reads a file from the source and keeps it; others ask that node

A budget counts whole blocks and one inode per file. What directories take is the caller's to subtract. Where not even
all nodes together have room, some ids are placed nowhere: whoever needs one reads the source.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import chain, compress, zip_longest

from hpcstage.plan.placement import dealing
from hpcstage.plan.placement.owners import NOBODY, Dealt, Owners, Rooms, Table, dealt_within, needed_bytes, rooms_of
from hpcstage.units import format_size


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


@dataclass(frozen=True)
class Files:
    """What a placement was made of."""

    sizes: Sequence[int]
    """In bytes, by id."""
    nodes: tuple[Node, ...]
    seed: int
    copies_fit: bool
    """Every node has room for all files."""


@dataclass(frozen=True)
class Span:
    """Copies of what others own: from the node's place of the list on."""

    ids: int
    """The span's length; the node's own and unplaced ids in it are no copies."""
    files: int
    size_bytes: int


class Placement:
    """A function of ids; made by `place` and `by_first_reader`."""

    def __init__(self, kind: Kind, files: Files, owners: Owners, *, version: int = 0) -> None:
        """For `place`."""
        self.kind = kind
        self.nodes = len(files.nodes)
        self.version = version
        self.files = files
        self._owners = owners
        self._spans: dict[int, Span] = {}

    def fetcher(self, file_id: int, asking: int = 0) -> int:
        """The only node that reads an id from the source; with PRIVATE, and of unplaced ids, the `asking` node."""
        if self.kind is Kind.PRIVATE:
            return asking
        owner = self._owners.owner(file_id)
        return asking if owner == NOBODY else owner

    def unplaced(self, file_id: int) -> bool:
        """No node has room for it: whoever needs it reads the source, every time."""
        return self.kind is not Kind.PRIVATE and self._owners.owner(file_id) == NOBODY

    def keeps(self, file_id: int, node: int) -> bool:
        """Whether a node holds an id for good (with PRIVATE: as far as its own room goes)."""
        if self.kind is Kind.PRIVATE:
            return True
        owner = self._owners.owner(file_id)
        if self.kind is Kind.PARTITION or owner in (node, NOBODY):
            return owner == node
        if self.files.copies_fit:
            return True
        count = len(self.files.sizes)
        return (file_id - count * node // self.nodes) % count < self.span(node).ids

    def own(self, node: int, order: Sequence[int], *, rotate: bool = True) -> array[int]:
        """The ids that a node fetches from the source, as they come in `order`.

        `rotate`: the node starts at its own place of the list, for lists that do not say what it reads first. False
        where they do (a sampler's order): then what is read first comes first.
        """
        if self.kind is Kind.PRIVATE:
            return array("I", _turned(order, node, self.nodes, rotate))
        ids = self._owners.ids_of(node)
        if isinstance(order, range) and order == range(len(self.files.sizes)):
            at = bisect_left(ids, len(order) * node // self.nodes) if rotate else 0
            return ids[at:] + ids[:at]
        return _chosen(_turned(order, node, self.nodes, rotate), self._mask(ids))

    def others(self, node: int, order: Sequence[int], *, rotate: bool = True) -> array[int]:
        """The ids that a node asks other nodes for on its own account: what it keeps and does not fetch."""
        if self.kind is not Kind.REPLICATE:
            return array("I")
        turned = _turned(order, node, self.nodes, rotate)
        if self.files.copies_fit:
            mask = self._mask(self._owners.ids_of(node)).translate(_INVERTED)
            return _chosen(turned, mask)
        owner = self._owners.owner
        return array("I", (i for i in turned if owner(i) != node and self.keeps(i, node)))

    def owned(self) -> list[tuple[int, int]]:
        """Per node: how many files it fetches, and their bytes (not with PRIVATE)."""
        return self._owners.totals(self.files.sizes)

    def _mask(self, ids: Iterable[int]) -> bytearray:
        mask = bytearray(len(self.files.sizes))
        for file_id in ids:
            mask[file_id] = 1
        return mask

    def span(self, node: int) -> Span:
        """With REPLICATE where not all copies fit: what a node holds of others. Takes as long as that is much."""
        if node not in self._spans:
            self._spans[node] = self._measured_span(node)
        return self._spans[node]

    def _measured_span(self, node: int) -> Span:
        files = self.files
        room = rooms_of([(files.nodes[node].budget_bytes, files.nodes[node].budget_inodes)])
        own = self._owners.ids_of(node)
        room.take(0, sum(dealing.blocks_of(map(files.sizes.__getitem__, own))), len(own))
        count, held, size = len(files.sizes), 0, 0
        start = count * node // self.nodes
        for position, file_id in enumerate(chain(range(start, count), range(start))):
            if self._owners.owner(file_id) in (node, NOBODY):
                continue
            blocks = dealing.blocks(files.sizes[file_id])
            if not room.has(0, blocks):
                return Span(position, held, size)
            room.take(0, blocks)
            held, size = held + 1, size + files.sizes[file_id]
        return Span(count, held, size)


def place(kind: Kind, sizes: Sequence[int], nodes: Sequence[Node], seed: int = 0) -> Placement:
    """Version 0: ids dealt to nodes, within the budgets. `sizes`: bytes by id, such as `Manifest.sizes`."""
    if not nodes:
        raise ValueError("a placement needs a node")
    fits = kind is Kind.PRIVATE or copies_fit(sizes, nodes)
    files = Files(sizes, tuple(nodes), seed, fits)
    if kind is Kind.PRIVATE or (kind is Kind.REPLICATE and fits):
        return Placement(
            kind, files, Dealt(dealing.equal(len(sizes), len(nodes), seed), len(sizes), array("I"), array("H"))
        )
    return Placement(kind, files, dealt_within(sizes, _rooms(nodes), seed))


def by_first_reader(placement: Placement, orders_of_nodes: Sequence[Sequence[int]]) -> Placement:
    """Version 1: the node that reads an id first in the first epoch fetches it. One order per node.

    What nobody reads, and what its first reader has no room for, stays with its owner of version 0 or, if that has
    none left, goes to the node with the most room.
    """
    files = placement.files
    if placement.kind is Kind.PRIVATE:
        return placement
    if len(orders_of_nodes) != placement.nodes:
        raise ValueError(f"{len(orders_of_nodes)} orders for {placement.nodes} nodes")
    owners = array("H", [NOBODY]) * len(files.sizes)
    bounded = placement.kind is Kind.PARTITION or not files.copies_fit
    rooms = _rooms(files.nodes) if bounded else None
    readings = ((node, i) for row in zip_longest(*orders_of_nodes) for node, i in enumerate(row) if i is not None)
    _give(owners, readings, files.sizes, rooms)
    _give(owners, ((placement.fetcher(i), i) for i in _ownerless(owners)), files.sizes, rooms)
    if rooms is not None:
        for file_id, node in zip(*rooms.fill(_ownerless(owners), files.sizes), strict=True):
            owners[file_id] = node
    return Placement(placement.kind, files, Table(owners, placement.nodes), version=placement.version + 1)


def choose(size_bytes: int, files: int, nodes: Sequence[Node], *, grouped: bool = True) -> tuple[Kind, str]:
    """What `auto` means for files that take `size_bytes` on a disk (see `needed_bytes`); and why, in one sentence."""
    if len(nodes) < 2:
        return Kind.PRIVATE, "there is one node"
    if not grouped:
        return Kind.PRIVATE, "the nodes cannot reach each other"
    if all(size_bytes <= n.budget_bytes and files <= n.budget_inodes for n in nodes):
        return Kind.REPLICATE, "every node has room for all files"
    together, inodes = sum(max(0, n.budget_bytes) for n in nodes), sum(max(0, n.budget_inodes) for n in nodes)
    if size_bytes <= together and files <= inodes:
        return Kind.PARTITION, "only all nodes together have room for all files"
    short = (
        f"{format_size(size_bytes)} and {files:,} inodes are needed, all nodes together have {format_size(together)}"
    )
    return Kind.PARTITION, f"{short} and {inodes:,}; the rest is read from the source"


_INVERTED = bytes([1, 0]) + bytes(254)


def _rooms(nodes: Iterable[Node]) -> Rooms:
    return rooms_of((node.budget_bytes, node.budget_inodes) for node in nodes)


def copies_fit(sizes: Sequence[int], nodes: Sequence[Node]) -> bool:
    """Whether every node has room for all files."""
    if min(node.budget_inodes for node in nodes) < len(sizes):
        return False
    return needed_bytes(sizes) <= min(node.budget_bytes for node in nodes)


def _turned(order: Sequence[int], node: int, nodes: int, rotate: bool) -> Iterable[int]:
    start = len(order) * node // nodes if rotate else 0
    return chain(order[start:], order[:start]) if start else order


def _chosen(order: Iterable[int], mask: bytearray) -> array[int]:
    ids = order if isinstance(order, array) else array("I", order)
    return array("I", compress(ids, map(mask.__getitem__, ids)))


def _give(owners: array[int], readings: Iterable[tuple[int, int]], sizes: Sequence[int], rooms: Rooms | None) -> None:
    for node, file_id in readings:
        if owners[file_id] != NOBODY:
            continue
        if rooms is not None:
            blocks = dealing.blocks(sizes[file_id])
            if not rooms.has(node, blocks):
                continue
            rooms.take(node, blocks)
        owners[file_id] = node


def _ownerless(owners: array[int]) -> array[int]:
    return array("I", [file_id for file_id, owner in enumerate(owners) if owner == NOBODY])
