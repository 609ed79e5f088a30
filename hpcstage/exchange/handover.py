"""Hands manifest and order on at the first node of the group, and takes them at the others. Owns when a node has both.

A manifest that is there already is never replaced, because ids that are in use would change their meaning.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from hpcstage.errors import UsageError
from hpcstage.exchange.broadcast import Leaf, Spread
from hpcstage.exchange.transport.frames import Place
from hpcstage.plan.dataset.manifest import Manifest as ManifestFile
from hpcstage.protocol import nodedir
from hpcstage.protocol.exchange import Manifest
from hpcstage.store.catalog import fingerprint


class Handed:
    """The manifest and the order of one node on their way."""

    def __init__(self, spread: Spread, incoming: str) -> None:
        self._spread = spread
        self._incoming = incoming
        self._order: Leaf | None = None
        self.fingerprint = 0
        """The fingerprint of the group's manifest, once it has come and names the same files as this node's."""

    def begin(self, message: Manifest) -> None:
        """Begins to pass both files on; called at the first node. The order goes first, so that a node that has the
        manifest has all. The number of listings travels as the manifest's number."""
        if message.order_bytes:
            self._spread.begin(Place.ORDER, 0, nodedir.ORDER)
        self._spread.begin(Place.MANIFEST, message.listings, nodedir.MANIFEST)

    def scratch(self, place: Place) -> str:
        """Returns where a file is written while it comes."""
        return f"{self._incoming}/{place.name.lower()}"

    def finished(self) -> Manifest | None:
        """Returns what to tell the daemon, once."""
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
        if not os.path.exists(nodedir.MANIFEST):
            if order is not None:
                os.replace(order.path, nodedir.ORDER)
            with contextlib.suppress(FileExistsError):
                os.link(leaf.path, nodedir.MANIFEST)
        if not _same_ids(Path(leaf.path), Path(nodedir.MANIFEST)):
            return None
        self.fingerprint = fingerprint(Path(leaf.path))
        return Manifest(leaf.size_bytes, order.size_bytes if order else 0, leaf.number)


def _same_ids(theirs: Path, ours: Path) -> bool:
    """Whether two manifests have the same ids; a scan by another node may show other device numbers for the same
    files."""
    if fingerprint(theirs) == fingerprint(ours):
        return True
    try:
        there, here = ManifestFile.open(theirs, verify=False), ManifestFile.open(ours, verify=False)
    except UsageError:
        return False
    return there.paths_digest() == here.paths_digest() and there.sizes == here.sizes
