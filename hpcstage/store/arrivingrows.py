"""The file `arriving`: its mapping, and what its rows hold. The layout stands in `protocol.arriving`.

The daemon's side of it is `grantedrows`, a copier's `arrivals`, and the exchange's `shownrows`.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from hpcstage.plan.rule import FileReads, Front
from hpcstage.protocol.arriving import (
    AHEAD_OFFSET,
    ARRIVING_BYTES,
    ARRIVING_HEADER_BYTES,
    ARRIVING_READ,
    ARRIVING_ROW_BYTES,
    ARRIVING_ROWS,
    FAULTS_OFFSET,
    FRONT,
    FRONTS_OFFSET,
    JUMPED_OFFSET,
    MOST_SHARING,
    READ_OFFSET,
    ROW_READERS,
    ROW_STRIPES,
    SHARE,
    SHARE_OFFSET,
    STRIPES_OFFSET,
)

U32 = struct.Struct("<I")
U64 = struct.Struct("<Q")
ID_OFFSET = 40
"""Where the id of the file stands in a row."""
_SIZE_OFFSET = 16
MOST_COUNT = (1 << 32) - 2
"""Serial numbers count to this and then from 1 on."""


@dataclass(frozen=True)
class StripeShare:
    """The nodes that bring a file together. Each reads its stripes at the source, and the others get these from it."""

    own: int
    """This node."""
    nodes: tuple[int, ...]
    """All of them, in the order of their numbers."""

    def reader(self, stripe: int, lost: Collection[int] = ()) -> int:
        """Returns the node that reads a stripe at the source. Those of a node that is lost are divided among the
        others."""
        node = self.nodes[stripe % len(self.nodes)]
        if node not in lost:
            return node
        others = [node for node in self.nodes if node not in lost]
        return others[stripe // len(self.nodes) % len(others)]

    def pack(self) -> bytes:
        """Returns the form in which it stands in a row."""
        bits = sum(1 << node for node in self.nodes)
        return SHARE.pack(self.own, len(self.nodes), bits.to_bytes(MOST_SHARING // 8, "little"))

    @classmethod
    def unpack(cls, data: bytes) -> StripeShare | None:
        """Returns what a row says; None if no other node brings the file, too, or it makes no sense."""
        own, count, packed = SHARE.unpack(data)
        bits = int.from_bytes(packed, "little")
        nodes = tuple(node for node in range(bits.bit_length()) if bits >> node & 1)
        return cls(own, nodes) if len(nodes) == count > 1 and own in nodes else None


def row_at(row: int) -> int:
    """Returns where a row begins."""
    return ARRIVING_HEADER_BYTES + row * ARRIVING_ROW_BYTES


def stripes_at(row: int) -> int:
    """Returns where the states of a row's stripes begin."""
    return STRIPES_OFFSET + row * ROW_STRIPES


def row_of(mapped: mmap.mmap, id_: int, serials_at: int) -> tuple[int, int] | None:
    """Returns the row of a file and the serial number of its transfer, by one of the header's lists of these; None if
    it has none."""
    for row in range(ARRIVING_ROWS):
        (serial,) = U32.unpack_from(mapped, serials_at + 4 * row)
        if serial and U32.unpack_from(mapped, row_at(row) + ID_OFFSET)[0] == id_:
            return row, int(serial)
    return None


def share_of(mapped: mmap.mmap, start: int) -> StripeShare | None:
    """Returns with which nodes this one brings the file of the row that begins at `start`, if it does."""
    return StripeShare.unpack(mapped[start + SHARE_OFFSET : start + SHARE_OFFSET + SHARE.size])


def reads_of(mapped: mmap.mmap, start: int) -> FileReads:
    """Returns what programs have read of the file of a row."""
    (size_bytes,) = U64.unpack_from(mapped, start + _SIZE_OFFSET)
    jumped, ahead, faults = (
        U64.unpack_from(mapped, start + at)[0] for at in (JUMPED_OFFSET, AHEAD_OFFSET, FAULTS_OFFSET)
    )
    fronts = FRONT.iter_unpack(mapped[start + FRONTS_OFFSET : start + FRONTS_OFFSET + ROW_READERS * FRONT.size])
    read = sum(ARRIVING_READ.unpack_from(mapped, start + READ_OFFSET))
    return FileReads(size_bytes, read, faults, jumped, tuple(Front(*front) for front in fronts), ahead)


def open_map(path: Path) -> mmap.mmap:
    """Maps the file. Raises OSError or ValueError where there is none."""
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        return mmap.mmap(fd, ARRIVING_BYTES)
    finally:
        os.close(fd)
