"""Gives a checkpoint its name when it is whole, and takes it away before it is removed. Until then it is hidden.

The module owns hidden names: `.NAME.` and twelve digits, beside the name itself. It knows nothing of what lies there.
What changes names passes through `Files.call`, so that a test can end the process between any two calls.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import shutil
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import ClassVar

from hpcstage.checkpoint.generations.files import Files
from hpcstage.renaming import KNOWS_NOT, exchange_names

_HIDDEN = re.compile(r"\.(.+)\.[0-9a-f]{12}")


def hidden(path: Path) -> Path:
    """Returns a hidden name for a checkpoint, one that nothing has."""
    return path.with_name(f".{path.name}.{os.urandom(6).hex()}")


def hidden_name(name: str) -> str | None:
    """Returns the name of the checkpoint that has this hidden one; None for a name of another form."""
    match = _HIDDEN.fullmatch(name)
    return match[1] if match else None


def left_behind(path: Path) -> list[Path]:
    """Returns what has a hidden name of this checkpoint, the newest first."""
    try:
        names = os.listdir(path.parent)
    except (FileNotFoundError, NotADirectoryError):
        return []
    return sorted((path.with_name(name) for name in names if hidden_name(name) == path.name), key=_age)


class FileLock:
    """The lock of a file, as long as this object lives in this process: one that is forked from it, such as a loader's
    worker, may outlive it and has no part in it. Where nothing can be locked, as on a full file system, it is none."""

    _held: ClassVar[set[int]] = set()

    def __init__(self, path: Path, said: str = "") -> None:
        """Makes the file if it is missing, and says something there. Raises BlockingIOError if it is locked."""
        self.release: Callable[[], object] = int
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except OSError:
            return
        self._held.add(fd)
        self.release = weakref.finalize(self, self._close, fd)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if said:
                os.write(fd, said.encode())
        except BlockingIOError:
            self.release()
            raise
        except OSError:
            pass

    @classmethod
    def _close(cls, fd: int) -> None:
        if fd in cls._held:
            cls._held.remove(fd)
            os.close(fd)

    @classmethod
    def close_all(cls) -> None:
        """Closes all locks of this process."""
        for fd in tuple(cls._held):
            cls._close(fd)


os.register_at_fork(after_in_child=FileLock.close_all)


@contextlib.contextmanager
def claimed(path: Path, file: str) -> Iterator[None]:
    """Keeps other processes from what has a hidden name, by the lock of a file in it: that of a directory is one of
    this node alone on many shared file systems, or is refused. Raises BlockingIOError if a living process keeps this
    one from it. Of a file that a checkpoint took the place of it does nothing."""
    lock = FileLock(path / file) if _is_directory(path) else None
    try:
        yield
    finally:
        if lock is not None:
            lock.release()


def give_name(files: Files, temporary: Path, path: Path) -> Path | None:
    """Gives a whole checkpoint its name. Returns where the one is now that had it, if one had: it may go when the name
    is on the disk."""
    try:
        files.call(os.rename, temporary, path)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR, errno.EISDIR):
            raise
        return _exchanged(files, temporary, path)
    return None


def sync_name(files: Files, path: Path) -> None:
    """Has a name on the disk. Its directory may be one that the user names by a symbolic link."""
    files.sync_directory(path.parent.resolve())


def discard(files: Files, path: Path, first: str) -> None:
    """Removes what has a hidden name, as far as that is possible. The file `first` goes before all others, so that the
    rest is not taken for a whole checkpoint."""
    with contextlib.suppress(OSError):
        if not _is_directory(path):
            files.call(os.unlink, path)
            return
        files.call(os.unlink, path / first)
    shutil.rmtree(path, ignore_errors=True)


def _exchanged(files: Files, temporary: Path, path: Path) -> Path:
    """Gives a checkpoint the name that another has, in one step; where the file system cannot, the other steps aside
    first, and back if that fails. Returns where the other is."""
    try:
        files.call(exchange_names, temporary, path)
    except OSError as error:
        if error.errno not in KNOWS_NOT:
            raise
    else:
        return temporary
    aside = hidden(path)
    files.call(os.rename, path, aside)
    try:
        files.call(os.rename, temporary, path)
    except BaseException:
        files.call(os.rename, aside, path)
        raise
    return aside


def _is_directory(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def _age(path: Path) -> int:
    """Returns a number that is larger the longer ago something changed."""
    try:
        return -path.lstat().st_mtime_ns
    except FileNotFoundError:  # it has just gone
        return 0
