"""Cuts the files of a state into blocks, and finds blocks of the same content by their hashes alone.

Blocks have 64 KB. Smaller ones find fewer changed bytes where changes are scattered (an embedding that is trained by
SGD: half as many with 4 KB), but cost sixteen times the records and calls. 64 KB is also the block of the erasure code.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import numpy as np
import numpy.typing as npt

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


@dataclass(frozen=True)
class BlockLayout:
    """The blocks of all files, numbered from 0 in the order of the files. The last block of a file may be short."""

    block_bytes: int
    sizes: tuple[int, ...]
    """The bytes of each file; entries without content have none."""

    @cached_property
    def starts(self) -> list[int]:
        """Returns the first block of each file, and at the end the number of all blocks."""
        return list(accumulate((-(-size // self.block_bytes) for size in self.sizes), initial=0))

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
        for size, end in zip(self.sizes, self.starts[1:], strict=True):
            if tail := size % self.block_bytes:
                made[end - 1] = tail
        return made

    @cached_property
    def offsets(self) -> npt.NDArray[np.int64]:
        """Returns where in its file each block begins."""
        firsts = np.repeat(self.starts[:-1], np.diff(self.starts))
        return np.asarray((np.arange(self.count) - firsts) * self.block_bytes, np.int64)


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
