"""Frees space on the local disk: a link to the target takes the place of a local file that the target has as it is.

Owns the rules by which no program notices and nothing is lost:

* The kernel grants a lease (F_WRLCK) only while nobody has the file open or mapped, in whatever process. As long as the
  lease is held, whoever opens the file waits for its end.
* The file is what was copied: its attributes are the same, and its content has the two checksums of the copy.
* The two names are exchanged in one step, so that a reader finds the file or the link. The file is removed GRACE_S
  later, if nobody who had found it before waits for the lease; else it gets its name back. If somebody has written to
  the target's file by then, through the link, that file is no more known as this run's: both are kept.
"""

from __future__ import annotations

import fcntl
import os
import stat
import time
from contextlib import suppress
from dataclasses import replace
from functools import cached_property, partial

from hpcstage.job.disks import Machine
from hpcstage.leases import take_lease
from hpcstage.outputs.contents import Contents, open_for_reading
from hpcstage.outputs.facts import Action, ActionResult, Deed, Ending, EntryKind, Fingerprint, TargetEntry
from hpcstage.outputs.links import LocalLinks
from hpcstage.outputs.target import Target, is_same, status_of

GRACE_S = 0.2
"""A process that found the file before the exchange asks for it within this time, or writes to a file without a
name."""
_LOOK_S = 0.002
LEASING = frozenset({"btrfs", "ext2", "ext3", "ext4", "f2fs", "tmpfs", "xfs"})
"""File systems whose leases are known to count maps, too; overlayfs does not."""


def leaves_times(path: str) -> bool:
    """Tells whether the first store through a map leaves a time at `path`; on tmpfs, one after a read does not."""
    return Machine().kind(path) in LEASING - {"tmpfs"}


class Freeing:
    """Owns the way from a local file to a link."""

    def __init__(self, root: str, target: Target, links: LocalLinks, contents: Contents) -> None:
        self._root = root
        self._target = target
        self._links = links
        self._contents = contents

    def free(self, action: Action) -> ActionResult:
        """Puts a link in the place of a file, if that can be done unnoticed. Raises OSError."""
        name, entry = action.name, action.entry
        stays = ActionResult(Deed.FREE, name, Ending.KEPT)
        if not self._can_lease or entry is None or not self._is_there(name, entry):
            return stays
        self._contents.learn(self._target.path(name), entry.there)
        try:
            file = open_for_reading(f"{self._root}/{name}")
        except FileNotFoundError:
            return stays
        try:
            if not (_lease(file) and self._is_copied(file, entry)):
                return stays
            inode, may_go = os.fstat(file).st_ino, partial(self._may_go, name, entry, file)
            is_done = self._links.stand_in(name, entry.there.inode, inode, may_go)
        finally:
            os.close(file)
        if not is_done:
            return stays if self._is_there(name, entry) else replace(stays, ending=Ending.CHANGED)
        return ActionResult(Deed.FREE, name, Ending.DONE, freed(entry, name))

    @cached_property
    def _can_lease(self) -> bool:
        return Machine().kind(self._root) in LEASING

    def _is_there(self, name: str, entry: TargetEntry) -> bool:
        """Tells whether the target has the copy."""
        found = status_of(self._target.path(name))
        return found is not None and stat.S_ISREG(found.st_mode) and is_same(entry, found)

    def _is_copied(self, file: int, entry: TargetEntry) -> bool:
        """Tells whether a file is what the target has, and has no other name under which programs may change it."""
        status = os.fstat(file)
        if not _is_known(status, entry) or status.st_nlink != 1:
            return False
        return self._contents.has_only_grown(
            file, status, entry.there.inode, status.st_size, goes_on=lambda: _is_undisturbed(file)
        )

    def _may_go(self, name: str, entry: TargetEntry, file: int, spare: str) -> bool:
        """Tells, some time after the exchange, whether the file may be removed."""
        if os.lstat(spare).st_ino != os.fstat(file).st_ino:
            return False  # the program gave the name to another file just before
        end = time.monotonic() + GRACE_S
        while time.monotonic() < end:
            if not _is_undisturbed(file):
                return False
            time.sleep(_LOOK_S)
        there = status_of(self._target.path(name))  # programs may have written to it through the link by now
        is_there = there is not None and there.st_ino == entry.there.inode
        return is_there and _is_known(os.fstat(file), entry) and _is_undisturbed(file)


def freed(entry: TargetEntry, name: str) -> TargetEntry:
    """Returns what the entry of a file is once a link has taken the file's place."""
    there = Fingerprint(entry.there.inode, -1, entry.there.mtime_ns)
    return replace(entry, kind=EntryKind.EARLIER, there=there, shown_as=name)


def _is_known(status: os.stat_result, entry: TargetEntry) -> bool:
    return Fingerprint.of(status) == entry.here and stat.S_IMODE(status.st_mode) == entry.mode


def _lease(file: int) -> bool:
    """Takes a lease, which ends with the descriptor. Returns whether the kernel grants it."""
    with suppress(OSError):
        take_lease(file, fcntl.F_WRLCK)
        return True
    return False


def _is_undisturbed(file: int) -> bool:
    """Tells whether nobody waits for the end of the lease."""
    return fcntl.fcntl(file, fcntl.F_GETLEASE) == fcntl.F_WRLCK
