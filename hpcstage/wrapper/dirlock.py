"""Owns the lock of DIR, the directory of `--out` or `--checkpoint`: who has it, and whether that process lives.

`flock` holds on one node only on sshfs, other FUSE file systems and some mounts of NFS and Lustre. So the holder's
process is named in the file, and a child of it renews the file's time: from another node that is all one can see.
"""

from __future__ import annotations

import errno
import fcntl
import os
import time
from contextlib import suppress
from functools import partial
from pathlib import Path

from hpcstage.errors import UsageError
from hpcstage.forked import fork, reap
from hpcstage.procio import boot_id
from hpcstage.wrapper import messages
from hpcstage.wrapper.child import is_fatal_pending

LOCK = ".hpcstage-lock"
"""The lock in DIR; names that begin so are never shown to a command and never carried over."""
UNLOCK_S = 2.0
_MOST_LOCKS = 100
_NO_LOCKS = frozenset({errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL})
_REMOVED = frozenset({errno.ENOENT, errno.ESTALE})
WRITABLE = "name a directory that you may write to, on the shared file system"
_ROOM = "free space there, or name a directory on another file system"
MOUNT = "mount its file system again, or name a directory on another one"
REMEDIES = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), _ROOM),
    **dict.fromkeys((errno.ENOTCONN, errno.ESTALE, errno.EIO, errno.ETIMEDOUT, errno.EHOSTDOWN), MOUNT),
}
_OWN = "give each run a directory of its own"
RENEWED_S = 5.0
WATCHED_S = 16.0
"""Who takes the lock waits for so long for a sign of a holder on another node."""
_OLD_S = 600.0
"""A lock that was renewed so long ago is nobody's, however far the clocks are apart."""
_LOOK_S = 0.2
_WRITTEN_S = 2.0
"""Whoever made a lock file has written to it by then, or is dead."""
_SETTLED_S = 1.0
"""Two that come to take a lock at once differ by less."""
_MOST_BYTES = 500
_START = 19
"""The place of the start time behind the name of the process in its stat file."""

_renewing: dict[int, int] = {}
"""The children that renew a lock, by its descriptor."""


class TargetInUse(UsageError):
    """Another run has the lock of DIR; `holder` says which."""

    def __init__(self, said: str, holder: str) -> None:
        super().__init__(f"{said} is in use by {holder}", _OWN)
        self.holder = holder


def lock(target: str, said: str, holder: str) -> int:
    """Takes the lock of DIR and notes who has it; returns its descriptor. Raises TargetInUse if another run has it, by
    the file system's locks or by what stands in the file, and UsageError if DIR cannot be written to."""
    path = os.path.join(target, LOCK)
    for _ in range(_MOST_LOCKS):
        try:
            fd, is_new = _open_lock(path)
        except OSError as error:
            raise unusable(f"{said} cannot be written to", error) from None
        try:
            if _takes(path, fd, said, holder, is_new=is_new):
                return fd
        except OSError as error:
            os.close(fd)
            raise unusable(f"{said} cannot be written to", error) from None
        except UsageError:
            os.close(fd)
            raise
        os.close(fd)  # its holder removed it at its end, or another run was faster
    raise UsageError(f"{said} is used by many runs at once", _OWN)


def _open_lock(path: str) -> tuple[int, bool]:
    """Returns the descriptor of a lock file, and whether this process has made it: of all nodes only one does."""
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    with suppress(FileExistsError):
        return os.open(path, flags | os.O_EXCL, 0o600), True
    return os.open(path, flags, 0o600), False


def _takes(path: str, fd: int, said: str, holder: str, *, is_new: bool) -> bool:
    """Takes a lock file that is nobody's; returns whether it still has the name. Raises as `lock` does, and OSError."""
    if os.fstat(fd).st_nlink > 1:
        raise UsageError(f"{path} is a hard link: another file would be overwritten", "remove it")
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        other = ""
    except OSError as error:
        other = "" if error.errno in _NO_LOCKS else _named_in(fd) or "another run"
    if not (other or is_new):
        other = _living(path)
    if other:
        raise TargetInUse(said, other)
    try:
        return os.stat(path).st_ino == os.fstat(fd).st_ino and _hold(path, fd, holder)
    except OSError as error:
        if error.errno in _REMOVED:
            return False
        with suppress(OSError):
            os.unlink(path)
        raise


