"""Cuts the files of a state into blocks, and finds for a file the one of the generation before that it continues.

Blocks begin anew with each part of a file (`parts` finds them) and have 64 KB. Smaller ones find fewer changed bytes
where changes are scattered (an embedding that is trained by SGD: half as many with 4 KB), but cost sixteen times the
records and calls; the XOR of a block with its predecessor compresses what did not change to nearly nothing, so that
scattered changes are cheap with large blocks too. 64 KB is also the block of the erasure code. Pure.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

import numpy as np
import numpy.typing as npt

BLOCK_BYTES = 64 << 10
_COUNTERS = re.compile(r"[0-9]+")


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
    """Returns for each block the one at the same place of the same part of the continued file; -1 where none is."""
    made = np.full(layout.count, -1, np.int64)
    for ours, predecessor in zip(layout.part_starts, continued, strict=True):
        if predecessor is not None:
            for own, other in zip(pairwise(ours), pairwise(before.part_starts[predecessor]), strict=False):
                count = min(own[1] - own[0], other[1] - other[0])
                made[own[0] : own[0] + count] = np.arange(other[0], other[0] + count)
    return made
