"""Holds what is known of the copies in the store: how many, of which dataset, and whether they were read.

Owns their deletion, and the tombstones that stand in the place of copies which must not be published.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from dataclasses import dataclass

from hpcstage.plan.dataset.manifest import Manifest
from hpcstage.store.attributes import Attributes
from hpcstage.store.heldfiles import HeldFiles
from hpcstage.store.storedir import Store


@dataclass
class DatasetFacts:
    """Counts of one dataset."""

    files: int = 0
    size_bytes: int = 0
    staged_files: int = 0
    staged_bytes: int = 0


class StoredCopies:
    """Owns the counts of the copies, and what other programs are told of them: attributes and holdings."""

    def __init__(self, manifest: Manifest, store: Store) -> None:
        self.store = store
        self.holdings = HeldFiles(store.node_dir, len(manifest))
        self.by_dataset = [_facts(manifest, index) for index in range(len(manifest.datasets))]
        self.files = self.size_bytes = 0
        """The number of copies and their bytes."""
        self.last_stored = 0.0
        """The time at which the last transfer was published."""
        self._manifest = manifest
        self.attributes = Attributes(store.node_dir, manifest)
        self._keeps_access_times = not os.statvfs(store.node_dir).f_flag & os.ST_NOATIME

    def path(self, id_: int) -> bytes:
        """Returns the absolute path of a copy."""
        return self.store.path(self._manifest.store_path(id_))

    def add(self, id_: int, size_bytes: int, *, stays: bool) -> None:
        """Counts a copy that was published. `stays` says that it does not make way for others."""
        self._count(id_, 1, size_bytes)
        self.attributes.note(id_, self.path(id_))
        if stays:
            self.holdings.keep(id_)
        else:
            self.holdings.drop((id_,))

    def remove(self, id_: int, size_bytes: int) -> None:
        """Deletes a copy and takes it out of the counts."""
        self.delete(id_)
        self._count(id_, -1, -size_bytes)
        self.holdings.drop((id_,))

    def delete(self, id_: int) -> None:
        """Deletes a copy that is not counted, or one of a file that was written to, which stays in the counts."""
        self.store.drop(id_, self._manifest.store_path(id_))

    def _count(self, id_: int, files: int, size_bytes: int) -> None:
        self.files += files
        self.size_bytes += size_bytes
        facts = self.by_dataset[self._manifest.dataset_of(id_)]
        facts.staged_files += files
        facts.staged_bytes += size_bytes

    def status(self, id_: int) -> os.stat_result | None:
        """Returns the status of a copy; None if there is none."""
        try:
            status = os.lstat(self.path(id_))
        except OSError:
            return None
        return status if stat.S_ISREG(status.st_mode) else None

    def was_read(self, id_: int) -> bool:
        """Returns whether a copy was read, or is gone. It counts as read once its time of last access is later than its
        time of modification, and from the beginning where the local disk keeps no times of access."""
        if not self._keeps_access_times:
            return True
        try:
            status = os.lstat(self.path(id_))
        except OSError:
            return True
        return status.st_atime_ns > status.st_mtime_ns


class Tombstones:
    """Bars the names of files that are written to while they are in flight, so that their copies are not published."""

    def __init__(self, manifest: Manifest, store: Store, on_hold: Callable[[int], None]) -> None:
        """`on_hold` is called with the number of transfers that may be published all the same."""
        self._manifest = manifest
        self._store = store
        self._on_hold = on_hold
        self._barred: set[int] = set()
        self._unbarred: set[int] = set()
        """Ids in flight that were written to and have no tombstone: they may be published until their result comes."""

    def bar(self, id_: int) -> None:
        """Puts a tombstone in the place of a copy that is on its way."""
        if not self._store.bar(id_, self._manifest.store_path(id_)):
            self._unbarred.add(id_)
            self._on_hold(len(self._unbarred))
        self._barred.add(id_)

    def lift(self, id_: int) -> None:
        """Removes the tombstone of a transfer that has ended, if it has one."""
        if id_ in self._barred:
            self._barred.discard(id_)
            self._store.unbar(id_, self._manifest.store_path(id_))

    def settle(self, id_: int) -> None:
        """Notes that the result of a transfer was handled: no copy of it is visible that must not be."""
        if id_ in self._unbarred:
            self._unbarred.discard(id_)
            self._on_hold(len(self._unbarred))


def _facts(manifest: Manifest, dataset: int) -> DatasetFacts:
    ids = manifest.ids_of(dataset)
    return DatasetFacts(len(ids), sum(manifest.sizes[ids.start : ids.stop]))
