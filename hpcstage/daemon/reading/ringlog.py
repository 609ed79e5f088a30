"""Parses a ring of opens: bytes in, records out. Owns no file and no clock."""

from __future__ import annotations

import struct
from typing import NamedTuple

from hpcstage.protocol.shim import RECORD, RECORD_BYTES, RECORD_OPEN, RECORD_PAD, RING_DATA_BYTES

_HEAD = struct.Struct("<IHBB")
_STAMPS = 1 << 32


class RingRecord(NamedTuple):
    """One record as it was written. `kind`: RECORD_OPEN, or one that this version does not know."""

    kind: int
    ns: int
    payload: bytes


class Damaged(ValueError):
    """The bytes are no record."""


class Parsed(NamedTuple):
    """The records that are complete, and how many bytes they and the padding between them took."""

    records: list[RingRecord]
    used_bytes: int


def parse(chunk: bytes, at: int) -> Parsed:
    """Returns the records of `chunk`, which holds the ring's bytes from position `at` on, laid out straight. Ends at
    the first record that is reserved and not yet complete. Raises Damaged where the bytes cannot be a record."""
    records = []
    offset, end = 0, len(chunk)
    while offset < end:
        stamp, size, kind, _ = _HEAD.unpack_from(chunk, offset)
        if stamp != (at + offset + 1) % _STAMPS:
            break
        bytes_to_end = RING_DATA_BYTES - (at + offset) % RING_DATA_BYTES
        length = bytes_to_end if kind == RECORD_PAD else _length(size)
        if length > bytes_to_end or offset + length > end:
            raise Damaged
        if kind != RECORD_PAD:
            ns = RECORD.unpack_from(chunk, offset)[4]
            begin = offset + RECORD_BYTES
            records.append(RingRecord(kind, ns, chunk[begin : begin + size]))
        offset += length
    return Parsed(records, offset)


def _length(payload_bytes: int) -> int:
    return (RECORD_BYTES + payload_bytes + 7) & ~7


def path_of(record: RingRecord) -> bytes | None:
    """Returns the path below `store/` of an OPEN record; None for any other."""
    return record.payload if record.kind == RECORD_OPEN else None
