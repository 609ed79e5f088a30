"""The file `arriving`: its mapping, what its rows hold, and the exchange's side of it: what has arrived of a file, to
be passed on. The layout stands in `protocol.arriving`.

The daemon's side is `grantedrows`, a copier's `arrivals`.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from hpcstage.plan.rule import FileReads, Front
from hpcstage.protocol.arriving import (
    AHEAD_OFFSET,
    ARRIVING_BYTES,
    ARRIVING_HEADER_BYTES,
    ARRIVING_NAME_BYTES,
    ARRIVING_READ,
    ARRIVING_ROW_BYTES,
    ARRIVING_ROWS,
    FAULTS_OFFSET,
    FRONT,
    FRONTS_OFFSET,
    GRANTED_OFFSET,
    JUMPED_OFFSET,
    MOST_SHARING,
    NAME_OFFSET,
    READ_OFFSET,
    ROW_READERS,
    ROW_STRIPES,
    SHARE,
    SHARE_OFFSET,
    SHOWN_OFFSET,
    STRIPES_OFFSET,
    WISHED_OFFSET,
    StripeState,
)
from hpcstage.store.mappedfile import put_u32

U32 = struct.Struct("<I")
U64 = struct.Struct("<Q")
ID_OFFSET = 40
"""Where the id of the file stands in a row."""
_SIZE_OFFSET = 16
_SERIALS = (GRANTED_OFFSET, SHOWN_OFFSET)
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


class ShownRow:
    """What is shown of one file, while `holds`."""

    def __init__(self, mapped: mmap.mmap, row: int, serial: int) -> None:
        start = row_at(row)
        self._map, self._row, self._serial = mapped, row, serial
        name = mapped[start + NAME_OFFSET : start + NAME_OFFSET + ARRIVING_NAME_BYTES]
        self.incoming = name.partition(b"\0")[0]
        """The name of the incoming file in the node directory."""
        self._has_wish = False

    def holds(self) -> bool:
        """Returns whether the row is the same transfer's as before: what was read of its file until now was right."""
        return all(U32.unpack_from(self._map, at + 4 * self._row)[0] == self._serial for at in _SERIALS)

    def has(self, stripe: int) -> bool:
        """Returns whether a stripe has arrived."""
        return self._map[stripes_at(self._row) + stripe] == StripeState.ARRIVED

    def wish(self, stripe: int) -> None:
        """Says that another node needs a stripe: of several the one that is said first."""
        if not self._has_wish:
            put_u32(self._map, row_at(self._row) + WISHED_OFFSET, stripe + 1)
        self._has_wish = True


class ShownRows:
    """The exchange's side: finds rows by the ids of files."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._map: mmap.mmap | None = None

    def find(self, id_: int) -> ShownRow | None:
        """Returns the row of a file of which something is shown."""
        with suppress(OSError, ValueError):
            self._map = self._map or open_map(self._path)
        if self._map is None or (found := row_of(self._map, id_, SHOWN_OFFSET)) is None:
            return None
        row = ShownRow(self._map, *found)
        return row if row.holds() else None
