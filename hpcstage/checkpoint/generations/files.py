"""Makes the system calls by which generations are written, read and dropped, and names what lies in their directory.

Every call of a commit passes through `Files.call`, so that a test can end the process between any two of them. A
generation is the directory NUMBER, and committed as soon as its manifest has its final name.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

PIECE_BYTES = 4 << 20
"""The size of a read: large enough that calls cost nothing, small enough that the bytes are still in the processor's
cache when they are hashed."""
_COPIES_BY_HAND = frozenset({errno.EXDEV, errno.EPERM, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP})
_DIGITS = 8
_ATTEMPT_BYTES = 16
_ATTEMPT = re.compile(f"[0-9a-f]{{{2 * _ATTEMPT_BYTES}}}")
LAST_NUMBER = 10**_DIGITS - 1
"""The highest number of a generation; names of this many digits sort as the numbers do."""
OURS = ".hpcstage-"
"""Names that begin so are ours, and no part of any state."""
LOCK = ".hpcstage-lock"
"""The name of the file in a directory that is locked."""
_NO_LOCKS = frozenset({errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL})


class GenerationPart(str, Enum):
    """The files of a generation."""

    DATA = "data"
    """The blocks that the generation stores itself."""
    BLOCKS = "blocks"
    """The table of all its blocks: hashes, and where the bytes are."""
    MANIFEST = "manifest.json"
    PARITY = "parity"
    """The parities that the node holds for others."""
    CODING = "coding"
    """The record of the erasure code: which node holds what of this generation, with the checksums of all blocks."""

    def __str__(self) -> str:
        return self.value  # pathlib names a file by it


OWN_PARTS = (GenerationPart.DATA, GenerationPart.BLOCKS, GenerationPart.MANIFEST)
"""The files that a commit writes; they never change. The order is that in which the erasure code takes them."""


@dataclass(frozen=True)
class GenerationId:
    """Which generation: its number, which all nodes of a job share, and the attempt at that number."""

    number: int
    attempt: str
    """A random number in hexadecimal digits: where an attempt fails on some nodes, another may have the same number."""

    def __post_init__(self) -> None:
        if not is_number(self.number):
            raise ValueError(f"a generation has a number from 1 to {LAST_NUMBER}, not {self.number}")
        if not _ATTEMPT.fullmatch(self.attempt):
            raise ValueError(f"{self.attempt!r} names no attempt at a generation")

    @classmethod
    def new(cls, number: int) -> GenerationId:
        """Returns another attempt at a number."""
        return cls(number, os.urandom(_ATTEMPT_BYTES).hex())


def lock_file(fd: int, how: int) -> bool:
    """Takes the lock of a file that is open for writing, and names the host there; returns False where the file
    system has no locks. Raises OSError."""
    try:
        fcntl.flock(fd, how)
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        return False
    with contextlib.suppress(OSError):  # a full file system
        os.write(fd, f"{socket.gethostname()}\n".encode())
    return True


def generation_path(directory: Path, number: int) -> Path:
    """Returns the directory of a generation."""
    return directory / f"{number:0{_DIGITS}}"


def generation_number(name: str) -> int | None:
    """Returns the number of the generation that a directory of this name holds; None for other names."""
    if len(name) != _DIGITS or not (name.isascii() and name.isdecimal()):
        return None
    return int(name) or None


def is_number(number: int) -> bool:
    """Tells whether a generation may have this number."""
    return number in range(1, LAST_NUMBER + 1)


class Files:
    """The system calls of a store. A subclass may watch or end them at `call`."""

    def __init__(self) -> None:
        self._copies_in_kernel = True

    def call(self, function: Callable[P, R], /, *arguments: P.args, **options: P.kwargs) -> R:
        """Makes one system call."""
        return function(*arguments, **options)

    @contextlib.contextmanager
    def opened(self, path: str | Path, flags: int = os.O_RDONLY, mode: int = 0o600) -> Iterator[int]:
        """Gives a descriptor of a file or directory; a symbolic link is not followed and a FIFO does not block."""
        fd = self.call(os.open, path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, mode)
        try:
            yield fd
        finally:
            self.call(os.close, fd)

    def created(self, path: Path) -> contextlib.AbstractContextManager[int]:
        """Gives a descriptor of a new file; a file that is there is an error."""
        return self.opened(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)

    def read_into(self, fd: int, view: memoryview, offset: int) -> int:
        """Fills the buffer from a place of the file; returns how much there was until its end."""
        done = 0
        while done < len(view):
            count = self.call(os.preadv, fd, [view[done:]], offset + done)
            if not count:
                break
            done += count
        return done

    def write(self, fd: int, data: bytes | bytearray | memoryview, offset: int) -> None:
        """Writes all bytes at a place of the file."""
        left = memoryview(data)
        while left:
            count = self.call(os.pwrite, fd, left, offset)
            left, offset = left[count:], offset + count

    def write_new(self, path: Path, content: bytes) -> None:
        """Makes a file with this content and has it on the disk."""
        with self.created(path) as fd:
            self.write(fd, content, 0)
            self.call(os.fsync, fd)

    def publish(self, path: Path, content: bytes) -> None:
        """Makes a file of this name: all that the directory names so far is on the disk before, and the name after."""
        temporary = path.with_name(f".{path.name}")
        self.write_new(temporary, content)
        self.sync_directory(path.parent)
        self.call(os.rename, temporary, path)
        self.sync_directory(path.parent)

    def copy(self, source: int, offset: int, count: int, target: int, to: int) -> int:
        """Copies bytes from file to file and returns how many the source had.

        The kernel copies them, by reference where the file system can; by hand where it cannot copy between these two.
        """
        done = 0
        while done < count:
            step = self._copy_some(source, offset + done, count - done, target, to + done)
            if not step:
                break
            done += step
        return done

    def sync_directory(self, path: Path) -> None:
        """Has the names of a directory on the disk."""
        with self.opened(path, os.O_RDONLY | os.O_DIRECTORY) as fd:
            self.call(os.fsync, fd)

    def remove_generation(self, path: Path) -> None:
        """Removes the directory of a generation; the manifest goes first, so that no half of one is ever committed."""
        names = self.call(os.listdir, path)
        if GenerationPart.MANIFEST in names:
            self.call(os.unlink, path / GenerationPart.MANIFEST)
            self.sync_directory(path)
        for name in names:
            if name != GenerationPart.MANIFEST:
                self.call(os.unlink, path / name)
        self.call(os.rmdir, path)

    def _copy_some(self, source: int, offset: int, count: int, target: int, to: int) -> int:
        if self._copies_in_kernel:
            try:
                return self.call(os.copy_file_range, source, target, count, offset, to)
            except OSError as error:
                if error.errno not in _COPIES_BY_HAND:
                    raise
                self._copies_in_kernel = False
        view = memoryview(bytearray(min(count, PIECE_BYTES)))
        found = self.read_into(source, view, offset)
        self.write(target, view[:found], to)
        return found