def unusable(what: str, error: OSError) -> UsageError:
    return UsageError(f"{what}: {error.strerror}", REMEDIES.get(error.errno or 0, WRITABLE))


def remove_lock(target: str, fd: int) -> None:
    """Removes the lock of DIR and lets go of it."""
    _let_go(fd)
    with suppress(OSError):
        os.unlink(os.path.join(target, LOCK))
    os.close(fd)


def unlock(target: str, fd: int) -> None:
    """Removes the lock of DIR and lets go of it, in a process of its own and in UNLOCK_S at most: a shared file system
    that hangs must not hold up the end of a run."""
    _let_go(fd)
    pid = -1
    with suppress(OSError):
        pid = fork(lambda: remove_lock(target, fd), {fd}, says_why=False)
    os.close(fd)  # the other process lets go of the lock
    if pid > 0:
        reap(pid, UNLOCK_S)


def _named_in(fd: int) -> str:
    """Returns the holder that a lock file names; empty if there is none."""
    return _named(os.pread(fd, _MOST_BYTES, 0))[0]


def _living(path: str) -> str:
    """Returns the holder that a lock file names which another process has made, if it lives; empty otherwise. One on
    another node that may live is watched for WATCHED_S at most."""
    deadline = time.monotonic() + _WRITTEN_S
    while (before := _seen(path)) is not None and not before[1] and time.monotonic() < deadline:
        time.sleep(_LOOK_S)
    if before is None:
        return ""
    holder, process = _named(before[1])
    boot, pid, *_ = [*process.split(), "", ""]
    if not pid.isdigit():
        return ""
    if boot == boot_id():
        return holder if _process(int(pid)) == process else ""
    if abs(time.time() - before[0] / 1e9) > _OLD_S:
        return ""
    messages.warn(f"{path} names {holder}: watching for {WATCHED_S:g} s whether that is still there")
    deadline = time.monotonic() + WATCHED_S
    while time.monotonic() < deadline:
        if is_fatal_pending() or (after := _seen(path)) not in (before, None):
            return holder
        if after is None:
            return ""
        time.sleep(_LOOK_S)
    return ""


def _hold(path: str, fd: int, holder: str) -> bool:
    """Writes who has the lock, and has a child renew it. Returns False if another run, which had watched the same dead
    holder, did that at the same time. Raises OSError."""
    before = _named(os.pread(fd, _MOST_BYTES, 0))[1]
    content = f"{holder}\n{_process(os.getpid())}\n".encode()
    os.truncate(fd, 0)
    os.pwrite(fd, content, 0)
    os.fsync(fd)  # other nodes see it from here on
    if before and not before.startswith(boot_id()):
        time.sleep(_SETTLED_S)
        seen = _seen(path)
        if seen is None or seen[1] != content:
            return False
    with suppress(OSError):
        _renewing[fd] = fork(partial(_renew, path, content), (), says_why=False)
    return True


def _let_go(fd: int) -> None:
    """Ends the child that renews a lock."""
    if pid := _renewing.pop(fd, None):
        reap(pid, 0.0)


def _renew(path: str, content: bytes) -> None:
    """Renews a lock as long as the file is the holder's. It is opened each time: a file that is removed while it is
    open stays on NFS under another name."""
    while True:
        time.sleep(RENEWED_S)
        try:
            fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            return
        except OSError:  # a file system that does not answer may come back
            continue
        try:
            if os.pread(fd, _MOST_BYTES, 0) != content:
                return
            os.utime(fd)
        except OSError:
            continue
        finally:
            os.close(fd)


def _named(content: bytes) -> tuple[str, str]:
    holder, process, *_ = [*content.decode(errors="replace").splitlines(), "", ""]
    return holder.strip(), process


def _seen(path: str) -> tuple[int, bytes] | None:
    """Returns the time and the content of a lock file, read anew; None if it has gone."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        return os.fstat(fd).st_mtime_ns, os.pread(fd, _MOST_BYTES, 0)
    finally:
        os.close(fd)


def _process(pid: int) -> str:
    """Returns the name of a process that no other ever has on any node; empty if there is none."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return ""
    return f"{boot_id()} {pid} {stat[stat.rindex(b')') + 2 :].split()[_START].decode()}"
