"""Defines what passes between exchanges over MPI: short control messages, and bundles of files' bytes in reusable
buffers.

The module owns the bytes; it sends nothing. Everything is little-endian. The module checks whatever comes: a frame that
is not whole raises a FrameError. The receiver checks what ids, names and sizes mean. No path ever comes from a frame.

    control   u8 sort, u8 why, 6 bytes of nothing, u64 fingerprint, ids u32[]
    members   u8 sort, a message of the kind Group of `protocol.exchange`
    coding    u8 sort, then what `coding.wire` declares
    bundle    the bytes of its rows one behind the other, from 0; then the rows; then a tail that counts them

Each sort of message is one service's.

A bundle's table comes last, since the sender knows only after it has read the files how many found space.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

from hpcstage.protocol.exchange import MAX_MESSAGE_BYTES, Why

CONTROL_TAG = 1
BULK_TAG = 2
CODING_TAG = 3
BLOCK_TAG = 4
"""Messages about checkpoints: they have room of their own, whatever files are under way."""
CONTROL = struct.Struct("<BB6xQ")
ROW = struct.Struct("<IIQQIIq")
TAIL = struct.Struct("<IIQ")
MAX_ROWS = 256
BUFFER_BYTES = 1 << 20
"""The longest bundle. One that is longer by its rows alone takes three times as long over shared memory (MPICH on UCX,
64 MB files: 1.0 in place of 3.3 GB/s)."""
_PAGE = 4096
PIECE_BYTES = (BUFFER_BYTES - MAX_ROWS * ROW.size - TAIL.size) // _PAGE * _PAGE
"""The most data of a bundle."""
MAX_CONTROL_BYTES = 1 + MAX_MESSAGE_BYTES
MAX_CODING_BYTES = (32 << 20) + (1 << 16)
"""As many blocks as a stripe may have parities, or a message with what comes with it."""


class FrameError(ValueError):
    """The bytes that came are no frame of an exchange."""


class Sort(IntEnum):
    """Says what a message is; those from FILES on are bundles."""

    ASK = 1
    """Ids that the sender wants."""
    REFUSE = 2
    """Ids that do not come, and why."""
    BEAT = 3
    """The sender lives."""
    WRITTEN = 4
    """The sender's number of the message, then ids that a program of its node writes to."""
    READING = 5
    """Ids of large files that a program of the sender's node reads at the source."""
    ENDED = 6
    """Nodes whose run has ended, for the first exchange of the group."""
    MEMBERS = 7
    """A piece of the membership that replaces the one before."""
    CODING = 8
    """A message about checkpoints, between agents or exchanges."""
    BLOCK = 9
    """A block of a stripe, or sums of it."""
    HELD = 10
    """Ids of missing nodes that the sender has copies of; without ids, the end of them."""
    ASK_STRIPES = 11
    """An id, then stripes of its file that the sender wants."""
    NO_STRIPES = 12
    """An id, then stripes of its file that do not come."""
    TOGETHER = 13
    """An id, then the nodes that bring its large file together."""
    CONFIRMED = 14
    """A number of WRITTEN: no copy that the receiver has voided up to that one is opened any more at the sender."""
    FILES = 64
    """Staged files, whole or in pieces."""
    MANIFEST = 65
    ORDER = 66
    STRIPES = 67
    """Stripes of large files, whole or in pieces. A row's mode and time mean nothing."""


@dataclass(frozen=True)
class ControlFrame:
    """A control message. `fingerprint` is that of the sender's manifest, without which ids mean nothing."""

    sort: Sort
    fingerprint: int = 0
    why: Why = Why.NONE
    ids: tuple[int, ...] = ()

    def pack(self) -> bytes:
        """Returns the bytes of the message."""
        head = CONTROL.pack(self.sort, self.why, self.fingerprint)
        return head + struct.pack(f"<{len(self.ids)}I", *self.ids)

    @classmethod
    def unpack(cls, data: bytes | bytearray | memoryview) -> ControlFrame:
        """Returns the message that the bytes hold. Raises FrameError."""
        try:
            sort, why, fingerprint = CONTROL.unpack_from(data)
            ids = struct.unpack(f"<{(len(data) - CONTROL.size) // 4}I", data[CONTROL.size :])
            return cls(Sort(sort), fingerprint, Why(why), ids)
        except (struct.error, ValueError) as error:
            raise FrameError(f"a damaged control message: {error}") from None


def sort_of(data: memoryview, *, is_bundle: bool) -> Sort:
    """Returns what a message is. Raises FrameError."""
    try:
        sort = Sort(TAIL.unpack_from(data, len(data) - TAIL.size)[1] if is_bundle else data[0])
    except (struct.error, IndexError, ValueError) as error:
        raise FrameError(f"a message of no known sort: {error}") from None
    if (sort >= Sort.FILES) is not is_bundle:
        raise FrameError(f"a message of the sort {sort.name} that came the wrong way")
    return sort


class BundleRow(NamedTuple):
    """`length` bytes from `start` in a file of `size_bytes`; they lie `at` in the bundle."""

    id: int
    mode: int
    size_bytes: int
    start: int
    length: int
    at: int
    mtime_ns: int


def close_bundle(
    buffer: memoryview, data_bytes: int, rows: Sequence[BundleRow], fingerprint: int, sort: Sort = Sort.FILES
) -> int:
    """Writes the table behind the bytes, and returns the length of the bundle."""
    at = data_bytes
    for row in rows:
        ROW.pack_into(buffer, at, *row)
        at += ROW.size
    TAIL.pack_into(buffer, at, len(rows), sort, fingerprint)
    return at + TAIL.size


@dataclass(frozen=True)
class Bundle:
    """The table of a bundle that came in a buffer."""

    sort: Sort
    fingerprint: int
    rows: tuple[BundleRow, ...]


def open_bundle(data: memoryview) -> Bundle:
    """Returns the table of a bundle, checked: rows lie one behind the other and fill it, none is longer than its
    file."""
    try:
        count, sort, fingerprint = TAIL.unpack_from(data, len(data) - TAIL.size)
        end = len(data) - TAIL.size - count * ROW.size
        if count > MAX_ROWS or end < 0:
            raise FrameError("the table is larger than the bundle")
        rows = tuple(map(BundleRow._make, ROW.iter_unpack(data[end : end + count * ROW.size])))
        at = 0
        for id_, _, size_bytes, start, length, lies_at, _ in rows:
            if lies_at != at or start + length > size_bytes:
                raise FrameError(f"the row of id {id_} is wrong")
            at += length
        if at != end:
            raise FrameError("the rows do not fill it")
        return Bundle(Sort(sort), fingerprint, rows)
    except (struct.error, ValueError) as error:
        raise FrameError(f"a damaged bundle: {error}") from None
