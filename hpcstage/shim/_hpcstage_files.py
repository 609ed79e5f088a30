"""Writes what is announced: files below orders/, whole under their names or not there at all.

Owns the form of a table: NUL-separated absolute names, sample by sample, written in pieces to take little memory.
"""

from __future__ import annotations

import os
from zlib import crc32

from _hpcstage_marks import spread  # type: ignore[import-not-found]

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Iterator

PIECE_SAMPLES = 8192


def table_name(dataset: Any, table: Any) -> bytes:
    """The same for all processes that have the same table."""
    kind = "%s.%s" % (type(dataset).__module__, type(dataset).__qualname__)
    sample = "\0".join([kind, *table.take(spread(table.rows))])
    return b"table-%d-%d-%08x" % (table.rows, table.columns, crc32(os.fsencode(sample)))


def pieces(table: Any) -> Iterator[bytes]:
    """The table's bytes."""
    between = b""
    for begin in range(0, table.rows, PIECE_SAMPLES):
        names = table.take(range(begin, min(begin + PIECE_SAMPLES, table.rows)))
        piece = "\0".join(names)
        if piece.count("\0") != len(names) - 1:
            piece = "\0".join("" if "\0" in name else name for name in names)
        yield between + os.fsencode(piece)
        between = b"\0"


def write(directory: bytes, name: bytes, pieces: Iterator[Any]) -> None:
    """Whole under its name, or not at all. Two that write one table write the same."""
    temporary = directory + b".%d-" % os.getpid() + name
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
