"""Defines the form of a trace's file: a header in JSON, then arrays of ids, with a checksum over all. It turns bytes
into a `Trace` and back; it opens no files.
magic, CRC-32 of the rest, length of the header | header: JSON | zlib of the arrays, u32 little-endian:
the order's ids, then for each table its offsets and its ids
"""

from __future__ import annotations

import json
import struct
import sys
import zlib
from array import array
from collections.abc import Iterator, Sequence
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
class TraceTable:
    """The files that each index of a loader's dataset opened."""

    key: int
    """The identity of the dataset within a program, as in announcements."""
    offsets: array[int]
    """Type code "I"; one more than samples: the files of sample i are ids[offsets[i]:offsets[i + 1]]."""
    ids: array[int]
    """Type code "I"; ids of the manifest."""


@dataclass(frozen=True)
class TraceHeader:
    """The fields of a trace except for its arrays."""

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
    provenance: str | None = None
    """The provenance of the order that the run followed."""
    kept_share: float | None = None
    """The share of opens in the announced order, from 0 to 1; None: nothing was announced."""


@dataclass(frozen=True)
class Trace:
    """A trace as a whole."""

    header: TraceHeader
    order: array[int]
    """Type code "I"; ids in the order in which the program opened them first, each once."""
    tables: tuple[TraceTable, ...] = ()


def encode(trace: Trace) -> bytes:
    """Returns the file's content."""
    fields = {
        "version": _VERSION,
        **asdict(trace.header),
        "order": len(trace.order),
        "tables": [[t.key, len(t.offsets), len(t.ids)] for t in trace.tables],
    }
    text = json.dumps(fields).encode()
    packer = zlib.compressobj(1)
    packed = [packer.compress(_little(numbers).tobytes()) for numbers in _all_arrays(trace)]
    rest = b"".join([struct.pack("<I", len(text)), text, *packed, packer.flush()])
    return _HEAD.pack(_MAGIC, zlib.crc32(rest), len(text)) + rest[4:]


def _all_arrays(trace: Trace) -> Iterator[array[int]]:
    yield trace.order
    for table in trace.tables:
        yield table.offsets
        yield table.ids


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
    return _arrays_in(_header_in(fields), fields, data[_HEAD.size + length :])


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
        share = fields["kept_share"]
        return TraceHeader(
            command=tuple(map(str, fields["command"])),
            roots=tuple(map(str, fields["roots"])),
            digest=str(fields["digest"]),
            files=int(fields["files"]),
            run_id=str(fields["run_id"]),
            written_utc=str(fields["written_utc"]),
            provenance=fields["provenance"] and str(fields["provenance"]),
            kept_share=None if share is None else float(share),
        )
    except (KeyError, TypeError, ValueError, OverflowError):
        raise Unusable(DAMAGED) from None


def _arrays_in(header: TraceHeader, fields: dict[str, Any], packed: bytes) -> Trace:
    try:
        tables = [(int(k), int(offsets), int(ids)) for k, offsets, ids in fields["tables"]]
        lengths = [int(fields["order"]), *(count for _, *counts in tables for count in counts)]
        raw = _unpacked(packed, 4 * sum(lengths), lengths)
    except (KeyError, TypeError, ValueError, OverflowError, zlib.error):
        raise Unusable(DAMAGED) from None
    order, *rest = _cut(raw, lengths)
    made = tuple(TraceTable(k, o, i) for (k, _, _), o, i in zip(tables, rest[::2], rest[1::2], strict=True))
    if not _fit(order, header.files) or not all(_is_table(table, header.files) for table in made):
        raise Unusable(DAMAGED)
    return Trace(header, order, made)


def _unpacked(packed: bytes, expected: int, lengths: Sequence[int]) -> bytes:
    if min(lengths) < 0 or expected > _MOST_RAW_BYTES:
        raise ValueError(expected)
    unpacker = zlib.decompressobj()
    raw = unpacker.decompress(packed, expected + 1)
    if len(raw) != expected:
        raise ValueError(len(raw))
    return raw


def _cut(raw: bytes, lengths: Sequence[int]) -> Iterator[array[int]]:
    at = 0
    for length in lengths:
        numbers = array("I")
        numbers.frombytes(raw[at : at + 4 * length])
        at += 4 * length
        yield _little(numbers)


def _fit(ids: array[int], files: int) -> bool:
    return not ids or max(ids) < files


def _is_table(table: TraceTable, files: int) -> bool:
    offsets = table.offsets
    rising = len(offsets) > 0 and offsets[0] == 0 and offsets[-1] == len(table.ids)
    return rising and all(map(int.__le__, offsets, offsets[1:])) and _fit(table.ids, files)


def _little(numbers: array[int]) -> array[int]:
    if sys.byteorder == "little":
        return numbers
    swapped = array("I", numbers)
    swapped.byteswap()
    return swapped
