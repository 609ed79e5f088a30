"""Handles many small files in one call: reads them into a buffer, or writes them from one and publishes them as copiers
do.

`_files.c` does both without the interpreter lock where it was built. Without it this module reads them in Python, and
`receiver` writes each as it does a larger file.
"""

from __future__ import annotations

import contextlib
import os
import stat
from enum import IntEnum

from hpcstage.exchange.transport.buffers import Buffer
from hpcstage.store import copyfile

try:
    from hpcstage.store import _files  # type: ignore[attr-defined, unused-ignore]
except ImportError:
    _files = None

_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY


class ReadOutcome(IntEnum):
    """Says what became of a file that was to be read; `_files.c` has the same numbers."""

    WHOLE = 0
    LOST = 1
    NO_ROOM = 2


ReadRow = tuple[int, int, int, int, int]
"""The fields are: ReadOutcome, size in bytes, mode, mtime in ns, place in the buffer."""
Gotten = tuple[int, int, int, int, bytes, bytes, bytes | None]
"""The fields are: place in the buffer, size in bytes, mode, mtime in ns, temporary name, final name, second name."""


def read_files(paths: list[bytes], buffer: Buffer, at: int, end: int) -> list[ReadRow]:
    """Reads files into the buffer, one behind the other, until one finds no space."""
    if _files is not None:
        return _files.read_files(paths, buffer.address, at, end)  # type: ignore[no-any-return]
    found = []
    for path in paths:
        given = _read(path, buffer.view, at, end)
        found.append(given)
        if given[0] == ReadOutcome.NO_ROOM:
            break
        at += given[1] if given[0] == ReadOutcome.WHOLE else 0
    return found


def can_write() -> bool:
    """Returns whether there is `write_files`."""
    return _files is not None


def write_files(rows: list[Gotten], buffer: Buffer) -> list[int]:
    """Writes and publishes files that lie whole in a buffer. Returns for each errno or 0; EEXIST: something has the
    name already."""
    return _files.write_files(rows, buffer.address)  # type: ignore[no-any-return]


def open_given(path: bytes) -> tuple[int, os.stat_result]:
    """Opens a staged file; returns its descriptor and its attributes. Raises OSError."""
    fd = os.open(path, _FLAGS)
    found = os.fstat(fd)
    if not stat.S_ISREG(found.st_mode):
        os.close(fd)
        raise IsADirectoryError
    return fd, found


def read_into(fd: int, view: memoryview, position: int) -> bool:
    """Fills the view from a position on. Returns False if the file is shorter, or cannot be read."""
    count = 0
    with contextlib.suppress(OSError):
        while count < len(view):
            more = os.preadv(fd, [view[count:]], position + count)
            if not more:
                break
            count += more
    return count == len(view)


def _read(path: bytes, view: memoryview, at: int, end: int) -> ReadRow:
    try:
        fd, found = open_given(path)
    except OSError:
        return ReadOutcome.LOST, 0, 0, 0, at
    try:
        what = ReadOutcome.NO_ROOM
        if found.st_size <= end - at:
            what = ReadOutcome.WHOLE if read_into(fd, view[at : at + found.st_size], 0) else ReadOutcome.LOST
        return what, found.st_size, found.st_mode & copyfile.PERMISSIONS, found.st_mtime_ns, at
    finally:
        os.close(fd)
