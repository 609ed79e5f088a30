"""Cuts the files of a state into blocks, and finds for a file the one of the generation before that it continues.

Blocks have 64 KB. Smaller ones find fewer changed bytes where changes are scattered (an embedding that is trained by
SGD: half as many with 4 KB), but cost sixteen times the records and calls; the XOR of a block with its predecessor
compresses what did not change to nearly nothing, so that scattered changes are cheap with large blocks too. 64 KB is
also the block of the erasure code. Pure.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import numpy as np
import numpy.typing as npt

BLOCK_BYTES = 64 << 10
_COUNTERS = re.compile(r"[0-9]+")


@dataclass(frozen=True)
class BlockLayout:
    """The blocks of all files, numbered from 0 in the order of the files. The last block of a file may be short."""

    block_bytes: int
    sizes: tuple[int, ...]
    """The size of each file in bytes; entries without content have 0."""

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
        for file, size in enumerate(self.sizes):
            if tail := size % self.block_bytes:
                made[self.starts[file + 1] - 1] = tail
        return made


@dataclass(frozen=True)
class NamedFile:
    """A file as far as its place in the next generation depends on it."""

    name: str
    size_bytes: int
    mtime_ns: int


def predecessors(files: Sequence[NamedFile], before: Sequence[NamedFile]) -> list[int | None]:
    """Returns for each file the index of the one that it continues; None where there is none.

    That is the file of its name, else the newest whose name differs only in its numbers, preferably of the same size:
    `step_200.pt` continues `step_100.pt`.
    """
    by_name = {file.name: index for index, file in enumerate(before)}
    alike: dict[str, list[int]] = {}
    for index, file in sorted(enumerate(before), key=lambda pair: pair[1].mtime_ns):
        alike.setdefault(_pattern(file.name), []).append(index)

    def continued(file: NamedFile) -> int | None:
        if file.name in by_name:
            return by_name[file.name]
        found = alike.get(_pattern(file.name), [])
        same_size = [index for index in found if before[index].size_bytes == file.size_bytes]
        return next(reversed(same_size or found), None)

    return [continued(file) for file in files]


def _pattern(name: str) -> str:
    return _COUNTERS.sub("0", name)


def bases(layout: BlockLayout, before: BlockLayout, continued: Sequence[int | None]) -> npt.NDArray[np.int64]:
    """Returns for each block the one at the same place of the continued file; -1 where there is none."""
    made = np.full(layout.count, -1, np.int64)
    for file, predecessor in enumerate(continued):
        if predecessor is not None:
            theirs, ours = before.blocks(predecessor), layout.blocks(file)
            count = min(len(theirs), len(ours))
            made[ours.start : ours.start + count] = np.arange(theirs.start, theirs.start + count)
    return made
