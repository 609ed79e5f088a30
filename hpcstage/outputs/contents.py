"""Copies the content of one file to the target: as a whole, or what was appended since the last time.

Owns the rule by which a file is said to have only grown: the first bytes have the two checksums that they had when they
were copied. The sums of a file are kept in memory, by the inode of its copy in the target, since hard links to one
local file have several copies; files with holes have none.
"""

from __future__ import annotations

import errno
import os
import stat
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from hpcstage.outputs.facts import Fingerprint

PIECE_BYTES = 1 << 20
_SUMMED_BYTES = 256 << 10
"""The bytes that are read at once for sums; many files are summed at a time."""
MOST_SUMS = 100_000
_BLOCK_BYTES = 512


@dataclass(frozen=True)
class Sums:
    """The checksums of the first bytes of a file."""

    size_bytes: int = 0
    crc: int = 0
    adler: int = 1

    def plus(self, data: memoryview) -> Sums:
        """Returns the sums with more bytes."""
        return Sums(self.size_bytes + len(data), zlib.crc32(data, self.crc), zlib.adler32(data, self.adler))


class Contents:
    """Owns the sums of the files that were copied, and the rate."""

    def __init__(self, pace: Callable[[int], object] | None = None) -> None:
        """`pace` is called with each number of bytes before they are written, and waits as long as it has to."""
        self._pace = pace
        self._sums: dict[int, Sums] = {}

    def copy(self, source: int, target: int, status: os.stat_result) -> None:
        """Copies a whole file as long as it was at `status`, holes as holes. Raises OSError."""
        inode = os.fstat(target).st_ino
        self._sums.pop(inode, None)
        if status.st_blocks * _BLOCK_BYTES >= status.st_size:
            self._remember(inode, self._copy_range(source, target, 0, status.st_size, Sums()))
            return
        for start, end in _data_ranges(source, status.st_size):
            self._copy_range(source, target, start, end, Sums())
        os.ftruncate(target, status.st_size)

    def learn(self, copy: str, there: Fingerprint) -> None:
        """Reads a copy back where its sums are not known: it has holes, or another process made it. Raises OSError."""
        if there.inode in self._sums:
            return
        target = os.open(copy, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            if Fingerprint.of(os.fstat(target)) == there:
                self._remember(there.inode, _sums_of(target, there.size_bytes))
        finally:
            os.close(target)

    def has_only_grown(
        self,
        source: int,
        status: os.stat_result,
        inode: int,
        before_bytes: int,
        goes_on: Callable[[], bool] = lambda: True,
    ) -> bool:
        """Reads the first bytes of a file again and tells whether they are those of the copy of this inode. Returns
        False as soon as `goes_on` does."""
        sums = self._sums.get(inode)
        if sums is None or sums.size_bytes != before_bytes or status.st_size < before_bytes:
            return False
        return _sums_of(source, before_bytes, goes_on) == sums

    def append(self, source: int, target: int, status: os.stat_result) -> None:
        """Copies what was appended, after `has_only_grown`. Raises OSError."""
        inode = os.fstat(target).st_ino
        sums = self._sums.pop(inode, None)
        if sums is None:
            raise BlockingIOError(errno.EAGAIN, "the sums of the file were forgotten")
        self._remember(inode, self._copy_range(source, target, sums.size_bytes, status.st_size, sums))

    def _copy_range(self, source: int, target: int, start: int, end: int, sums: Sums) -> Sums:
        buffer = memoryview(bytearray(min(PIECE_BYTES, max(1, end - start))))
        at = start
        while at < end:
            count = os.preadv(source, [buffer[: end - at]], at)
            if not count:
                raise OSError(errno.EAGAIN, "the file became shorter while it was copied")
            piece = buffer[:count]
            if self._pace is not None:
                self._pace(count)
            sums = sums.plus(piece)
            while piece:
                written = os.pwrite(target, piece, at)
                piece, at = piece[written:], at + written
        return sums

    def _remember(self, inode: int, sums: Sums) -> None:
        if len(self._sums) >= MOST_SUMS:
            self._sums.clear()
        self._sums[inode] = sums


def _sums_of(fd: int, size_bytes: int, goes_on: Callable[[], bool] = lambda: True) -> Sums:
    """Returns the sums of the first bytes of a file; those of fewer bytes where it ends before, or `goes_on` says
    no."""
    found = Sums()
    buffer = memoryview(bytearray(min(_SUMMED_BYTES, max(1, size_bytes))))
    while found.size_bytes < size_bytes and goes_on():
        count = os.preadv(fd, [buffer[: size_bytes - found.size_bytes]], found.size_bytes)
        if not count:
            break
        found = found.plus(buffer[:count])
    return found


def are_equal(one: str, other: str) -> bool:
    """Tells whether two files have the same content. Raises OSError."""
    fds = [open_for_reading(one)]
    try:
        fds.append(os.open(other, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW))
        sizes = {os.fstat(fd).st_size for fd in fds}
        at, size_bytes = 0, max(sizes)
        while len(sizes) == 1 and at < size_bytes:
            pieces = [os.pread(fd, PIECE_BYTES, at) for fd in fds]
            if pieces[0] != pieces[1] or not pieces[0]:
                return False
            at += len(pieces[0])
        return len(sizes) == 1
    finally:
        for fd in fds:
            os.close(fd)


def open_for_reading(path: str) -> int:
    """Opens a local file without a change of its times, as far as that is allowed. Raises OSError."""
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        return os.open(path, flags | os.O_NOATIME)
    except PermissionError:
        return os.open(path, flags)


def _data_ranges(fd: int, size_bytes: int) -> Iterator[tuple[int, int]]:
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
        yield start, at


def special_kind(mode: int) -> str | None:
    """Returns the name of a kind of file that is not carried over; None if the kind is carried over."""
    kinds = ((stat.S_ISFIFO, "FIFO"), (stat.S_ISSOCK, "socket"), (stat.S_ISCHR, "device"), (stat.S_ISBLK, "device"))
    return next((name for test, name in kinds if test(mode)), None)
