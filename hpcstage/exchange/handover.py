"""Hands manifest and order on at the first node of the group, and takes them at the others: a service of an exchange.

Owns when a node has both.

A manifest that is there already is never replaced, because ids that are in use would change their meaning.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from hpcstage.errors import UsageError
from hpcstage.exchange.broadcast import Leaf, Spread
from hpcstage.exchange.service import ExchangeService, Station
from hpcstage.exchange.transport.frames import Sort, open_bundle
from hpcstage.exchange.transport.mpi import Mail
from hpcstage.plan.dataset.manifest import Manifest
from hpcstage.protocol import exchange, nodedir
from hpcstage.protocol.exchange import PlanFiles
from hpcstage.store.catalog import LateCatalog, fingerprint


class ManifestService(ExchangeService):
    """Owns these files of one node on their way. `store` is told the group's manifest."""

    sorts = (Sort.MANIFEST, Sort.ORDER)
    orders = (PlanFiles,)

    def __init__(self, station: Station, store: LateCatalog) -> None:
        super().__init__(station)
        self._store = store
        self._spread = Spread(station.post, station.lanes, station.position, len(station.nodes))
        self._order: Leaf | None = None

    def obey(self, message: exchange.Message) -> None:
        """Begins to pass the files on; the first node's daemon says so. The manifest goes last, so that a node that has
        it has both. The number of listings travels as the manifest's number."""
        assert isinstance(message, PlanFiles)
        if os.path.exists(nodedir.ORDER):
            self._spread.begin(Sort.ORDER, 0, nodedir.ORDER)
        self._spread.begin(Sort.MANIFEST, message.listings, nodedir.MANIFEST)

    def take(self, mail: Mail) -> None:
        """Takes a piece of one."""
        bundle = open_bundle(mail.data)
        self._spread.bundle(mail, bundle, f"{self._store.incoming}/{bundle.sort.name.lower()}")

    def pump(self) -> bool:
        """Passes on the next pieces."""
        return self._spread.pump()

    def report(self) -> None:
        """Tells the daemon that both have come."""
        while self._spread.whole:
            leaf = self._spread.whole.popleft()
            if leaf.sort is Sort.ORDER:
                self._order = leaf
                continue
            with contextlib.suppress(OSError):  # the node directory goes when the run ends, and a disk may be full
                if (found := self._publish(leaf)) is not None:
                    self.station.tell(found)

    def _publish(self, leaf: Leaf) -> PlanFiles | None:
        order, self._order = self._order, None
        try:
            Manifest.open(Path(leaf.path), verify=True)
        except UsageError:
            return None
        # One that is there was made by this node on its own, or has come with a group before.
        if not os.path.exists(nodedir.MANIFEST):
            if order is not None:
                os.replace(order.path, nodedir.ORDER)
            with contextlib.suppress(FileExistsError):
                os.link(leaf.path, nodedir.MANIFEST)
        if not _same_ids(Path(leaf.path), Path(nodedir.MANIFEST)) or self._store.catalog is None:
            return None
        self._store.catalog.fingerprint = fingerprint(Path(leaf.path))
        return PlanFiles(leaf.number)


def _same_ids(theirs: Path, ours: Path) -> bool:
    """Returns whether two manifests have the same ids; a scan by another node may show other device numbers for the
    same files."""
    if fingerprint(theirs) == fingerprint(ours):
        return True
    try:
        there, here = Manifest.open(theirs, verify=False), Manifest.open(ours, verify=False)
    except UsageError:
        return False
    return there.paths_digest() == here.paths_digest() and there.sizes == here.sizes
