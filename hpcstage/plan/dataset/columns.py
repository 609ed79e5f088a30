"""Holds the files that a scan found as columns, not as one object each: a million take tens of megabytes."""

from __future__ import annotations

import os
from array import array
from collections.abc import Iterator

from hpcstage.plan.types import ManifestEntry

LINK_FLAG = 1
"""The file is a symbolic link."""
BEHIND_FLAG = 2
"""The file was found behind a symbolic link to a directory."""


class Columns:
    """Parallel arrays, one position per file."""

    def __init__(self) -> None:
        self.paths: list[bytes] = []
        self.datasets = array("H")
        self.sizes = array("Q")
        self.mtimes = array("q")
        self.modes = array("I")
        self.devices = array("Q")
        self.inodes = array("Q")
        self.flags = array("H")
        self.ctimes = array("q")
        self.links = array("I")
        self.uids = array("I")
        self.gids = array("I")

    def __len__(self) -> int:
        return len(self.paths)

    def add(self, dataset: int, path: bytes, found: os.stat_result, *, is_link: bool, behind: bool = False) -> None:
        """Appends a file."""
        self.paths.append(path)
        self.datasets.append(dataset)
        self.sizes.append(found.st_size)
        self.mtimes.append(found.st_mtime_ns)
        self.modes.append(found.st_mode)
        self.devices.append(found.st_dev)
        self.inodes.append(found.st_ino)
        self.flags.append((LINK_FLAG if is_link else 0) | (BEHIND_FLAG if behind else 0))
        self.ctimes.append(found.st_ctime_ns)
        self.links.append(found.st_nlink)
        self.uids.append(found.st_uid)
        self.gids.append(found.st_gid)

    def add_entry(self, entry: ManifestEntry) -> None:
        """Appends a file that is given as a `ManifestEntry`."""
        self.paths.append(entry.path)
        self.datasets.append(entry.dataset)
        self.sizes.append(entry.size_bytes)
        self.mtimes.append(entry.mtime_ns)
        self.modes.append(entry.mode)
        self.devices.append(entry.device)
        self.inodes.append(entry.inode)
        self.flags.append(LINK_FLAG if entry.is_link else 0)
        self.ctimes.append(entry.ctime_ns)
        self.links.append(entry.links)
        self.uids.append(entry.uid)
        self.gids.append(entry.gid)

    def extend(self, other: Columns) -> None:
        """Appends all of another's files."""
        self.paths.extend(other.paths)
        for mine, theirs in zip(self.arrays(), other.arrays(), strict=True):
            mine.extend(theirs)

    def arrays(self) -> list[array[int]]:
        """Returns the numeric columns, always in the same sequence."""
        wide = [self.sizes, self.mtimes, self.devices, self.inodes, self.ctimes]
        return [*wide, self.modes, self.links, self.uids, self.gids, self.datasets, self.flags]

    def sort(self) -> None:
        """Sorts by (dataset, path), and keeps only the first of files with the same dataset and path. One column after
        the other, so that no more than one is there twice."""
        chosen = self._positions()
        paths = self.paths
        self.paths = [paths[i] for i in chosen]
        del paths
        for column in self.arrays():
            column[:] = array(column.typecode, map(column.__getitem__, chosen))

    def _positions(self) -> array[int]:
        by_dataset: dict[int, list[int]] = {}
        for position, dataset in enumerate(self.datasets):
            by_dataset.setdefault(dataset, []).append(position)
        chosen = array("Q")
        for dataset in sorted(by_dataset):
            chosen.extend(self._distinct(by_dataset.pop(dataset)))
        return chosen

    def _distinct(self, positions: list[int]) -> Iterator[int]:
        paths = self.paths
        positions.sort(key=paths.__getitem__)
        before = None
        for position in positions:
            if paths[position] != before:
                before = paths[position]
                yield position
