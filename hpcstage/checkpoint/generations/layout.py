"""Cuts the files of a state into blocks, and finds blocks of the same content by their hashes alone.

Blocks have 64 KB. Smaller ones find fewer changed bytes where changes are scattered (an embedding that is trained by
SGD: half as many with 4 KB), but cost sixteen times the records and calls. 64 KB is also the block of the erasure code.

Blocks begin anew with each part of a file, which is where its tensors begin. `torch.save` writes a zip archive whose
records stand one behind the other, and safetensors a header before the tensors: a name or a list that grows by some
bytes moves all that follows, and with blocks that are counted from the beginning of the file every block would have
changed. A wrong guess costs bytes and nothing else, since the sizes of the parts are kept in the manifest.
"""

from __future__ import annotations

import contextlib
import io
import struct
import zipfile
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

import numpy as np
import numpy.typing as npt

from hpcstage.checkpoint.generations.files import Files

BLOCK_BYTES = 64 << 10

Hashes = npt.NDArray[np.uint64]
"""One row for each block: the two words of its xxh3-128."""
Indices = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]
Table = npt.NDArray[np.void]
"""One record for each block of a generation."""
RECORD = np.dtype([("hash", "<u8", (2,)), ("offset", "<u8"), ("length", "<u4"), ("generation", "<u4")])
"""`generation` has the bytes in its data file, `length` of them at `offset`; 0 bytes: a block of zeros, stored
nowhere."""

_ZIP = b"PK\x03\x04"
_LOCAL_HEADER_BYTES = 30
_LONGEST_HEADER_BYTES = 100 << 20
_MALFORMED = (
    *(zipfile.BadZipFile, struct.error, ValueError, EOFError, OSError),
    *(NotImplementedError, OverflowError, MemoryError),
)


@dataclass(frozen=True)
class BlockLayout:
    """The blocks of all files, numbered from 0 in the order of the files. The last block of a part may be short."""

    block_bytes: int
    parts: tuple[tuple[int, ...], ...]
    """For each file the sizes of its parts, in each of which blocks begin anew; entries without content have none."""

    @cached_property
    def part_starts(self) -> list[list[int]]:
        """Returns for each file the first block of each of its parts, and at the end the block after its last."""
        made, first = [], 0
        for sizes in self.parts:
            made.append(list(accumulate((-(-size // self.block_bytes) for size in sizes), initial=first)))
            first = made[-1][-1]
        return made

    @cached_property
    def starts(self) -> list[int]:
        """Returns the first block of each file, and at the end the number of all blocks."""
        return [0, *(starts[-1] for starts in self.part_starts)]

    @property
    def count(self) -> int:
        """Returns the number of all blocks."""
        return self.starts[-1]

    def blocks(self, file: int) -> range:
        """Returns the blocks of a file."""
        return range(self.starts[file], self.starts[file + 1])

    def file_of(self, block: int) -> int:
        """Returns the file that a block belongs to."""
        return bisect_right(self.starts, block) - 1

    @cached_property
    def lengths(self) -> npt.NDArray[np.uint32]:
        """Returns the bytes of each block."""
        made = np.full(self.count, self.block_bytes, np.uint32)
        for sizes, starts in zip(self.parts, self.part_starts, strict=True):
            for size, end in zip(sizes, starts[1:], strict=True):
                if tail := size % self.block_bytes:
                    made[end - 1] = tail
        return made

    @cached_property
    def offsets(self) -> npt.NDArray[np.int64]:
        """Returns where in its file each block begins."""
        before = np.concatenate(([0], np.cumsum(self.lengths, dtype=np.int64)))
        firsts = np.repeat(before[self.starts[:-1]], np.diff(self.starts))
        return np.asarray(before[:-1] - firsts, np.int64)


def parts_of(files: Files, fd: int, size_bytes: int) -> tuple[int, ...]:
    """Returns the sizes of the parts of a file, in each of which blocks begin anew; none if it is one part."""
    if size_bytes <= BLOCK_BYTES:
        return ()
    start = bytearray(9)
    files.read_into(fd, memoryview(start), 0)
    cuts: set[int] = set()
    if start.startswith(_ZIP):
        with contextlib.suppress(*_MALFORMED):
            cuts.update(_records(files, fd))
    elif start[8:] == b"{" and int.from_bytes(start[:8], "little") <= _LONGEST_HEADER_BYTES:
        cuts.add(8 + int.from_bytes(start[:8], "little"))
    edges = sorted({0, size_bytes, *(cut for cut in cuts if 0 < cut < size_bytes)})
    return tuple(end - begin for begin, end in pairwise(edges)) if len(edges) > 2 else ()


def _records(files: Files, fd: int) -> Iterator[int]:
    """Yields where the content of each large record of an archive begins and ends."""
    with io.FileIO(fd, closefd=False) as content, zipfile.ZipFile(content) as archive:
        records = archive.infolist()
    header = memoryview(bytearray(_LOCAL_HEADER_BYTES))
    for record in records:
        if record.compress_size >= BLOCK_BYTES and record.header_offset >= 0:
            files.read_into(fd, header, record.header_offset)
            lengths = int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
            begin = record.header_offset + _LOCAL_HEADER_BYTES + lengths
            yield begin
            yield begin + record.compress_size


def find(hashes: Hashes, known: Hashes) -> Indices:
    """Returns for each hash where it stands among the known ones; -1 where it does not."""
    if not len(known) or not len(hashes):
        return np.full(len(hashes), -1, np.int64)
    order = np.argsort(known[:, 0], kind="stable")
    places = np.searchsorted(known[:, 0], hashes[:, 0], sorter=order)
    candidates = order[np.minimum(places, len(known) - 1)]
    return np.where((known[candidates] == hashes).all(axis=1), candidates, -1)


def first_alike(hashes: Hashes) -> Indices:
    """Returns for each hash the first one that is the same."""
    _, first, which = np.unique(hashes[:, 0], return_index=True, return_inverse=True)
    alike = first[which]
    return np.where((hashes == hashes[alike]).all(axis=1), alike, np.arange(len(hashes)))
