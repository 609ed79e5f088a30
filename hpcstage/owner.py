"""Owns the owner of DIR, the directory of `--out` or `--checkpoint`: the file that says which run writes there, how a
run becomes the owner, and whether an owner lives.

An owner holds a socket whose name is in the file. The kernel closes it with the last of the run's processes that hold
it; on the owner's node that is the whole truth. A child of the owner renews the file's time, and removes the file when
the socket is closed; from other nodes its time is all that one can see. No lock of the file system is used: `flock`
holds on one node only on some, and until a lost node comes back on others.

Of those that find a dead owner, the one that makes the claim to its place gets it. Whoever was stopped at any step, or
found dead while it lived, reads another owner before it goes on.
"""

from __future__ import annotations

import errno
import os
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import NamedTuple

from hpcstage.forked import fork
from hpcstage.procio import boot_id
from hpcstage.reading import readable

OWNER = ".hpcstage-owner"
"""The file in DIR; names that begin so are never shown to a command and never carried over."""
RENEWED_S = 15.0
OLD_S = 60.0
"""An owner on another node that has not renewed its file for so long, by the clock of DIR's file system, is dead."""
REMOVED_S = 2.0
"""The longest wait for the removal of the file at the end: a shared file system that hangs must not hold up a run."""
_LOOK_S = 0.2
_REMOVED = frozenset({errno.ENOENT, errno.ESTALE})
_MOST_BYTES = 500

_held: dict[int, _Held] = {}
"""What this process owns, by the descriptors of the sockets."""


class Owned(Exception):
    """Another run owns DIR; `holder` says which."""

    def __init__(self, holder: str) -> None:
        super().__init__(holder)
        self.holder = holder


class Owner(NamedTuple):
    """What stands in the file."""

    holder: str
    """The run, for people."""
    where: str
    """The boot of the machine and the network namespace in which the socket is."""
    nonce: str
    """The name of the socket."""

    @classmethod
    def of(cls, data: bytes) -> Owner:
        """Reads it; what is not there is empty."""
        holder, where, nonce, *_ = [*data.decode(errors="replace").splitlines(), "", "", ""]
        return cls(holder or "another run", where, nonce if nonce.isalnum() else "")

    def data(self) -> bytes:
        """Returns the content of the file."""
        return f"{self.holder}\n{self.where}\n{self.nonce}\n".encode()


class _Held(NamedTuple):
    path: str
    owner: Owner
    renewing: int
    """The child that renews the file."""


def take(
    target: str,
    holder: str,
    *,
    tell: Callable[[str], object] = lambda _: None,
    is_stopped: Callable[[], bool] = lambda: False,
) -> int:
    """Becomes the owner of DIR, and returns the descriptor by which this process and those that inherit it are that.
    `tell` gets the holder that is watched for up to OLD_S; `is_stopped` ends that. Raises Owned if another run is the
    owner, and OSError if DIR cannot be written to."""
    path, own = f"{target}/{OWNER}", Owner(holder, _where(), os.urandom(8).hex())
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(_name(own))
        listener.listen()
        while not _names(path, own):
            if not _make(path, own) and (dead := _dead(path, tell, is_stopped)) is not None:
                _replace(path, dead, own, is_stopped)
        _held[listener.fileno()] = _Held(path, own, _renewing(path, own))
    except BaseException:
        listener.close()
        raise
    return listener.detach()


def let_go(fd: int) -> None:
    """Ends the ownership, as soon as no other process holds the socket; waits for REMOVED_S at most until the file has
    gone."""
    held = _held.pop(fd)
    pid = held.renewing
    with suppress(OSError):
        if _has_ended(pid):  # it was killed, and has removed nothing
            pid = _renewing(held.path, held.owner)
    os.close(fd)
    with suppress(OSError):
        pidfd = os.pidfd_open(pid)
        readable([pidfd], REMOVED_S)
        os.close(pidfd)
    _has_ended(pid)


def holder_of(target: str) -> str:
    """Returns the holder that the file names; empty where there is none. Raises OSError."""
    seen = _seen(f"{target}/{OWNER}")
    return "" if seen is None else seen[0].holder


def time_there(target: str) -> int:
    """Returns the time by the clock of DIR's file system; it shows, too, whether DIR can be written. Raises OSError."""
    probe = f"{target}/.hpcstage-{os.urandom(8).hex()}"
    fd = os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        return os.fstat(fd).st_mtime_ns
    finally:
        os.close(fd)
        with suppress(OSError):
            os.unlink(probe)


