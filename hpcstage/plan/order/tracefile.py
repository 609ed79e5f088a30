"""Defines the form of a trace's file: a header in JSON, then ids, with a checksum over all. It turns bytes
into a `Trace` and back; it opens no files.
magic, CRC-32 of the rest, length of the header | header: JSON | zlib of the order's ids, u32 little-endian
"""

from __future__ import annotations

import json
import struct
import sys
import zlib
from array import array
from dataclasses import asdict, dataclass
from typing import Any

_VERSION = 1
_MAGIC = b"hpcstage trace 1"
_HEAD = struct.Struct("<16sII")
"""The fields are magic, CRC-32 of all that follows it, and bytes of the header."""
_CHECKED_FROM = 20
_MOST_RAW_BYTES = 1 << 30
DAMAGED = "the trace is damaged"


class Unusable(Exception):
    """A trace cannot be used; the text says why, for people."""


@dataclass(frozen=True)
class TraceHeader:
    """The fields of a trace except for its order."""

    command: tuple[str, ...]
    roots: tuple[str, ...]
    """The roots of the datasets."""
    digest: str
    """The digest of the manifest's paths: the ids hold for these files only."""
    files: int
    """The number of files in the manifest."""
    run_id: str
    written_utc: str
    """When the trace was written, in ISO 8601."""


@dataclass(frozen=True)
class Trace:
    """A trace as a whole."""

    header: TraceHeader
    order: array[int]
    """Type code "I"; ids in the order in which the program opened them first, each once."""


def encode(trace: Trace) -> bytes:
    """Returns the file's content."""
    fields = {"version": _VERSION, **asdict(trace.header), "order": len(trace.order)}
    text = json.dumps(fields).encode()
    rest = struct.pack("<I", len(text)) + text + zlib.compress(_little(trace.order).tobytes(), 1)
    return _HEAD.pack(_MAGIC, zlib.crc32(rest), len(text)) + rest[4:]


def header_of(data: bytes) -> TraceHeader:
    """Reads the header in a file's first `header_end` bytes; checks only its form. Raises Unusable."""
    return _header_in(_fields(data, _lengths(data)[1]))


def header_end(data: bytes) -> int:
    """Returns from a file's first bytes where its header ends, in bytes. Raises Unusable."""
    return _HEAD.size + _lengths(data)[1]


def decode(data: bytes) -> Trace:
    """Reads what `encode` returned, and checks all of it. Raises Unusable."""
    crc, length = _lengths(data)
    if zlib.crc32(memoryview(data)[_CHECKED_FROM:]) != crc:
        raise Unusable(DAMAGED)
    fields = _fields(data, length)
    return _trace_in(_header_in(fields), fields, data[_HEAD.size + length :])


def _lengths(data: bytes) -> tuple[int, int]:
    """Returns the checksum of the file, and the length of its header."""
    if not data.startswith(_MAGIC):
        raise Unusable("the file is not a trace of this version of hpcstage")
    if len(data) < _HEAD.size:
        raise Unusable(DAMAGED)
    _, crc, length = _HEAD.unpack_from(data)
    return crc, length


def _fields(data: bytes, length: int) -> dict[str, Any]:
    try:
        fields = json.loads(data[_HEAD.size : _HEAD.size + length])
    except (ValueError, RecursionError):
        raise Unusable(DAMAGED) from None
    if not isinstance(fields, dict) or fields.get("version") != _VERSION:
        raise Unusable("the trace is of another version of hpcstage")
    return fields


def _header_in(fields: dict[str, Any]) -> TraceHeader:
    try:
        return TraceHeader(
            command=tuple(map(str, fields["command"])),
            roots=tuple(map(str, fields["roots"])),
            digest=str(fields["digest"]),
            files=int(fields["files"]),
            run_id=str(fields["run_id"]),
            written_utc=str(fields["written_utc"]),
        )
    except (KeyError, TypeError, ValueError, OverflowError):
        raise Unusable(DAMAGED) from None


def _trace_in(header: TraceHeader, fields: dict[str, Any], packed: bytes) -> Trace:
    try:
        order = _little(_unpacked(packed, int(fields["order"])))
    except (KeyError, TypeError, ValueError, OverflowError, zlib.error):
        raise Unusable(DAMAGED) from None
    if order and max(order) >= header.files:
        raise Unusable(DAMAGED)
    return Trace(header, order)


def _unpacked(packed: bytes, length: int) -> array[int]:
    if not 0 <= 4 * length <= _MOST_RAW_BYTES:
        raise ValueError(length)
    raw = zlib.decompressobj().decompress(packed, 4 * length + 1)
    if len(raw) != 4 * length:
        raise ValueError(len(raw))
    numbers = array("I")
    numbers.frombytes(raw)
    return numbers


def _little(numbers: array[int]) -> array[int]:
    if sys.byteorder == "little":
        return numbers
    swapped = array("I", numbers)
    swapped.byteswap()
    return swapped
