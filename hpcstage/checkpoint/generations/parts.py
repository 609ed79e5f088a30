"""Finds where the tensors of a file begin, so that blocks begin there too.

`torch.save` writes a zip archive whose records stand one behind the other, and safetensors a header before the tensors:
a name or a list that grows by some bytes moves all that follows, and with blocks that are counted from the beginning of
the file every block would have changed. A wrong guess costs bytes and nothing else, since the places of the cuts are
kept in the manifest.
"""

from __future__ import annotations

import contextlib
import io
import os
import struct
import zipfile
from collections.abc import Iterator
from itertools import pairwise

from hpcstage.checkpoint.generations.files import Files
from hpcstage.checkpoint.generations.layout import BLOCK_BYTES

_ZIP = b"PK\x03\x04"
_LOCAL_HEADER_BYTES = 30
_LONGEST_HEADER_BYTES = 100 << 20
_MALFORMED = (
    *(zipfile.BadZipFile, struct.error, ValueError, EOFError),
    *(NotImplementedError, OverflowError, MemoryError),
)


def parts_of(files: Files, fd: int, size_bytes: int) -> tuple[int, ...]:
    """Returns the sizes of the parts of a file, in each of which blocks begin anew; none if it is one part."""
    if size_bytes <= BLOCK_BYTES:
        return ()
    start = bytearray(9)
    files.read_into(fd, memoryview(start), 0)
    cuts: set[int] = set()
    if start.startswith(_ZIP):
        with contextlib.suppress(*_MALFORMED):
            cuts.update(_records(files, fd, size_bytes))
    elif start[8:] == b"{" and int.from_bytes(start[:8], "little") <= _LONGEST_HEADER_BYTES:
        cuts.add(8 + int.from_bytes(start[:8], "little"))
    edges = sorted({0, size_bytes, *(cut for cut in cuts if 0 < cut < size_bytes)})
    return tuple(end - begin for begin, end in pairwise(edges)) if len(edges) > 2 else ()


def _records(files: Files, fd: int, size_bytes: int) -> Iterator[int]:
    """Yields where the content of each large record of an archive begins and ends."""
    with zipfile.ZipFile(_ArchiveFile(files, fd, size_bytes)) as archive:
        records = archive.infolist()
    header = memoryview(bytearray(_LOCAL_HEADER_BYTES))
    for record in records:
        if record.compress_size >= BLOCK_BYTES and 0 <= record.header_offset < size_bytes:
            files.read_into(fd, header, record.header_offset)
            lengths = int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
            begin = record.header_offset + _LOCAL_HEADER_BYTES + lengths
            yield begin
            yield begin + record.compress_size


class _ArchiveFile(io.RawIOBase):
    """A descriptor as zipfile wants a file."""

    def __init__(self, files: Files, fd: int, size_bytes: int) -> None:
        super().__init__()
        self._files = files
        self._fd = fd
        self._size_bytes = size_bytes
        self._position = 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._size_bytes}[whence]
        self._position = min(max(0, base + offset), self._size_bytes)
        return self._position

    def tell(self) -> int:
        return self._position

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        count = self._files.read_into(self._fd, memoryview(buffer), self._position)
        self._position += count
        return count
