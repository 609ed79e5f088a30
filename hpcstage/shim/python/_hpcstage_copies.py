"""Puts the source's descriptor, with offset and flags, in the place of a copy's that is used for more than reading.

The module owns which descriptors are those of copies, also under their names below /proc/self/fd and /dev/fd, and the
exchange. Where the source has gone or is another file by now, the copy is what is left of the file that was opened, and
stays.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat as stat_bits

import _hpcstage_wire as wire  # type: ignore[import-not-found]

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

DELETED = " (deleted)"
NONE_FREE = (errno.EMFILE, errno.ENFILE)
NOT_AGAIN = os.O_CREAT | os.O_EXCL | os.O_TRUNC | os.O_APPEND
_open = os.open
_close = os.close
_dup = os.dup
_dup2 = os.dup2
_fcntl = fcntl.fcntl
_stat = os.stat
_fstat = os.fstat
_lseek = os.lseek
_listdir = os.listdir
_lexists = os.path.lexists
_readlink = os.readlink
_get_inheritable = os.get_inheritable


class Copies:
    """The open copies of this process."""

    def __init__(self, context: Any) -> None:
        self._context = context

    def named(self, path: Any) -> int | None:
        """Returns N of /proc/self/fd/N and the like, if that is a copy's descriptor; else None."""
        if type(path) is not str or path[:6] not in ("/proc/", "/dev/f"):
            return None
        head, _, number = path.rpartition("/")
        if head not in ("/proc/self/fd", "/dev/fd", "/proc/thread-self/fd", "/proc/%d/fd" % os.getpid()):
            return None
        return int(number) if number.isdigit() and self.source_of(int(number)) is not None else None

    def source_of(self, fd: int) -> str | None:
        """Returns the source's name for a descriptor of a copy; None for any other descriptor."""
        try:
            local = _readlink("/proc/self/fd/%d" % fd)
        except (OSError, TypeError):
            return None
        if local.endswith(DELETED) and not _lexists(local):
            local = local[: -len(DELETED)]
        source: str | None = self._context.paths.source_of(local)
        return source

    def changes(self, fd: int) -> None:
        """Prepares a change through a descriptor: the source takes a copy's place, and the copy is dropped. A
        descriptor of the source may have been opened before there was a copy."""
        source = self.source_of(fd)
        if source is None:
            self._context.dropper.drop_open(fd)
        elif self.surrender(fd):
            self._context.dropper.drop(source)

    def change(self, source: str) -> None:
        """Prepares a change of a file by its name: the source takes the place of all open copies of it."""
        if self._context.measuring():
            return
        for fd in _numbers():
            if self.source_of(fd) == source:
                self.surrender(fd)

    def lock(self, fd: int) -> None:
        """Puts the source in the place of a copy before a lock, which a copy cannot have; raises where no descriptor is
        free for it."""
        try:
            self._surrender(fd)
        except OSError as error:
            if error.errno in NONE_FREE:
                raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK)) from None

    def surrender(self, fd: int) -> bool:
        """Puts the source in the place of a copy, for every number that shares the open file. Returns whether it did.

        Another thread may close a number, which is another file's then: one of our own keeps the open file meanwhile.
        """
        try:
            return self._surrender(fd)
        except OSError:
            return False

    def _surrender(self, fd: int) -> bool:
        source = self.source_of(fd)
        if source is None:
            return False
        kept = _dup(fd)
        try:
            opened = self._open_source(kept, source) if self.source_of(kept) == source else -1
            return opened >= 0 and _replace(fd, kept, opened)
        finally:
            _close(kept)

    def _open_source(self, copy: int, source: str) -> int:
        opened = _open(source, _fcntl(copy, fcntl.F_GETFL) & ~NOT_AGAIN | os.O_CLOEXEC)
        if self._is_source(_fstat(copy), _fstat(opened)):
            return opened
        _close(opened)
        return -1

    def _is_source(self, copy: os.stat_result, now: os.stat_result) -> bool:
        """Returns whether a file is the very same as the copy's source, as far as that is known; else whether it looks
        so."""
        listed = self._context.attributes.of(copy)
        if listed is not None:
            return (listed.st_dev, listed.st_ino) == (now.st_dev, now.st_ino)
        return stat_bits.S_ISREG(now.st_mode) and _content(copy) == _content(now)

    def stat(self, fd: int, info: os.stat_result) -> os.stat_result:
        """Returns the source's attributes for a descriptor that may be a copy's; else what fstat said of it."""
        context = self._context
        if not context.attributes.ready() or info.st_dev != context.attributes.device:
            return info
        listed: os.stat_result | None = context.attributes.of(info)
        if listed is not None:
            return listed
        source = self.source_of(fd)
        if source is None:
            return info
        context.count(wire.COUNTER_SOURCE_STATS)
        try:
            now = _stat(source)
        except OSError:
            return info
        return now if _content(now) == _content(info) else info


def _content(info: os.stat_result) -> tuple[int, int]:
    return info.st_size, info.st_mtime_ns


def _numbers() -> list[int]:
    """Returns the numbers that are open; none where no descriptor is free to list them."""
    try:
        return [int(name) for name in _listdir("/proc/self/fd")]
    except OSError:
        return []


def _replace(fd: int, kept: int, source: int) -> bool:
    """Puts a source, which is closed then, in the place of all other numbers that share the open file of `kept`.
    Returns whether `fd` is one of them."""
    done = False
    try:
        _lseek(source, _lseek(kept, 0, os.SEEK_CUR), os.SEEK_SET)
        for number in _numbers():
            try:
                inheritable = _get_inheritable(number)
                if number != kept and _share(kept, number):
                    _dup2(source, number, inheritable)
                    done = done or number == fd
            except OSError:  # it is closed by now
                continue
    finally:
        _close(source)
    return done


def _share(kept: int, number: int) -> bool:
    """Returns whether a number stands for the same open file: then a flag that means nothing for files is shared."""
    one, other = _fstat(kept), _fstat(number)
    if (one.st_dev, one.st_ino) != (other.st_dev, other.st_ino):
        return False
    flags, before = _fcntl(kept, fcntl.F_GETFL), _fcntl(number, fcntl.F_GETFL)
    _fcntl(kept, fcntl.F_SETFL, flags ^ os.O_NONBLOCK)
    after = _fcntl(number, fcntl.F_GETFL)
    _fcntl(kept, fcntl.F_SETFL, flags)
    return bool((before ^ after) & os.O_NONBLOCK)
