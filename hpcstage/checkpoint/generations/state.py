"""The state below a directory: its names with modes, times and links, and the hashes of its files' blocks.

Files are read in pieces into one buffer, not mapped: a program that truncates a mapped file would end its reader with
SIGBUS, and hashing from the buffer costs nothing beside the reading. Holes are not read. A state that changes while it
is read or copied is refused, as far as sizes and times tell.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import xxhash

from hpcstage.checkpoint.generations.files import PIECE_BYTES, Files
from hpcstage.checkpoint.generations.layout import BlockLayout, NamedFile
from hpcstage.checkpoint.generations.manifest import EntryType, SavedEntry, layout_of
from hpcstage.checkpoint.generations.table import Hashes, rows
from hpcstage.errors import HpcstageError

Fingerprint = tuple[int, int, int, int]
_BLOCK_OF_STAT = 512
_DIGEST_BYTES = 16


class StateChanged(HpcstageError):
    """The program changed an entry while it was being saved."""

    def __init__(self, path: Path) -> None:
        super().__init__(f"{path} changed while it was saved", "save it when nothing writes to it")


@dataclass(frozen=True)
class FoundState:
    """The names of a state at a moment."""

    directory: Path
    entries: tuple[SavedEntry, ...]
    fingerprints: tuple[Fingerprint, ...]
    """What changes when an entry does; in the order of the entries."""
    left_out: tuple[str, ...]
    """Sockets, pipes and devices, which are not saved."""

    def path(self, index: int) -> Path:
        """Returns the path of an entry."""
        return self.directory / self.entries[index].name

    def layout(self, block_bytes: int) -> BlockLayout:
        """Returns how the files are cut into blocks."""
        return layout_of(self.entries, block_bytes)


def scan_state(files: Files, directory: Path, names: Sequence[str] | None = None) -> FoundState:
    """Returns the entries of these names below a directory and all below them; of all names where none are given."""
    found: list[tuple[SavedEntry, Fingerprint]] = []
    left_out: list[str] = []
    for name in sorted(files.call(os.listdir, directory) if names is None else names):
        found += _walk(files, directory, name, left_out)
    entries, fingerprints = tuple(e for e, _ in found), tuple(f for _, f in found)
    return FoundState(directory, entries, fingerprints, tuple(left_out))


def _walk(files: Files, directory: Path, name: str, left_out: list[str]) -> Iterator[tuple[SavedEntry, Fingerprint]]:
    path = directory / name
    status = _lstat(files, path)
    mode, mtime_ns = stat.S_IMODE(status.st_mode), status.st_mtime_ns
    if stat.S_ISREG(status.st_mode):
        yield SavedEntry(name, EntryType.FILE, mode, mtime_ns, status.st_size), _fingerprint(status)
    elif stat.S_ISLNK(status.st_mode):
        target = files.call(os.readlink, path)
        yield SavedEntry(name, EntryType.LINK, mode, mtime_ns, target=target), _fingerprint(status)
    elif stat.S_ISDIR(status.st_mode):
        yield SavedEntry(name, EntryType.DIRECTORY, mode, mtime_ns), _fingerprint(status)
        for below in sorted(files.call(os.listdir, path)):
            yield from _walk(files, directory, f"{name}/{below}", left_out)
    else:
        left_out.append(name)


def check_unchanged(files: Files, state: FoundState) -> None:
    """Raises StateChanged if an entry is not as it was when the state was scanned."""
    for index, fingerprint in enumerate(state.fingerprints):
        path = state.path(index)
        if _fingerprint(_lstat(files, path)) != fingerprint:
            raise StateChanged(path)


def hash_state(files: Files, state: FoundState, layout: BlockLayout) -> Hashes:
    """Returns the hash of every block."""
    largest = max(layout.sizes, default=0)
    digests, buffer = bytearray(), memoryview(bytearray(min(_piece_bytes(layout.block_bytes), largest)))
    for index, entry in enumerate(state.entries):
        if entry.size_bytes:
            with files.opened(state.path(index)) as fd:
                if _fingerprint(files.call(os.fstat, fd)) != state.fingerprints[index]:
                    raise StateChanged(state.path(index))
                before = len(digests)
                _hash_file(files, fd, entry.size_bytes, layout.block_bytes, buffer, digests)
                if len(digests) - before != len(layout.blocks(index)) * _DIGEST_BYTES:
                    raise StateChanged(state.path(index))
    return rows(digests)


def named_files(entries: Sequence[SavedEntry]) -> list[NamedFile]:
    """Returns the entries as far as they may continue each other; those that are no files have a name of no file."""
    return [NamedFile(e.name if e.type is EntryType.FILE else "", e.size_bytes, e.mtime_ns) for e in entries]


def _hash_file(
    files: Files, fd: int, size_bytes: int, block_bytes: int, buffer: memoryview, digests: bytearray
) -> None:
    sparse = files.call(os.fstat, fd).st_blocks * _BLOCK_OF_STAT < size_bytes
    offset, zeros = 0, xxhash.xxh3_128_digest(bytes(block_bytes))
    while offset < size_bytes:
        if sparse and (empty := _hole_blocks(files, fd, offset, size_bytes, block_bytes)):
            digests += zeros * empty
            offset += empty * block_bytes
            continue
        count = files.read_into(fd, buffer[: min(len(buffer), size_bytes - offset)], offset)
        if not count:
            return
        for start in range(0, count, block_bytes):
            digests += xxhash.xxh3_128_digest(buffer[start : min(start + block_bytes, count)])
        offset += count


def _hole_blocks(files: Files, fd: int, offset: int, size_bytes: int, block_bytes: int) -> int:
    """Returns how many whole blocks from here on lie in a hole."""
    try:
        data = files.call(os.lseek, fd, offset, os.SEEK_DATA)
    except OSError as error:
        if error.errno != errno.ENXIO:
            return 0
        data = size_bytes
    return (data - offset) // block_bytes


def _piece_bytes(block_bytes: int) -> int:
    return max(1, PIECE_BYTES // block_bytes) * block_bytes


def _lstat(files: Files, path: Path) -> os.stat_result:
    try:
        return files.call(os.lstat, path)
    except FileNotFoundError as error:
        raise StateChanged(path) from error


def _fingerprint(status: os.stat_result) -> Fingerprint:
    return status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
