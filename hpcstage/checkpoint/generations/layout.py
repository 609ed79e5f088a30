"""Cuts the files of a state into blocks.

Blocks begin anew with each part of a file (`parts` finds them) and have 64 KB. Smaller ones find fewer changed bytes
where changes are scattered (an embedding that is trained by SGD: half as many with 4 KB), but cost sixteen times the
records and calls. 64 KB is also the block of the erasure code. Pure.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import numpy as np
import numpy.typing as npt

BLOCK_BYTES = 64 << 10


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
