"""Copies one file from the source to the store: read, check that it stayed as it was, publish.

Owns the steps of a copy, which `largecopy` takes. `_copy.c` takes them for a small file in one go, without the
interpreter lock, where it was built. A file appears under its final name complete or not at all, and never in the place
of something that is there.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import stat
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

from hpcstage.store.counters import ThreadStats

try:
    from hpcstage.store import _copy  # type: ignore[attr-defined, unused-ignore]
except ImportError:
    _copy = None

HAS_TURNS = _copy is not None
"""Whether threads can take turns at the source."""
CHUNK_BYTES = 1 << 20
DROP_BYTES = 1 << 20
"""Sources of this size and more are dropped from the page cache once copied: no program here reads them again."""
PERMISSIONS = 0o777
SECOND_NS = 1_000_000_000
TICK_NS = 20_000_000
"""Longer than a tick of the clock from which files get their times (1 to 10 ms); some file systems keep whole
seconds."""
MOST_TICKS = 3
_NO_LOCK = contextlib.nullcontext()
_BLOCK_OF_STAT = 512


class Status(IntEnum):
    """The result of a transfer; `_copy.c` repeats the first eight."""

    OK = 0
    SOURCE_ERROR = 1
    LOCAL_ERROR = 2
    CHANGED = 3
    """The source changed while it was copied."""
    NOT_REGULAR = 4
    TOO_LARGE = 5
    """The file is not copied in one go; never reported to the daemon."""
    CANCELLED = 6
    EXISTS = 7
    """Something already has the final name."""
    LOST = 8
    """The copier died; never sent by a copier."""


@dataclass(frozen=True)
class CopyJob:
    """A file to copy. `link` is a second name for copies of symbolic links, by which lstat shows what they are.
    `urgent` says that a program waits for the file: it goes before others that wait for their turn at the source."""

    source: bytes
    temporary: bytes
    target: bytes
    link: bytes | None = None
    nofollow: bool = False
    urgent: bool = False


@dataclass
class CopyOutcome:
    """The result of a job; size and mtime are the copy's."""

    status: Status = Status.OK
    errno: int = 0
    size_bytes: int = 0
    mtime_ns: int = 0
    read_ns: int = 0
    """The time in calls that read the source, which `copy` leaves out."""


class CopyError(Exception):
    """Ends a copy with this status."""

    def __init__(self, status: Status, number: int = 0) -> None:
        super().__init__(status, number)
        self.status = status
        self.errno = number


@dataclass
class CopyWorker:
    """Owns what a thread needs to copy: its counters, its buffer and, where it was built, the C function."""

    stats: ThreadStats
    native: bool = True
    buffer: memoryview = field(init=False)
    address: int = field(init=False)

    def __post_init__(self) -> None:
        self.buffer = memoryview(bytearray(CHUNK_BYTES))
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.stats.block))
        self.native = self.native and _copy is not None

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """Is held while this thread asks the source for something. Without the C function it does nothing, as there are
        no more threads than may be at the source."""
        if not self.native:
            yield
            return
        _copy.take_turn()
        try:
            yield
        finally:
            _copy.give_turn()

    def write(self, target: int, data: memoryview, position: int) -> None:
        """Writes all of it at a position. Raises CopyError."""
        began = time.monotonic_ns()
        write_all(target, data, position)
        self.stats.wrote(time.monotonic_ns() - began)


def limit_turns(transfers: int) -> None:
    """Sets how many threads of this process may be at the source at a time."""
    if _copy is not None:
        _copy.limit(transfers)


def copy(worker: CopyWorker, job: CopyJob, limit_bytes: int) -> CopyOutcome:
    """Copies a file of at most `limit_bytes` in one go. A larger one is left, and all are without the C function
    (TOO_LARGE)."""
    if not worker.native:
        return CopyOutcome(Status.TOO_LARGE)
    names = (job.source, job.temporary, job.target, job.link)
    values = _copy.copy(*names, job.nofollow, job.urgent, limit_bytes, worker.address)
    return CopyOutcome(Status(values[0]), *values[1:])


class local_errors(contextlib.AbstractContextManager[None]):
    """Turns an OSError into a CopyError of the local disk."""

    status = Status.LOCAL_ERROR

    def __exit__(self, kind: object, value: BaseException | None, traceback: object) -> None:
        if isinstance(value, OSError):
            raise CopyError(self.status, value.errno or errno.EIO) from value


class source_errors(local_errors):
    """Turns an OSError into a CopyError of the source."""

    status = Status.SOURCE_ERROR


_noatime = os.O_NOATIME if hasattr(os, "O_NOATIME") else 0


def open_source(job: CopyJob, stats: ThreadStats) -> int:
    """Opens the source for reading. A FIFO does not block, and the access time stays where we have the permission."""
    global _noatime
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY | (os.O_NOFOLLOW if job.nofollow else 0)
    asked = _noatime  # another thread may take it back in between
    start = time.monotonic_ns()
    with source_errors():
        try:
            fd = os.open(job.source, flags | asked)
        except PermissionError:
            if not asked:
                raise
            fd = os.open(job.source, flags)
            _noatime = 0
        finally:
            stats.opened(time.monotonic_ns() - start)
    return fd


