"""Blocks of bytes, and the arithmetic on them that a kernel does.

A kernel is given its blocks first and works when the operation is called: a pipeline uses the same few buffers for
block after block, and finding their addresses takes as long as coding 64 KB. All kernels give the same bytes, and none
holds Python's lock while it works.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from hpcstage.checkpoint.coding.field import Row, Rows

if TYPE_CHECKING:
    from mmap import mmap

Block: TypeAlias = "bytes | bytearray | memoryview | mmap | npt.NDArray[Any]"
"""Contiguous bytes of any kind. A target has to be writable."""
Bytes = npt.NDArray[np.uint8]
Operation = Callable[[], None]
"""Works on the blocks that it was made with, each time on what they hold then; one thread at a time may call it."""
MOST_BYTES = 1 << 30
"""The largest block of one operation: ISA-L counts in C's int."""


class Kernel(Protocol):
    """A way to compute in GF(256) on blocks. All blocks of one operation have the same size."""

    @property
    def name(self) -> str:
        """Returns the kernel's name for people."""

    def product(self, rows: Rows, sources: Sequence[Block], targets: Sequence[Block]) -> Operation:
        """Returns what sets each target i to the sum of `rows[i][j]` times source j. No target is a source."""

    def addition(self, column: Row, source: Block, targets: Sequence[Block]) -> Operation:
        """Returns what adds `column[i]` times the source to each target i."""


def seen(block: Block) -> Bytes:
    """Returns a block as an array, without a copy."""
    return np.frombuffer(block, np.uint8)


def operands(rows: Rows, sources: Sequence[Block], targets: Sequence[Block]) -> tuple[list[Bytes], list[Bytes]]:
    """Returns the blocks of one operation as arrays. Raises a ValueError where they do not fit: a library in C would
    read and write beyond them."""
    read, written = list(map(seen, sources)), list(map(seen, targets))
    if not read or not written or len(rows) != len(written) or any(len(row) != len(read) for row in rows):
        raise ValueError(
            f"{len(written)} targets are as many rows of {len(read)} coefficients, and at least one of one"
        )
    sizes = {len(block) for block in (*read, *written)}
    if len(sizes) > 1 or max(sizes) > MOST_BYTES:
        raise ValueError(f"the blocks of an operation have one size of at most {MOST_BYTES} bytes, not {sorted(sizes)}")
    if not all(block.flags.writeable for block in written):
        raise ValueError("a block that cannot be written is no target")
    return read, written


def nothing() -> None:
    """Does what an operation on no bytes does."""
