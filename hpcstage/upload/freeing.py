"""Frees space on the local disk: a link to DIR takes the place of a local file that DIR has as it is.

The kernel grants a lease for writing only while nobody has the file open or mapped, in whatever process. As long as it
is held, whoever opens the file waits for its end. Who had found the file before the link took its name, and opens it
after, is noticed within GRACE_S: then the file gets its name back. From there on the link is as one that was there at
the start.
"""

from __future__ import annotations

import fcntl
import os
import time
from contextlib import suppress

from hpcstage.job.disks import Machine
from hpcstage.leases import take_lease
from hpcstage.upload.copying import sums_of
from hpcstage.upload.facts import Here, Place
from hpcstage.upload.manifest import UploadManifest
from hpcstage.upload.start import link_path
from hpcstage.upload.target import Target
from hpcstage.upload.uploading import is_left

COUNTING = frozenset({"btrfs", "ext2", "ext3", "ext4", "f2fs", "tmpfs", "xfs"})
"""File systems whose leases count maps: elsewhere what is stored through one might be in no file that has a name."""
GRACE_S = 0.2
LEAST_BYTES = 64 << 10
_LOOK_S = 0.002


def free(place: Place, manifest: UploadManifest, target: Target, name: str) -> int:
    """Puts a link in the place of a file, if nobody notices, and returns the bytes that are free then. Raises
    OSError."""
    put, path = manifest.puts.get(name), f"{place.tree}/{name}"
    if put is None or put.sums is None or Machine().kind(path) not in COUNTING:
        return 0
    found = target.look(put.place)
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        take_lease(fd, fcntl.F_WRLCK)
        status = os.fstat(fd)
        if found is None or not is_left(put, found) or Here.of(status) != put.here or status.st_nlink > 1:
            return 0
        if not put.is_sealed and sums_of(fd, status.st_size) != put.sums:
            return 0
        return status.st_size if _swap(place, manifest, target, name, fd, found.st_ino) else 0
    except BlockingIOError:
        return 0
    finally:
        os.close(fd)


def _swap(place: Place, manifest: UploadManifest, target: Target, name: str, fd: int, inode: int) -> bool:
    path, aside, new = f"{place.tree}/{name}", f"{place.links}/aside-{inode}", f"{place.links}/new-{inode}"
    for left in (aside, new):
        with suppress(FileNotFoundError):
            os.unlink(left)
    os.symlink(target.path(manifest.puts[name].place), new)
    link = os.lstat(new).st_ino
    second = link_path(place, link)
    os.link(new, second, follow_symlinks=False)
    os.link(path, aside)
    manifest.note(["held", manifest.puts[name].place, inode, link])
    try:
        os.rename(new, path)
        deadline = time.monotonic() + GRACE_S
        while time.monotonic() < deadline:
            if fcntl.fcntl(fd, fcntl.F_GETLEASE) != fcntl.F_WRLCK:
                os.rename(aside, path)
                manifest.note(["held", manifest.puts[name].place])
                os.unlink(second)
                return False
            time.sleep(_LOOK_S)
    finally:
        with suppress(FileNotFoundError):
            os.unlink(aside)
    return True
