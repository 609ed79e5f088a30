"""Writes and reads the trace of a run: the order in which a command first opened its files.

This module owns the files `<directory>/<key>.trace`, their form and bounds, and whether a run may use one, not where
the directory lies (callers pass `record.index.state_dir(env) / DIRECTORY`). A trace is a convenience: nothing fails
where a home is read-only, and a trace that is damaged, foreign or of other files is not used, with a reason.

magic, CRC-32 of the rest, length of the header | header: JSON | zlib of the order's ids, u32 little-endian
"""

from __future__ import annotations

import json
import os
import struct
import sys
import zlib
from array import array
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hpcstage.plan.dataset.manifest import Manifest

_VERSION = 1
_MAGIC = b"hpcstage trace 1"
_HEAD = struct.Struct("<16sII")
"""The fields are magic, CRC-32 of all that follows it, and bytes of the header."""
_CHECKED_FROM = 20
_MOST_RAW_BYTES = 1 << 30
DAMAGED = "the trace is damaged"
DIRECTORY = "traces"
"""The directory of traces below the user's state directory."""
MOST_BYTES = 64 << 20
MOST_FILES = 64
MOST_TOTAL_BYTES = 512 << 20
NONE_LEFT = "no earlier run of this command on these datasets left a trace"
_SUFFIX = ".trace"
_TEMPORARY = ".new-"
_STALE_S = 3600.0


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


def digest(manifest: Manifest) -> str:
    """Returns a digest of a manifest's paths and their datasets: if digests are equal, ids mean the same files."""
    return manifest.paths_digest()


def key(roots: Sequence[str], command: Sequence[str]) -> str:
    """Returns the name of a trace's file: 16 hexadecimal digits for these datasets and this command."""
    import hashlib

    asked = json.dumps([sorted(roots), list(command)])
    return hashlib.sha256(asked.encode()).hexdigest()[:16]


def path_of(directory: Path, roots: Sequence[str], command: Sequence[str]) -> Path:
    """Returns the path of the trace of this command on these datasets."""
    return directory / (key(roots, command) + _SUFFIX)


# ---- writing


def save(directory: Path, trace: Trace) -> str | None:
    """Writes a trace in place of the last one, then removes the oldest beyond the bounds.

    Returns None if it was written, else why not. Where several processes write at once, the file of the last one stays,
    whole.
    """
    try:
        content = encode(trace)
        if len(content) > MOST_BYTES:
            return f"{len(content) >> 20} MiB are more than the {MOST_BYTES >> 20} MiB that a trace may have"
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = path_of(directory, trace.header.roots, trace.header.command)
        _write(path, content)
    except OSError as error:
        return f"{directory}: {error.strerror or error}"
    with suppress(OSError):
        _prune(directory, path)
    return None


def _write(path: Path, content: bytes) -> None:
    import tempfile

    # Homes are shared between nodes: a process id would not be unique.
    fd, temporary = tempfile.mkstemp(prefix=_TEMPORARY, dir=path.parent)
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(content)
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)
        raise


def _prune(directory: Path, newest: Path) -> None:
    """Removes the oldest traces. Ages are relative to the file just written: by the file system's clock, not the
    node's."""
    now = newest.stat().st_mtime
    found = []
    for entry in os.scandir(directory):
        with suppress(OSError):
            facts = entry.stat(follow_symlinks=False)
            if entry.name.startswith(_TEMPORARY):
                if now - facts.st_mtime > _STALE_S:
                    os.unlink(entry.path)
            elif entry.name.endswith(_SUFFIX) and entry.name != newest.name:
                found.append((facts.st_mtime_ns, facts.st_size, entry.path))
    left, total = 1, newest.stat().st_size
    for _, size, path in sorted(found, reverse=True):
        left, total = left + 1, total + size
        if left > MOST_FILES or total > MOST_TOTAL_BYTES:
            with suppress(OSError):
                os.unlink(path)


# ---- reading


def find(directory: Path, roots: Sequence[str], command: Sequence[str], manifest: Manifest) -> tuple[Trace | None, str]:
    """Returns the trace of this command on these datasets, or None and why there is none that can be used."""
    return _found(path_of(directory, roots, command), manifest)


def newest(directory: Path, roots: Sequence[str], manifest: Manifest) -> tuple[Trace | None, str]:
    """Returns the trace that any command on these datasets wrote last, or None and why there is none that can be
    used."""
    wanted = sorted(roots)
    for path in _by_age(directory):
        with suppress(Unusable):
            if sorted(load(path).header.roots) == wanted:
                return _found(path, manifest)
    return None, "no earlier run on these datasets left a trace"


def _found(path: Path, manifest: Manifest) -> tuple[Trace | None, str]:
    try:
        return load(path, manifest), ""
    except Unusable as why:
        return None, str(why)


def _by_age(directory: Path) -> list[Path]:
    found = []
    with suppress(OSError):
        for entry in os.scandir(directory):
            with suppress(OSError):
                if entry.name.endswith(_SUFFIX):
                    found.append((entry.stat().st_mtime_ns, Path(entry.path)))
    return [path for _, path in sorted(found, reverse=True)]


def load(path: Path, manifest: Manifest | None = None) -> Trace:
    """Reads what `save` wrote, for the files of a manifest. Raises Unusable, which says why."""
    data = _read(path, MOST_BYTES + 1)
    if len(data) > MOST_BYTES:
        raise Unusable("the trace is too large")
    trace = decode(data)
    header = trace.header
    if manifest is not None and (header.files != len(manifest) or header.digest != digest(manifest)):
        raise Unusable(f"the dataset's files are not those of run {header.run_id}, which left the trace")
    return trace


def _read(path: Path, most: int) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(most)
    except FileNotFoundError:
        raise Unusable(NONE_LEFT) from None
    except OSError as error:
        raise Unusable(f"the trace cannot be read: {error.strerror}") from None
