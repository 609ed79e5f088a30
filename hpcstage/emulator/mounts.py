"""Lists the emulator's mounts and ends them. Never touches a mount itself: a dead one would block or fail."""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

import psutil

from hpcstage.emulator.state import PREFIX, StateFile

_MOUNTINFO = Path("/proc/self/mountinfo")
_NAME = re.compile(r"hpcstage-slowfs-(\d+)-(\d+)-")
_ESCAPE = re.compile(rb"\\([0-7]{3})")
_MNT_DETACH = 2
_UNMOUNT_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class Mount:
    """One mounted emulator."""

    path: bytes
    starter_pid: int
    server_pid: int
    uid: int


def mounts() -> list[Mount]:
    """Returns all mounted emulators of this mount namespace, of whatever user."""
    return [m for line in _MOUNTINFO.read_bytes().splitlines() if (m := parse_line(line))]


def parse_line(line: bytes) -> Mount | None:
    """Parses one line of mountinfo: optional fields end with a dash, then type, source and the super block's
    options."""
    head, dash, tail = line.partition(b" - ")
    parts = tail.split(b" ")
    if not dash or len(parts) < 3:
        return None
    match = _NAME.fullmatch(parts[1].decode("ascii", "replace"))
    if not match:
        return None
    path = _ESCAPE.sub(lambda m: bytes([int(m[1], 8)]), head.split(b" ")[4])
    uid = re.search(rb"user_id=(\d+)", parts[2])
    return Mount(path, int(match[1]), int(match[2]), int(uid[1]) if uid else 0)


def is_mounted(path: Path) -> bool:
    """Returns whether an emulator is mounted exactly there."""
    wanted = os.fsencode(path)
    return any(m.path == wanted for m in mounts())


def unmount(path: Path | bytes) -> None:
    """Takes the mount out of the tree at once; files that are still open there keep working until the server ends."""
    name = os.fsencode(path)
    if os.geteuid() == 0 and ctypes.CDLL(None).umount2(name, _MNT_DETACH) == 0:
        return
    command = [b"fusermount3", b"-u", b"-z", b"-q", name]
    subprocess.run(command, timeout=_UNMOUNT_TIMEOUT_S, check=False, stderr=subprocess.DEVNULL)


def clean_stale() -> list[Path]:
    """Unmounts what dead starters of this user left behind, and returns where that was."""
    stale = [m for m in mounts() if m.uid == os.geteuid() and not _alive(m.starter_pid)]
    for mount in stale:
        unmount(mount.path)
    for path in StateFile.left_behind():
        pid = path.name.removeprefix(PREFIX).partition("-")[0]
        if pid.isdigit() and not _alive(int(pid)):
            path.unlink(missing_ok=True)
    return [Path(os.fsdecode(m.path)) for m in stale]


def _alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.Error:
        return False
