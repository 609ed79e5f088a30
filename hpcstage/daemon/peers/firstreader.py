"""Computes version 1 of the placement: the node that reads a file first in the first epoch fetches it from the source.

Owns the decision when that can be known: a loader has announced the formula of a distributed sampler, from which the
orders of all ranks follow, and the table of its dataset. Every node computes the same in a helper, and the nodes tell
each other nothing of it: a node that knows version 1 asks the owner of version 0 for files that have become its own,
and gets them, or is told that they have not been begun.

Ranks are assumed to be dealt to the nodes in blocks. Where this node's own ranks contradict that, nothing changes.
"""

from __future__ import annotations

import contextlib
from array import array
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from hpcstage.daemon.peers.routes import Routes
from hpcstage.daemon.process.helpers import Helpers
from hpcstage.daemon.reading import arrays
from hpcstage.daemon.reading.epochs import Announced, ids_of
from hpcstage.daemon.reading.learn import Rows, Table
from hpcstage.plan.order import sampling
from hpcstage.plan.order.sampling import Distributed
from hpcstage.plan.placement.owners import NOBODY
from hpcstage.plan.placement.owners import Table as OwnerTable
from hpcstage.plan.placement.placements import Placement, by_first_reader
from hpcstage.protocol import nodedir

HELPER = "first reader"
_FILE = "owners"


class FirstReader:
    """Computes version 1 and owns it. It calls `on_known` with the placement."""

    def __init__(
        self,
        helpers: Helpers,
        node_dir: Path,
        node: tuple[int, int],
        rows_of: Callable[[int], Rows],
        on_known: Callable[[Placement], None],
    ) -> None:
        """`node` is this node's index and the number of nodes."""
        self.known: Placement | None = None
        self._helpers = helpers
        self._path = node_dir / nodedir.ORDERS / f".{_FILE}"
        self._index, self._count = node
        self._rows_of = rows_of
        self._on_known = on_known
        self._pending: Announced | None = None
        self._busy = False

    def announced(self, one: Announced) -> None:
        """Takes an announcement that was mapped. Only a loader's first epoch counts: all nodes must take the same."""
        if one.formula and one.epoch == 0 and self._pending is None and self.known is None and not self._busy:
            self._pending = one

    def poll(self, routes: Routes | None) -> None:
        """Starts the computation once everything is known."""
        one = self._pending
        if one is None or self._busy or routes is None or not routes.shares_all:
            return
        self._pending = None
        rows = self._rows_of(one.key)
        sampler = None
        with contextlib.suppress(ValueError):
            sampler = sampling.parse(one.formula)
        if sampler is None or not isinstance(rows, Table) or node_of(sampler, self._count) != self._index:
            return
        placement, path = routes.placement, self._path
        work = compute(sampler, rows, placement)
        started = self._helpers.start(HELPER, lambda: save(work(), path), lambda data: self._done(placement, data))
        self._busy = started is not None

    def _done(self, placement: Placement, data: bytes | None) -> None:
        self._busy = False
        if data is None:
            return
        try:
            _, found = arrays.load(self._path)
            owners = array("H", found[_FILE])
        except (OSError, ValueError, KeyError):
            return
        finally:
            self._path.unlink(missing_ok=True)
        self.known = Placement(
            placement.kind, placement.files, OwnerTable(owners, self._count), version=placement.version + 1
        )
        self._on_known(self.known)


def node_of(sampler: Distributed, nodes: int) -> int:
    """Returns the node of a sampler's rank."""
    return sampler.rank * nodes // sampler.replicas


def compute(sampler: Distributed, rows: Rows, placement: Placement) -> Callable[[], Placement]:
    """Returns the work for a helper: it computes the orders of all ranks and which node reads each file first."""

    def work() -> Placement:
        ranks = [replace(sampler, rank=rank) for rank in range(sampler.replicas)]
        by_node: list[list[array[int]]] = [[] for _ in range(placement.nodes)]
        for rank, order in zip(ranks, sampling.orders_of(ranks), strict=True):
            by_node[node_of(rank, placement.nodes)].append(ids_of(order, rows)[0])
        return by_first_reader(placement, [sampling.interleave(orders) for orders in by_node])

    return work


def save(placement: Placement, path: Path) -> bytes:
    """Writes the owners to a file for the daemon."""
    owners = [placement.fetcher(id_, NOBODY) for id_ in range(len(placement.files.sizes))]
    arrays.save(path, {}, {_FILE: owners})
    return b"saved"
