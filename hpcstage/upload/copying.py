"""Copies the content of one local file, and tells what the copy is worth.

Owns the seal: a copy is sealed if the kernel granted a lease for reading before it, and the file's times stayed as they
were. It refuses one while anybody has the file open for writing or mapped, and where nobody had, the next store changes
the times before it changes the file. So a sealed copy of a file whose times are the same is that file.
"""

from __future__ import annotations

import errno
import os
import stat
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

from hpcstage.leases import is_written
from hpcstage.upload.facts import Here, Sums

PIECE_BYTES = 1 << 20
FILE_CLOCK = 5
"""The clock from which the kernel takes the times of files (CLOCK_REALTIME_COARSE)."""
_LOOKS, _LOOK_S = 50, 0.002
"""A file that changes all the time is copied after so many looks."""
_BLOCK_BYTES = 512

Pace = Callable[[int], object]
"""Called with each number of bytes before they are written; waits as long as it has to."""


class Copied(NamedTuple):
    """A local file, as it was copied."""

    here: Here
    sums: Sums | None
    is_sealed: bool
    is_whole: bool
    """Whether the file stayed as it was while it was copied."""


class Source:
    """An open local file."""

    def __init__(self, path: str, *, can_seal: bool) -> None:
        """`can_seal` says whether the local file system keeps what a seal stands on. Raises OSError."""
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        try:
            self.fd = os.open(path, flags | os.O_NOATIME)
        except PermissionError:
            self.fd = os.open(path, flags)
        self._can_seal = can_seal
        self.status = self._settled()
        self.here = Here.of(self.status)
        self.can_be_written = self._can_be_written()

    def __enter__(self) -> Source:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self.fd)

    def copy(self, to: int, pace: Pace, *, with_sums: bool = True) -> Copied:
        """Copies the whole file, holes as holes; a file that has any has no sums. Raises OSError."""
        size_bytes = self.status.st_size
        if with_sums and self.status.st_blocks * _BLOCK_BYTES >= size_bytes:
            return self._copied(_copy_range(self.fd, to, range(size_bytes), Sums(), pace))
        for data in _data_ranges(self.fd, size_bytes):
            _copy_range(self.fd, to, data, None, pace)
        os.ftruncate(to, size_bytes)
        return self._copied(None)

    def append(self, to: int, before: Sums, pace: Pace) -> Copied:
        """Copies what follows the bytes of `before`. Raises OSError."""
        return self._copied(_copy_range(self.fd, to, range(before.size_bytes, self.status.st_size), before, pace))

    def sums(self, size_bytes: int) -> Copied:
        """Sums the first bytes."""
        return self._copied(sums_of(self.fd, size_bytes))

    def _copied(self, sums: Sums | None) -> Copied:
        is_whole = Here.of(os.fstat(self.fd)) == self.here
        return Copied(self.here, sums, is_whole and self._can_seal and not self.can_be_written, is_whole)

    def _can_be_written(self) -> bool:
        try:
            return is_written(self.fd)
        except OSError:  # nobody gets a lease here
            return self._can_seal

    def _settled(self) -> os.stat_result:
        """Returns the file's attributes once the clock of files has gone on since its last change: another change gives
        it another time then. That clock stands still for milliseconds."""
        for _ in range(_LOOKS):
            now_ns = time.clock_gettime_ns(FILE_CLOCK)
            status = os.fstat(self.fd)
            if status.st_ctime_ns < now_ns:
                break
            time.sleep(_LOOK_S)
        return status


def sums_of(fd: int, size_bytes: int) -> Sums:
    """Returns the sums of the first bytes of a file; of fewer where it ends before."""
    found, buffer = Sums(), memoryview(bytearray(min(PIECE_BYTES, max(1, size_bytes))))
    while found.size_bytes < size_bytes:
        count = os.preadv(fd, [buffer[: size_bytes - found.size_bytes]], found.size_bytes)
        if not count:
            break
        found = found.plus(buffer[:count])
    return found


def finish(fd: int, status: os.stat_result) -> os.stat_result:
    """Gives a copy the mode and times of what it is of, and forces it to the disk. Returns what it is then."""
    os.fchmod(fd, stat.S_IMODE(status.st_mode))
    os.utime(fd, ns=(status.st_atime_ns, status.st_mtime_ns))
    os.fsync(fd)
    return os.fstat(fd)


def sync_directory(path: str | os.PathLike[str]) -> None:
    """Forces the names of a directory to the disk, where its file system can. Raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in {errno.EINVAL, errno.ENOTSUP}:
            raise
    finally:
        os.close(fd)


def _copy_range(source: int, to: int, span: range, sums: Sums | None, pace: Pace) -> Sums | None:
    buffer, at = memoryview(bytearray(min(PIECE_BYTES, max(1, len(span))))), span.start
    while at < span.stop:
        count = os.preadv(source, [buffer[: span.stop - at]], at)
        if not count:
            raise OSError(errno.EAGAIN, "the file became shorter while it was copied")
        piece = buffer[:count]
        pace(count)
        sums = sums and sums.plus(piece)
        while piece:
            written = os.pwrite(to, piece, at)
            piece, at = piece[written:], at + written
    return sums


def _data_ranges(fd: int, size_bytes: int) -> Iterator[range]:
    """Yields where a file has data, by what the file system says."""
    at = 0
    while at < size_bytes:
        try:
            start = os.lseek(fd, at, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:
                return
            raise
        at = min(size_bytes, os.lseek(fd, start, os.SEEK_HOLE))
        yield range(start, at)
