"""Finds the ids that stand for the same file: hard links, symbolic links, names behind links to directories.

Owns the index from inodes to ids. Up to some ten thousand files it is made when it is first needed; for more a helper
makes it, and until then the manifest's column is searched (ten milliseconds for a million).
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import Counter
from collections.abc import Collection

from hpcstage.forked import Helpers
from hpcstage.plan.dataset.manifest import Manifest

HELPER = "inodes"
MOST_AT_ONCE = 20_000
"""The most files whose index is made at once, which takes some ten milliseconds."""
MOST_SINGLY = 64
"""The most ids that are looked up one by one."""


class Inodes:
    """Owns the index. `own_scan` says that this node made the manifest, so that its device numbers are this node's."""

    def __init__(self, manifest: Manifest, helpers: Helpers, *, own_scan: bool) -> None:
        self._manifest = manifest
        self._helpers = helpers
        self._own_scan = own_scan
        self._sorted: array[int] | None = None
        """The ids sorted by inode."""
        self._shared: dict[tuple[int, int], list[int]] | None = None

    def ids(self, device: int, inode: int) -> list[int]:
        """Returns the ids of an inode as this node sees it."""
        found = self._of_inode(inode)
        devices = self._manifest.devices
        return [id_ for id_ in found if devices[id_] == device] if self._own_scan else found

    def same_as(self, ids: Collection[int]) -> Collection[int]:
        """Returns these ids and all other ids of their inodes."""
        inodes, devices = self._manifest.inodes, self._manifest.devices
        if len(ids) <= MOST_SINGLY:
            return sorted({i for id_ in ids for i in self._of_inode(inodes[id_]) if devices[i] == devices[id_]})
        shared = self._of_shared()
        more = {i for id_ in ids for i in shared.get((devices[id_], inodes[id_]), ())} if shared else set()
        return sorted({*ids, *more}) if more else ids

    def _of_inode(self, inode: int) -> list[int]:
        if self._sorted is None:
            self._make()
        if self._sorted is None:
            return self._manifest.ids_of_inode(inode)
        inodes, found = self._manifest.inodes, []
        at = bisect_left(self._sorted, inode, key=inodes.__getitem__)
        while at < len(self._sorted) and inodes[self._sorted[at]] == inode:
            found.append(self._sorted[at])
            at += 1
        return found

    def _make(self) -> None:
        if len(self._manifest) <= MOST_AT_ONCE:
            self._sorted = _by_inode(self._manifest)
        else:
            self._helpers.start(HELPER, lambda: _by_inode(self._manifest).tobytes(), self._made)

    def _made(self, data: bytes | None) -> None:
        if data is not None:
            self._sorted = array("I", data)

    def _of_shared(self) -> dict[tuple[int, int], list[int]]:
        """Returns the inodes that several ids share; made once, in a fifth of a second for a million files."""
        if self._shared is None:
            inodes, devices = self._manifest.inodes, self._manifest.devices
            several = {inode for inode, count in Counter(inodes).items() if count > 1}
            self._shared = {}
            for id_ in (i for i, inode in enumerate(inodes) if inode in several) if several else ():
                self._shared.setdefault((devices[id_], inodes[id_]), []).append(id_)
        return self._shared


def _by_inode(manifest: Manifest) -> array[int]:
    inodes = manifest.inodes.tolist()
    return array("I", sorted(range(len(inodes)), key=inodes.__getitem__))