def _make(path: str, own: Owner) -> bool:
    """Makes a file that says who is the owner, if there is none of the name; of all nodes only one does. A kill between
    its two steps leaves an empty file, which is an owner on another node that does not renew it. Raises OSError."""
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        return False
    try:
        try:
            os.write(fd, own.data())
        finally:
            os.close(fd)
    except OSError:
        with suppress(OSError):
            os.unlink(path)
        raise
    return True


def _dead(path: str, tell: Callable[[str], object], is_stopped: Callable[[], bool]) -> Owner | None:
    """Returns what a file says that a dead owner left; None if there is none any more. Raises Owned if the owner lives,
    and OSError."""
    seen = _seen(path)
    if seen is None:
        return None
    owner, mtime_ns = seen
    if owner.where == _where():
        if _listens(owner):
            raise Owned(owner.holder)
        return owner
    left_s = OLD_S - (time_there(os.path.dirname(path)) - mtime_ns) / 1e9
    if left_s > 0:
        tell(owner.holder)
    deadline = time.monotonic() + min(left_s, OLD_S)
    while time.monotonic() < deadline:
        time.sleep(_LOOK_S)
        seen = _seen(path)
        if seen is None or seen[0] != owner:
            return None
        if seen[1] != mtime_ns or is_stopped():
            raise Owned(owner.holder)
    return owner


def _replace(path: str, dead: Owner, own: Owner, is_stopped: Callable[[], bool]) -> None:
    """Takes the place of a dead owner, unless another one does. The claim to the place has a name of its own for each
    owner, and is made before the last look at the owner: who makes it after another has used it sees that one. Raises
    Owned if another one that lives has the claim, and OSError."""
    claim = f"{path}.{dead.nonce}"
    if not _make(claim, own):
        if (claimed := _dead(claim, lambda _: None, is_stopped)) is not None:
            _remove(claim, claimed)
    elif _names(path, dead):
        with suppress(FileNotFoundError):  # this process stood still, and was taken for dead
            os.rename(claim, path)
    else:
        _remove(claim, own)


def _renewing(path: str, own: Owner) -> int:
    """Starts the child that renews the file, and returns its pid. Raises OSError."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.connect(_name(own))
        renew, kept = partial(_renew, path, own, connection), {connection.fileno()}
        return fork(renew, kept, says_why=False, ends_with_parent=False)


def _has_ended(pid: int) -> bool:
    """Tells whether a child has ended, which is forgotten then."""
    with suppress(ChildProcessError):
        return os.waitpid(pid, os.WNOHANG)[0] != 0
    return True


def _renew(path: str, own: Owner, connection: socket.socket) -> None:
    """Renews the file until nobody holds the socket any more, and removes it then. It is opened each time: a file that
    is removed while it is open stays on NFS under another name."""
    _stand_alone()
    while not readable([connection.fileno()], RENEWED_S):
        try:
            fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            return
        except OSError:  # a file system that does not answer may come back
            continue
        try:
            if Owner.of(os.pread(fd, _MOST_BYTES, 0)) != own:
                return
            os.utime(fd)
        except OSError:
            continue
        finally:
            os.close(fd)
    with suppress(OSError):
        _remove(path, own)


def _stand_alone() -> None:
    """Has this process outlive its parent, since others may hold the socket, and a signal to the parent's group; nobody
    waits for the end of its output, and no file system is in use by it."""
    os.setsid()
    os.chdir("/")
    null = os.open(os.devnull, os.O_RDWR)
    for fd in range(3):
        os.dup2(null, fd)
    os.close(null)


def _remove(path: str, owner: Owner) -> None:
    """Removes a file if it names this owner. Raises OSError."""
    if _names(path, owner):
        with suppress(FileNotFoundError):
            os.unlink(path)


def _names(path: str, owner: Owner) -> bool:
    """Tells whether a file names this owner. Raises OSError."""
    seen = _seen(path)
    return seen is not None and seen[0] == owner


def _seen(path: str) -> tuple[Owner, int] | None:
    """Returns what a file says, read anew, and its time; None if there is none. Raises OSError."""
    fd = -1
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        return Owner.of(os.pread(fd, _MOST_BYTES, 0)), os.fstat(fd).st_mtime_ns
    except OSError as error:
        if error.errno in _REMOVED:
            return None
        raise
    finally:
        if fd >= 0:
            os.close(fd)


def _listens(owner: Owner) -> bool:
    """Tells whether somebody holds the socket of an owner on this node."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.setblocking(False)
        try:
            connection.connect(_name(owner))
        except ConnectionRefusedError:
            return False
        except BlockingIOError:  # many have asked
            return True
    return True


def _name(owner: Owner) -> str:
    return f"\0hpcstage-owner-{owner.nonce}"


def _where() -> str:
    return f"{boot_id()} {os.stat('/proc/self/ns/net').st_ino}"
