"""Makes the node directory, `<local>/hpcstage-<uid>/<run id>`, locks it, and finds the directories of dead jobs.

Owns names, permissions and locks. A lock is an flock on `lock` in a node directory: it lives as long as a process
holds the open file, so a directory whose lock can be taken belongs to a job that is dead. Looking for directories and
making one each take a lock on the base directory, so that no process sees a directory whose lock is not yet taken. It
deletes no data: it renames directories of dead jobs aside, and the daemon deletes them.
"""

from __future__ import annotations

import fcntl
import os
import re
import stat
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hpcstage.errors import LocalDiskProblem
from hpcstage.protocol import nodedir

if TYPE_CHECKING:
    from hpcstage.job.localdir import LocalDir

SUN_PATH_BYTES = 108
"""The bytes of sockaddr_un.sun_path with its final NUL."""
_DEAD = "dead-"
_BASE_LOCK = ".lock"
_LINK_NOTE = "sock.dir"
_LINK = "n"
_RUN_ID = re.compile(r"[A-Za-z0-9_\[\]][A-Za-z0-9_.\[\]-]{0,99}")


@dataclass(frozen=True)
class NodeDirectory:
    """A node directory. The process that holds `lock_fd` owns it; the wrapper hands it on to the daemon."""

    path: Path
    lock_fd: int | None
    """The descriptor of the lock; None if another wrapper of the same launch owns the directory: attach to its
    daemon."""
    leftovers: tuple[Path, ...]
    """Directories of dead jobs, renamed aside; to be deleted with `remove`."""
    sock: Path
    """A name of the socket that has few enough bytes."""
    short_dir: Path | None
    """The directory made for that name; None if the node directory's own name is short enough."""

    @property
    def log(self) -> Path:
        """The path of the daemon's log."""
        return self.path / nodedir.LOG

    def close(self) -> None:
        """Closes the lock (the daemon holds it itself) and removes a short name of the socket."""
        if self.lock_fd is not None:
            os.close(self.lock_fd)
        drop_short(self.short_dir)


def claim(local: LocalDir, run_id: str, *, host: str = "", timeout_s: float = 5.0) -> NodeDirectory:
    """Makes the node directory and takes its lock, or finds it taken by a wrapper of the same launch.

    `host` keeps nodes apart where they see the same directory. Raises LocalDiskProblem.
    """
    if not _RUN_ID.fullmatch(run_id) or run_id.startswith(_DEAD):
        raise ValueError(f"{run_id!r} cannot name a directory")
    base = local.path / base_name(os.geteuid(), host if local.is_network else "")
    try:
        with _base(base) as base_fd, _locked(base_fd, base, timeout_s):
            leftovers = tuple(_put_aside(base, base_fd))
            lock_fd = _make(base_fd, run_id)
    except OSError as error:
        raise LocalDiskProblem(f"cannot make {base / run_id}: {error.strerror or error}", "give --local-dir") from None
    return NodeDirectory(base / run_id, lock_fd, leftovers, *sock_path(base / run_id, os.environ))


def base_name(uid: int, host: str = "") -> str:
    """Returns the name of the directory that all runs of a user share on a disk."""
    return f"hpcstage-{uid}-{host}" if host else f"hpcstage-{uid}"


def outputs_base(local: LocalDir, host: str) -> Path:
    """Returns the directory of all runs' output directories on a disk, which `kept` makes; `host` keeps nodes apart
    that see the same."""
    name = f"{nodedir.OUTPUTS_BASE}{os.geteuid()}"
    return local.path / (f"{name}-{host}" if local.is_network else name)


def leftovers(base: Path, *, timeout_s: float = 5.0) -> list[Path]:
    """Renames the directories of dead jobs below `base` aside and returns them; none if there is no base."""
    if not base.is_dir():
        return []
    with _base(base) as base_fd, _locked(base_fd, base, timeout_s):
        return list(_put_aside(base, base_fd))


def retire(node_dir: Path, *, timeout_s: float = 5.0) -> Path:
    """Renames our own node directory aside at the end, so that no later wrapper finds it. Returns its new path."""
    with _base(node_dir.parent) as base_fd, _locked(base_fd, node_dir.parent, timeout_s):
        return node_dir.parent / _rename_aside(base_fd, node_dir.name)


def remove(path: Path) -> None:
    """Deletes a directory that was put aside; what cannot be deleted stays for the next run. Follows no links."""
    import shutil

    shutil.rmtree(path, ignore_errors=True)


