"""Writes what is announced as files below orders/; each is whole under its name or not there at all.

The module owns the form of a table: NUL-separated absolute names, sample by sample, written in pieces to take little
memory.
"""

from __future__ import annotations

import os
from zlib import crc32

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable, Iterator

PIECE_SAMPLES = 8192
MAX_PROBES = 64


def write_table(directory: bytes, table: Any, before: Callable[[], None]) -> bytes:
    """Writes a table unless it is there, and returns its name. Calls `before` if it has to be written."""
    name = table_name(table)
    if not os.access(directory + name, os.F_OK):
        before()
        write(directory, name, pieces(table))
    return name


def table_name(table: Any) -> bytes:
    """Returns a name that is the same for all processes that have the same table."""
    sample = "\0".join(table.take(spread(table.rows)))
    return b"table-%d-%d-%08x" % (table.rows, table.columns, crc32(os.fsencode(sample)))


def spread(rows: int) -> list[int]:
    """Returns the first place, the last, and up to 64 places evenly between."""
    return sorted({0, rows - 1, *range(0, rows, max(1, rows // MAX_PROBES))}) if rows > 0 else []


def pieces(table: Any) -> Iterator[bytes]:
    """Yields the bytes of a table."""
    between = b""
    for begin in range(0, table.rows, PIECE_SAMPLES):
        wanted = range(begin, min(begin + PIECE_SAMPLES, table.rows))
        yield between + os.fsencode(table.joined(wanted))
        between = b"\0"


def write(directory: bytes, name: bytes, pieces: Iterator[Any]) -> None:
    """Writes a file that is whole under its name, or not there at all. Threads, and processes that have one pid in
    containers of their own, may write one table at once; they write the same."""
    temporary = directory + b".%s-" % os.urandom(4).hex().encode() + name
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        try:
            for piece in pieces:
                _write_all(fd, memoryview(piece).cast("B"))
        finally:
            os.close(fd)
        os.rename(temporary, directory + name)
    except BaseException:
        os.unlink(temporary)
        raise


def _write_all(fd: int, data: Any) -> None:
    while data:
        data = data[os.write(fd, data) :]
