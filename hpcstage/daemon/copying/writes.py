"""Handles writes of the program below a dataset: once one is answered, no stale copy is visible or ever will be.

Owns the deletion of many copies at once: their directory is renamed out of sight in one step, and a helper deletes it.
"""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from hpcstage.daemon.copying.engine import Engine
from hpcstage.daemon.copying.inodes import Inodes
from hpcstage.daemon.queue.states import FileState
from hpcstage.forked import Helpers
from hpcstage.plan.blocks import blocks_bytes
from hpcstage.plan.dataset.roots import tidy
from hpcstage.protocol.shim import EARLY_FILE, LANDED
from hpcstage.store import storedir as store

HELPER = "removal"
MOST_SINGLY = 1000
"""The most copies that are dropped one by one, which takes some ten milliseconds."""


@dataclass(frozen=True)
class _Gone:
    """Copies that were renamed aside: their directory, their ids, and the states that these had."""

    path: bytes
    ids: range
    places: bytes


class Writes:
    """Voids files by path, inode or directory. It calls `on_void` with the ids that it voided; there may be a
    million."""

    def __init__(
        self, helpers: Helpers, engine: Engine, inodes: Inodes, on_void: Callable[[Collection[int]], None]
    ) -> None:
        self._helpers = helpers
        self._engine = engine
        self._inodes = inodes
        self._on_void = on_void
        self._gone: deque[_Gone] = deque()

    def void_early(self) -> None:
        """Voids the files that were opened for writing by names outside of the datasets, before these were known.
        Called when the page says STAGING and nothing is copied yet."""
        early = _early(self._engine.copies.store.node_dir / EARLY_FILE)
        if numbers := {inode for _, inode in early}:
            found = {inode for inode in self._engine.manifest.inodes if inode in numbers}
            self._void({id_ for key in early if key[1] in found for id_ in self._inodes.ids(*key)})

    def void(self, path: bytes, landed: tuple[int, int] | None = None) -> None:
        """Voids a file that is written to, or the files below a directory that is renamed or removed. `landed` is the
        (device, inode) of the file; the path may then be empty."""
        if landed is not None and (ids := self._inodes.ids(*landed)):
            self._void(self._inodes.same_as(ids))
        if not path:
            return
        manifest = self._engine.manifest
        id_ = manifest.find_source(path)
        if id_ is not None:
            self._void(self._inodes.same_as((id_,)))
            return
        below = manifest.ids_below(path)
        directory = manifest.store_directory(path)
        if below and directory is not None:
            self._void_directory(directory, below)
            return
        prefix = tidy(path).rstrip(b"/") + b"/"
        for index, dataset in enumerate(manifest.datasets):
            if any(root.startswith(prefix) for root in (dataset.root, *dataset.aliases)):
                self._void_directory(os.fsencode(dataset.name), manifest.ids_of(index))

    def _void(self, ids: Collection[int]) -> None:
        self._engine.void(ids)
        self._on_void(ids)

    def _void_directory(self, directory: bytes, ids: range) -> None:
        others = [id_ for id_ in self._inodes.same_as(ids) if id_ not in ids]
        if others:
            self._void(others)
        if len(ids) <= MOST_SINGLY:
            self._void(ids)
            return
        try:
            aside = self._engine.copies.store.put_aside(directory)
        except OSError:  # the copies are dropped one by one then
            self._void(ids)
            return
        places = self._engine.void_range(ids)
        self._on_void(ids)
        if aside is not None:
            self._gone.append(_Gone(aside, ids, places))
            self._delete()

    # ---- deleting

    def _delete(self) -> None:
        """Starts a helper for the next directory, unless one is at work, whose end starts the next."""
        while self._gone and HELPER not in self._helpers.names():
            gone = self._gone.popleft()
            self._helpers.start(HELPER, partial(self._remove, gone), self._removed, gives_way=True)

    def _remove(self, gone: _Gone) -> bytes:
        """Deletes a directory, in the helper. The space of its links and copies is free again when this returns."""
        manifest, queue = self._engine.manifest, self._engine.queue
        store.remove_tree(os.fsdecode(gone.path))
        size_bytes = files = 0
        for id_, place in zip(gone.ids, gone.places, strict=True):
            if place != FileState.STORED:
                continue
            files += 1
            size_bytes += blocks_bytes(queue.states.size(id_))
            if manifest.is_link(id_):
                self._engine.copies.store.drop_link(id_)
        return json.dumps([size_bytes, files]).encode()

    def _removed(self, data: bytes | None) -> None:
        if data is not None:
            size_bytes, files = json.loads(data)
            self._engine.queue.budget.give_back(size_bytes, files)
        self._delete()


def _early(path: Path) -> set[tuple[int, int]]:
    """Returns (device, inode) of what was opened for writing outside of the datasets before they were known."""
    try:
        data = path.read_bytes()
    except OSError:
        return set()
    return set(LANDED.iter_unpack(data[: len(data) // LANDED.size * LANDED.size]))
