"""Asks the kernel about a directory: its file system, the free space, the memory behind it. Owns no choice.

The module tells file systems apart by their names in /proc/self/mountinfo, which takes a millisecond and neither ctypes
nor a command.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_NETWORK = frozenset({
    "lustre", "gpfs", "mmfs", "nfs", "nfs4", "beegfs", "beegfs_nodev", "ceph", "cifs", "smb3", "smbfs", "afs", "9p",
    "panfs", "pvfs2", "orangefs", "gfs2", "ocfs2", "glusterfs", "wekafs", "quobyte", "virtiofs", "dvs", "llite",
})  # fmt: skip
_MEMORY = frozenset({"tmpfs", "ramfs"})
_ESCAPES = {b"\\040": b" ", b"\\011": b"\t", b"\\012": b"\n", b"\\134": b"\\"}


@dataclass(frozen=True)
class Space:
    """The free space of a file system, for this user; `free_inodes` is None where the file system does not count
    inodes."""

    free_bytes: int
    free_inodes: int | None
    device: int
    read_only: bool


def is_network(kind: str | None) -> bool:
    """Returns whether nodes share the file system, or a process that may be anywhere serves it (fuse, but for fuseblk,
    which is a local device)."""
    return kind is not None and (kind in _NETWORK or kind == "fuse" or kind.startswith("fuse."))


def is_memory(kind: str | None) -> bool:
    """Returns whether what is written to the file system counts as the job's memory."""
    return kind in _MEMORY


class Machine:
    """Answers what the choice of a directory asks about this machine; tests answer for others."""

    def kind(self, path: str) -> str | None:
        """Returns the file system of the mount point that holds `path`; None if it is unknown."""
        try:
            mounts = Path("/proc/self/mountinfo").read_bytes()
        except OSError:
            return None
        return mount_kind(mounts, os.fsencode(os.path.realpath(path)))

    def kinds_below(self, path: str) -> list[str]:
        """Returns the file systems that are mounted below `path`."""
        try:
            mounts = Path("/proc/self/mountinfo").read_bytes()
        except OSError:
            return []
        above = os.fsencode(os.path.realpath(path)).rstrip(b"/") + b"/"
        return [kind for point, kind in _mounts(mounts) if point.startswith(above) and point != above]

    def space(self, path: str) -> Space:
        """Returns what is free for an ordinary user. Raises OSError."""
        found = os.statvfs(path)
        free_inodes = found.f_favail if found.f_files else None
        device = os.stat(path).st_dev
        return Space(found.f_bavail * found.f_frsize, free_inodes, device, bool(found.f_flag & os.ST_RDONLY))

    def is_own(self, path: str, *, made_for_job: bool) -> bool:
        """Returns whether the directory has a quota (it promises less than the file system around it) or, if it was
        made for the job, is a file system of its own."""
        try:
            top = _top_of_file_system(path)
            if top == os.path.realpath(path):
                return made_for_job
            return os.statvfs(path).f_blocks != os.statvfs(top).f_blocks
        except OSError:
            return False

    def memory_left(self) -> int | None:
        """Returns the lower of what the node has available and what the job's control group leaves; None if unknown."""
        found = [n for n in (_available_bytes(), *_group_left()) if n is not None]
        return max(min(found), 0) if found else None


def _top_of_file_system(path: str) -> str:
    """Returns the uppermost directory above `path` on the same device."""
    top = os.path.realpath(path)
    device = os.stat(top).st_dev
    while top != "/" and os.stat(os.path.dirname(top)).st_dev == device:
        top = os.path.dirname(top)
    return top


def mount_kind(mountinfo: bytes, path: bytes) -> str | None:
    """Returns the type of the innermost mount above `path`; of two mounts on one directory the later hides the
    other."""
    best, kind = -1, None
    for point, found in _mounts(mountinfo):
        above = point if point.endswith(b"/") else point + b"/"
        if len(point) >= best and (path + b"/").startswith(above):
            best, kind = len(point), found
    return kind


def _mounts(mountinfo: bytes) -> Iterator[tuple[bytes, str]]:
    """Yields the directory of each mount and its type."""
    for line in mountinfo.splitlines():
        head, _, tail = line.partition(b" - ")
        words = head.split(b" ")
        if len(words) < 5 or not tail:
            continue
        point = words[4]
        if b"\\" in point:
            for escape, char in _ESCAPES.items():
                point = point.replace(escape, char)
        yield point, tail.split(b" ", 1)[0].decode("ascii", "replace")


def _available_bytes() -> int | None:
    """Returns the bytes of the node's memory that programs may use, the page cache's part included; None if unknown."""
    try:
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    return None


def _group_left() -> list[int]:
    """Returns the limit less the use of each memory control group above this process that has a limit (v2 and v1)."""
    try:
        lines = Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return []
    left: list[int] = []
    for line in lines:
        _, controllers, name = (*line.split(":", 2), "", "")[:3]
        if controllers == "":
            left += _left_below(Path("/sys/fs/cgroup"), name, "memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            top = Path("/sys/fs/cgroup/memory")
            left += _left_below(top, name, "memory.limit_in_bytes", "memory.usage_in_bytes")
    return left


def _left_below(top: Path, name: str, limit: str, usage: str) -> list[int]:
    group = top / name.lstrip("/")
    left = []
    for directory in (group, *group.parents):
        if not directory.is_relative_to(top):
            break
        try:
            most = int((directory / limit).read_text(encoding="ascii"))
            used = int((directory / usage).read_text(encoding="ascii"))
        except (OSError, ValueError):
            # The limit is "max", or this level does not have the file.
            continue
        left.append(most - used)
    return left
