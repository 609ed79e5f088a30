"""Manifest and order: handed on by the first node of the group, taken by the others. Owns when a node has both.

A manifest that is there already is never replaced: ids that are in use would change their meaning.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from hpcstage.errors import UsageError
from hpcstage.exchange.broadcast import Leaf, Spread
from hpcstage.exchange.transport.frames import Place
from hpcstage.plan.dataset.manifest import Manifest as ManifestFile
from hpcstage.protocol.exchange import Manifest
from hpcstage.store.catalog import MANIFEST_NAME, ORDER_NAME, fingerprint


class Handed:
    """The two files of one node."""

    def __init__(self, spread: Spread, incoming: str) -> None:
        self._spread = spread
        self._incoming = incoming
        self._order: Leaf | None = None
        self.fingerprint = 0
        """Of the group's manifest, once it has come and names the same files as this node's."""

    def begin(self, message: Manifest) -> None:
        """At the first node. The order goes first: who has the manifest has all. Listings travel as its number."""
        if message.order_bytes:
            self._spread.begin(Place.ORDER, 0, ORDER_NAME)
        self._spread.begin(Place.MANIFEST, message.listings, MANIFEST_NAME)

    def scratch(self, place: Place) -> str:
        """Where a file is written while it comes."""
        return f"{self._incoming}/{place.name.lower()}"

    def finished(self) -> Manifest | None:
        """What to tell the daemon, once."""
        found = None
        while self._spread.whole:
            leaf = self._spread.whole.popleft()
            if leaf.place is Place.ORDER:
                self._order = leaf
            elif leaf.place is Place.MANIFEST:
                with contextlib.suppress(OSError):  # the node directory goes when the run ends, and a disk may be full
                    found = self._publish(leaf)
        return found

    def _publish(self, leaf: Leaf) -> Manifest | None:
        order, self._order = self._order, None
        try:
            ManifestFile.open(Path(leaf.path), verify=True)
        except UsageError:
            return None
        # One that is there was made by this node on its own, or has come with a group before.
        if not os.path.exists(MANIFEST_NAME):
            if order is not None:
                os.replace(order.path, ORDER_NAME)
            with contextlib.suppress(FileExistsError):
                os.link(leaf.path, MANIFEST_NAME)
        if not _same_ids(Path(leaf.path), Path(MANIFEST_NAME)):
            return None
        self.fingerprint = fingerprint(Path(leaf.path))
        return Manifest(leaf.size_bytes, order.size_bytes if order else 0, leaf.number)


def _same_ids(theirs: Path, ours: Path) -> bool:
    """A scan by another node may show other device numbers for the same files."""
    if fingerprint(theirs) == fingerprint(ours):
        return True
    try:
        there, here = ManifestFile.open(theirs, verify=False), ManifestFile.open(ours, verify=False)
    except UsageError:
        return False
    return there.paths_digest() == here.paths_digest() and there.sizes == here.sizes