def regular(source: int) -> os.stat_result:
    """Returns the attributes of an open file: a change from here on leaves others. If the file changed within the last
    tick of the clock, waits for the next one. Raises CopyError if it is not a regular file, or goes on changing."""
    for _ in range(MOST_TICKS):
        with source_errors():
            status = os.fstat(source)
        if not stat.S_ISREG(status.st_mode):
            raise CopyError(Status.NOT_REGULAR)
        tick_ns = TICK_NS if status.st_ctime_ns % SECOND_NS else SECOND_NS + TICK_NS
        if abs(time.time_ns() - status.st_ctime_ns) > tick_ns:
            return status
        time.sleep(tick_ns / SECOND_NS)
    raise CopyError(Status.CHANGED)


def create(temporary: bytes) -> int:
    """Creates a file under a temporary name and returns its descriptor."""
    with local_errors():
        return os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)


@dataclass(frozen=True)
class FileRange:
    """The bytes `start` to `start + length` of two open files, the source and its copy, which has its full size if the
    source has holes: they are left out."""

    source: int
    target: int
    start: int
    length: int
    is_sparse: bool = False


def copy_range(
    worker: CopyWorker,
    part: FileRange,
    outcome: CopyOutcome,
    pace: Callable[[int], None] | None = None,
    writing: contextlib.AbstractContextManager[Any] = _NO_LOCK,
    chunk_bytes: int = CHUNK_BYTES,
) -> None:
    """Copies the bytes of a range. `pace` is called before each chunk with its size; `writing` is held while writing,
    since the kernel lets one thread write to a file at a time and has the others spin."""
    position, end = part.start, part.start + part.length
    while position < end:
        if worker.stats.cancelled:
            raise CopyError(Status.CANCELLED)
        if part.is_sparse and (data := _next_data(part.source, position)) > position:
            position = data
            continue
        chunk = worker.buffer[: min(chunk_bytes, end - position)]
        if pace is not None:
            pace(len(chunk))
        with worker.turn(), source_errors():
            began = time.monotonic_ns()
            count = os.preadv(part.source, [chunk], position)
            took = time.monotonic_ns() - began
        outcome.read_ns += took
        worker.stats.read(count, took)
        if not count:
            raise CopyError(Status.CHANGED)
        with writing:
            worker.write(part.target, chunk[:count], position)
        position += count


def is_sparse(status: os.stat_result) -> bool:
    """Returns whether a file may have holes: it has fewer blocks than bytes, also where it is compressed."""
    return status.st_blocks * _BLOCK_OF_STAT < status.st_size


def _next_data(source: int, position: int) -> int:
    """Returns where the next bytes are that are in no hole."""
    try:
        return os.lseek(source, position, os.SEEK_DATA)
    except OSError as error:
        return sys.maxsize if error.errno == errno.ENXIO else position


def write_all(target: int, data: memoryview, position: int) -> None:
    """Writes all of it at a position. Raises CopyError."""
    with local_errors():
        while data:
            count = os.pwrite(target, data, position)
            data, position = data[count:], position + count


def check(source: int, before: os.stat_result) -> os.stat_result:
    """Returns the attributes of an open source. Raises CopyError if they are not what they were before."""
    with source_errors():
        after = os.fstat(source)
    if fingerprint(before) != fingerprint(after):
        raise CopyError(Status.CHANGED)
    return after


def check_and_stamp(source: int, target: int, before: os.stat_result, *, is_mapped: bool = False) -> None:
    """Raises CopyError if the source is not as it was before the copy; gives the copy the source's permission bits and
    modification time. The source's cached pages are of no use any more, unless programs have it mapped."""
    after = check(source, before)
    if after.st_size >= DROP_BYTES and not is_mapped:
        with contextlib.suppress(OSError):
            os.posix_fadvise(source, 0, 0, os.POSIX_FADV_DONTNEED)
    with local_errors():
        os.fchmod(target, after.st_mode & PERMISSIONS)
        os.utime(target, ns=(after.st_mtime_ns, after.st_mtime_ns))


def fingerprint(status: os.stat_result) -> tuple[int, int, int]:
    """Returns the attributes that change when a file does."""
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns


def publish(job: CopyJob) -> None:
    """Gives the copy its final name, unless something has it (EXISTS), such as the tombstone of a file that became
    void."""
    if job.link is not None:
        with local_errors():
            os.link(job.temporary, job.link)
    try:
        _link(job)
    except FileExistsError as error:
        discard(job.link)
        raise CopyError(Status.EXISTS, errno.EEXIST) from error
    except OSError as error:
        discard(job.link)
        raise CopyError(Status.LOCAL_ERROR, error.errno or errno.EIO) from error
    discard(job.temporary)


def _link(job: CopyJob) -> None:
    try:
        os.link(job.temporary, job.target, follow_symlinks=False)
    except FileNotFoundError:
        os.makedirs(os.path.dirname(job.target), mode=0o700, exist_ok=True)
        os.link(job.temporary, job.target, follow_symlinks=False)


def discard(path: bytes | None) -> None:
    """Removes a name if it is there."""
    if path is not None:
        with contextlib.suppress(OSError):
            os.unlink(path)
