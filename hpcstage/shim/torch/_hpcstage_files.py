"""Writes what is announced as files below orders/; each is whole under its name or not there at all.

The module owns the form of a table: NUL-separated absolute names, sample by sample, written in pieces to take little
memory. Where the samples are chosen from another table, that table is written, and the rows of it.
"""

from __future__ import annotations

import os
import sys
from zlib import crc32

import _hpcstage_tables as tables  # type: ignore[import-not-found]

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable, Iterator

PIECE_SAMPLES = 8192
MAX_PROBES = 64
CHOSEN_FROM_SAMPLES = 1 << 16
"""A table with fewer rows is written as it is."""


def write_table(directory: bytes, table: Any, before: Callable[[], None]) -> bytes:
    """Writes what is not there yet of a table, and returns its name. Calls `before` if there is much to write."""
    flat = tables.flattened(table) if table.rows > CHOSEN_FROM_SAMPLES else None
    if flat is None:
        return _write_names(directory, [table], before)
    leaves, rows = flat
    base = _write_names(directory, leaves, before)
    if sys.byteorder == "big":
        rows.byteswap()
    name = b"chosen-%d-%08x-of-" % (len(rows), crc32(rows)) + base
    if not os.access(directory + name, os.F_OK):
        write(directory, name, iter([rows]))
    return name


def _write_names(directory: bytes, parts: list[Any], before: Callable[[], None]) -> bytes:
    name = table_name(parts)
    if not os.access(directory + name, os.F_OK):
        before()
        write(directory, name, pieces(parts))
    return name


def table_name(parts: list[Any]) -> bytes:
    """Returns a name that is the same for all processes that have the same table, whose parts these are."""
    sample = "\0".join(name for part in parts for name in part.take(spread(part.rows)))
    rows, columns = sum(part.rows for part in parts), parts[0].columns
    return b"table-%d-%d-%08x" % (rows, columns, crc32(os.fsencode(sample)))


def spread(rows: int) -> list[int]:
    """Returns the first place, the last, and up to 64 places evenly between."""
    return sorted({0, rows - 1, *range(0, rows, max(1, rows // MAX_PROBES))}) if rows > 0 else []


def pieces(parts: list[Any]) -> Iterator[bytes]:
    """Yields the bytes of a table."""
    between = b""
    for part in parts:
        for begin in range(0, part.rows, PIECE_SAMPLES):
            wanted = range(begin, min(begin + PIECE_SAMPLES, part.rows))
            yield between + os.fsencode(part.joined(wanted))
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
