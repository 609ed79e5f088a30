"""The table of a generation's blocks: the hash of each, and where its bytes are. Pure.

Owns the records' binary form and the comparison of two states by hashes alone: no old byte is read, and a block that
moved to another file or place is found again. Two blocks of one hash are stored once.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import xxhash

from hpcstage.checkpoint.generations.layout import BlockLayout

Hashes = npt.NDArray[np.uint64]
"""One row for each block: the two words of its xxh3-128."""
Indices = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]

RECORD = np.dtype(
    [
        ("hash", "<u8", (2,)),
        ("offset", "<u8"),
        ("length", "<u4"),
        ("generation", "<u4"),
    ]
)
"""`generation` has the bytes in its data file, `length` of them at `offset`; 0 bytes: a block of zeros, stored
nowhere."""
Table = npt.NDArray[np.void]


def rows(digests: bytes | bytearray) -> Hashes:
    """Returns the hashes that stand one behind the other."""
    return np.frombuffer(digests, "<u8").reshape(-1, 2)


def zero_blocks(hashes: Hashes, layout: BlockLayout) -> Mask:
    """Tells which blocks are nothing but zeros."""
    lengths, which = np.unique(layout.lengths, return_inverse=True)
    zeros = rows(b"".join(xxhash.xxh3_128_digest(bytes(int(length))) for length in lengths))
    return np.asarray((hashes == zeros[which]).all(axis=1)) if len(hashes) else np.zeros(0, bool)


def find(hashes: Hashes, known: Hashes) -> Indices:
    """Returns for each hash where it stands among the known ones; -1 where it does not."""
    if not len(known) or not len(hashes):
        return np.full(len(hashes), -1, np.int64)
    order = np.argsort(known[:, 0], kind="stable")
    places = np.searchsorted(known[:, 0], hashes[:, 0], sorter=order)
    candidates = order[np.minimum(places, len(known) - 1)]
    return np.where((known[candidates] == hashes).all(axis=1), candidates, -1)


def first_alike(hashes: Hashes, among: Mask) -> Indices:
    """Returns for each block the first one of the same hash among those of the mask; itself where it is not in it."""
    made = np.arange(len(hashes))
    chosen = np.flatnonzero(among)
    if len(chosen):
        words = hashes[chosen]
        _, first, which = np.unique(words[:, 0], return_index=True, return_inverse=True)
        alike = first[which]
        same = (words == words[alike]).all(axis=1)
        made[chosen[same]] = chosen[alike[same]]
    return made


@dataclass(frozen=True)
class Difference:
    """A state compared with the generation before."""

    hashes: Hashes
    zeros: Mask
    found: Indices
    """Where in the table of the generation before each block is; -1: nowhere, so it changed."""

    @property
    def changed(self) -> Mask:
        """Tells which blocks the generation before does not have."""
        return (self.found < 0) & ~self.zeros

    def blank_table(self) -> Table:
        """Returns a table with the hashes and no places."""
        table = np.zeros(len(self.hashes), RECORD)
        table["hash"] = self.hashes
        return table


def compare(hashes: Hashes, layout: BlockLayout, before: Table | None) -> Difference:
    """Compares the blocks of a state with the table of the generation before."""
    known = before["hash"] if before is not None else np.zeros((0, 2), np.uint64)
    return Difference(hashes, zero_blocks(hashes, layout), find(hashes, known))
