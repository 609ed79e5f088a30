"""Writes and reads the trace of a run: the order in which a command first opened its files.

This module owns the files `<directory>/<key>.trace`, their form and bounds, and whether a run may use one, not where
the directory lies (callers pass `record.index.state_dir(env) / DIRECTORY`). A trace is a convenience: nothing fails
where a home is read-only, and a trace that is damaged, foreign or of other files is not used, with a reason.

magic, CRC-32 of the rest | header: a line of JSON | zlib of the order's ids, u32
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
from dataclasses import dataclass
from pathlib import Path

from hpcstage.jsonform import read, written
from hpcstage.plan.dataset.manifest import Manifest
from hpcstage.writing import replacing

_MAGIC = f"hpcstage trace 2 {sys.byteorder}\n".encode()
_CRC = struct.Struct("<I")
DAMAGED = "the trace is damaged"
DIRECTORY = "traces"
"""The directory of traces below the user's state directory."""
MOST_BYTES = 64 << 20
MOST_FILES = 64
MOST_TOTAL_BYTES = 512 << 20
NONE_LEFT = "no earlier run of this command on these datasets left a trace"
_SUFFIX = ".trace"
_STALE_S = 3600.0
"""A temporary file that is older was left by a writer that was killed."""


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
    rest = json.dumps(written(trace.header)).encode() + b"\n" + zlib.compress(trace.order, 1)
    return _MAGIC + _CRC.pack(zlib.crc32(rest)) + rest


def decode(data: bytes) -> Trace:
    """Reads what `encode` returned, and checks all of it. Raises Unusable."""
    if not data.startswith(_MAGIC):
        raise Unusable("the file is not a trace of this version of hpcstage")
    crc, rest = data[len(_MAGIC) : len(_MAGIC) + _CRC.size], data[len(_MAGIC) + _CRC.size :]
    text, _, packed = rest.partition(b"\n")
    if crc != _CRC.pack(zlib.crc32(rest)) or not packed:
        raise Unusable(DAMAGED)
    return Trace(read(TraceHeader, json.loads(text)), array("I", zlib.decompress(packed)))


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
        with replacing(path) as file:
            file.write(content)
    except OSError as error:
        return f"{directory}: {error.strerror or error}"
    with suppress(OSError):
        _prune(directory, path)
    return None


def _prune(directory: Path, newest: Path) -> None:
    """Removes the oldest traces. Ages are relative to the file just written: by the file system's clock, not the
    node's."""
    now = newest.stat().st_mtime
    found = []
    for entry in os.scandir(directory):
        with suppress(OSError):
            facts = entry.stat(follow_symlinks=False)
            if entry.name.startswith("."):
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
    wanted, paths = sorted(roots), list[tuple[int, Path]]()
    with suppress(OSError):
        paths = [(path.stat().st_mtime_ns, path) for path in directory.glob("*" + _SUFFIX)]
    for _, path in sorted(paths, reverse=True):
        with suppress(Unusable):
            if sorted(load(path).header.roots) == wanted:
                return _found(path, manifest)
    return None, "no earlier run on these datasets left a trace"


def _found(path: Path, manifest: Manifest) -> tuple[Trace | None, str]:
    try:
        trace = load(path)
    except Unusable as why:
        return None, str(why)
    header = trace.header
    if header.files != len(manifest) or header.digest != manifest.paths_digest():
        return None, f"the dataset's files are not those of run {header.run_id}, which left the trace"
    return trace, ""


def load(path: Path) -> Trace:
    """Reads what `save` wrote. Raises Unusable, which says why."""
    try:
        with path.open("rb") as file:
            data = file.read(MOST_BYTES + 1)
    except FileNotFoundError:
        raise Unusable(NONE_LEFT) from None
    except OSError as error:
        raise Unusable(f"the trace cannot be read: {error.strerror}") from None
    if len(data) > MOST_BYTES:
        raise Unusable("the trace is too large")
    return decode(data)
