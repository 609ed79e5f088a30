"""Owns the target's paths, the names of temporary files in it, and what makes a change of a directory last."""

from __future__ import annotations

import errno
import hashlib
import os
import posixpath
import stat
from collections.abc import Callable
from contextlib import suppress
from itertools import chain, count
from typing import TypeVar

from hpcstage.outputs.facts import EntryKind, Fingerprint, TargetEntry
from hpcstage.outputs.journal import Charter

TEMPORARY = ".hpcstage-"
"""Temporary names in the target begin so; nothing of that name is ever carried over."""
_NO_LINKS = frozenset({errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL, errno.EMLINK, errno.EXDEV})
_T = TypeVar("_T")


class Target:
    """Owns the way from names to paths of the target."""

    def __init__(self, charter: Charter) -> None:
        self.root = charter.target
        self.is_shared = bool(charter.node)
        """Whether other nodes of the run write there, too."""
        self._owner = f"{charter.run_id}/{charter.node}" if charter.node else charter.run_id
        self._suffix = charter.suffix
        self._inode = charter.target_inode

    def path(self, name: str) -> str:
        """Returns the path of a name."""
        return f"{self.root}/{name}"

    def temporary(self, name: str) -> str:
        """Returns the temporary name that this node has for a name in this run, whichever of its processes asks."""
        digest = hashlib.blake2b(f"{self._owner}/{name}".encode("utf-8", "surrogateescape"), digest_size=10)
        return posixpath.join(posixpath.dirname(name), TEMPORARY + digest.hexdigest())

    def free_name_beside(self, name: str, last: str) -> str:
        """Returns a name beside that of a file of others: the one that the local file has had, or one that is free."""
        first = f"{name}.{self._suffix}"
        names = chain([last or first, first], (f"{first}.{number}" for number in count(1)))
        return next(one for one in names if one == last or status_of(self.path(one)) is None)

    def give_name(self, temporary: str, name: str, *, is_new: bool) -> bool:
        """Renames a temporary file. Tells whether it has the name; one that is new it gets in one step only if nobody
        else has given it meanwhile, where the file system has hard links and other nodes write there. Raises
        OSError."""
        if is_new and self.is_shared:
            try:
                os.link(self.path(temporary), self.path(name), follow_symlinks=False)
            except FileExistsError:
                return False
            except OSError as error:
                if error.errno not in _NO_LINKS:
                    raise
            else:
                os.unlink(self.path(temporary))
                return True
        os.rename(self.path(temporary), self.path(name))
        return True

    def remove_temporary(self, name: str) -> None:
        """Removes the temporary file that a killed process may have left for a name."""
        with suppress(OSError):
            os.unlink(self.path(self.temporary(name)))

    def check(self) -> None:
        """Raises OSError where the target's directory has gone: what is mounted over may be missing."""
        if os.stat(self.root).st_ino != self._inode:
            raise OSError(errno.ESTALE, "this is not the directory that the run began with", self.root)

    def in_parents(self, name: str, make: Callable[[], _T]) -> _T:
        """Calls `make`; where the directory above the name is missing, makes it and calls again."""
        try:
            return make()
        except FileNotFoundError:
            self.make_parents(name)
            return make()

    def make_parents(self, name: str) -> None:
        """Makes the directories above a name."""
        os.makedirs(self.path(posixpath.dirname(name)), exist_ok=True)

    def sync_directory(self, name: str) -> None:
        """Forces the directory of a name to the disk."""
        fd = os.open(self.path(posixpath.dirname(name)), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        except OSError as error:
            if error.errno not in {errno.EINVAL, errno.ENOTSUP}:
                raise
        finally:
            os.close(fd)

    def remove(self, name: str) -> None:
        """Removes a file or an empty directory. Raises OSError."""
        path = self.path(name)
        if stat.S_ISDIR(os.lstat(path).st_mode):
            os.rmdir(path)
        else:
            os.unlink(path)


def change_mode(path: str, found: os.stat_result, mode: int) -> None:
    """Gives a directory a mode, if it has another one. It keeps the bit by which what is made in it gets its group: the
    target's file system gave it that bit. Raises OSError."""
    mode |= found.st_mode & stat.S_ISGID
    if stat.S_IMODE(found.st_mode) != mode:
        os.chmod(path, mode)


def status_of(path: str) -> os.stat_result | None:
    """Returns what lstat says; None if there is nothing of that name."""
    try:
        return os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        if error.errno == errno.ELOOP:  # a directory above it is a link to itself
            return None
        raise


def is_same(entry: TargetEntry, found: os.stat_result) -> bool:
    """Tells whether what the target has is what the run last saw or wrote there."""
    if entry.kind is EntryKind.DIRECTORY:
        return stat.S_ISDIR(found.st_mode)
    if entry.kind is EntryKind.EARLIER:
        return found.st_ino == entry.there.inode and found.st_mtime_ns <= entry.there.mtime_ns
    if entry.appending:
        return found.st_ino == entry.there.inode and found.st_size >= entry.there.size_bytes
    return Fingerprint.of(found) == entry.there