def sock_path(node_dir: Path, env: Mapping[str, str]) -> tuple[Path, Path | None]:
    """Returns the name to bind or connect to, and the private directory with a link that is made for it if the node
    directory's own name is too long."""
    direct = node_dir / nodedir.SOCK
    if len(os.fsencode(direct)) < SUN_PATH_BYTES:
        return direct, None
    import tempfile

    short = Path(tempfile.mkdtemp(prefix="hs-", dir=_short_parent(env)))
    (short / _LINK).symlink_to(node_dir)
    with suppress(OSError), (node_dir / _LINK_NOTE).open("ab") as note:
        note.write(os.fsencode(short) + b"\0")
    return short / _LINK / nodedir.SOCK, short


def drop_short(short_dir: Path | None) -> None:
    """Removes what `sock_path` made."""
    if short_dir is not None:
        with suppress(OSError):
            (short_dir / _LINK).unlink(missing_ok=True)
            short_dir.rmdir()


def _short_parent(env: Mapping[str, str]) -> str:
    runtime = env.get("XDG_RUNTIME_DIR", "")
    with suppress(OSError):
        if runtime.startswith("/") and len(os.fsencode(runtime)) < 80 and _is_private(os.lstat(runtime)):
            return runtime
    return "/tmp"  # noqa: S108 - mkdtemp makes it safe, and it holds one link


def _is_private(found: os.stat_result) -> bool:
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o077


@contextmanager
def _base(base: Path) -> Iterator[int]:
    """Opens the base directory and makes it if missing. Raises LocalDiskProblem if it is a link or another user's."""
    with suppress(FileExistsError):
        base.mkdir(mode=0o700)
    try:
        fd = os.open(base, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError as error:
        what = f"{base} cannot be used: {error.strerror}"
        if base.is_symlink():
            what = f"{base} is a symbolic link, which hpcstage does not follow"
        raise LocalDiskProblem(what, "remove it, or give another --local-dir") from None
    try:
        found = os.fstat(fd)
        if found.st_uid != os.geteuid():
            raise LocalDiskProblem(
                f"{base} belongs to user {found.st_uid}", "give another --local-dir, and tell the site"
            )
        if found.st_mode & 0o077:
            os.fchmod(fd, 0o700)
        yield fd
    finally:
        os.close(fd)


@contextmanager
def _locked(base_fd: int, base: Path, timeout_s: float) -> Iterator[None]:
    fd = os.open(_BASE_LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600, dir_fd=base_fd)
    try:
        deadline = time.monotonic() + timeout_s
        while not _try_lock(fd):
            if time.monotonic() > deadline:
                raise LocalDiskProblem(f"{base / _BASE_LOCK} is held for {timeout_s:g} s", "see who holds it: fuser -v")
            time.sleep(0.002)
        yield
    finally:
        os.close(fd)


def _try_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _make(base_fd: int, run_id: str) -> int | None:
    """Makes a directory and returns its lock; None if a living one has the name (dead ones were just put aside)."""
    try:
        os.mkdir(run_id, 0o700, dir_fd=base_fd)
    except FileExistsError:
        return None
    fd = os.open(f"{run_id}/{nodedir.LOCK}", os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600, dir_fd=base_fd)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        raise
    return fd


def _put_aside(base: Path, base_fd: int) -> Iterator[Path]:
    for name in sorted(os.listdir(base_fd)):
        with suppress(OSError):
            found = os.stat(name, dir_fd=base_fd, follow_symlinks=False)
            if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
                continue
            if name.startswith(_DEAD):
                yield base / name
            elif _is_dead(base_fd, name):
                _drop_links(base / name)
                yield base / _rename_aside(base_fd, name)


def _is_dead(base_fd: int, name: str) -> bool:
    try:
        fd = os.open(f"{name}/{nodedir.LOCK}", os.O_RDWR | os.O_NOFOLLOW, dir_fd=base_fd)
    except FileNotFoundError:
        # Directories are made and locked under the base's lock, which we hold: its maker died in between.
        return True
    try:
        return _try_lock(fd)
    finally:
        os.close(fd)


def _rename_aside(base_fd: int, name: str) -> str:
    aside = _DEAD + os.urandom(8).hex()
    os.rename(name, aside, src_dir_fd=base_fd, dst_dir_fd=base_fd)
    return aside


def _drop_links(node_dir: Path) -> None:
    """Removes the short directories that a killed run left in /tmp, only if they are ours and lead here."""
    try:
        noted = (node_dir / _LINK_NOTE).read_bytes()
    except OSError:
        return
    for name in noted.split(b"\0")[:64]:
        short = Path(os.fsdecode(name))
        with suppress(OSError):
            if name and _is_private(os.lstat(short)) and Path(os.readlink(short / _LINK)) == node_dir:
                drop_short(short)
