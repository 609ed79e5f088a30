"""The state below a directory: its names with modes, times and links, and the hashes of its files' blocks.

Files are read in pieces into one buffer, not mapped: a program that truncates a mapped file would end its reader with
SIGBUS, and hashing from the buffer costs nothing beside the reading. Holes are not read. A state that changes while it
is read or copied is refused, as far as sizes and times tell. An entry that changed a moment ago is looked at again,
since a second change within the same tick of the kernel's clock would leave its times as they are. No time tells of
stores through a mapping: each block is then as it was at one moment, but blocks may be of different moments.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import stat
import sys
import time
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Protocol

import xxhash

from hpcstage.checkpoint.generations.files import PIECE_BYTES, RESTORING, Files
from hpcstage.checkpoint.generations.layout import BLOCK_BYTES, BlockLayout
from hpcstage.checkpoint.generations.manifest import EntryType, SavedEntry
from hpcstage.checkpoint.generations.parts import parts_of
from hpcstage.checkpoint.generations.table import Hashes, rows
from hpcstage.checkpoint.generations.terms import CommitMeter
from hpcstage.errors import HpcstageError

Fingerprint = tuple[int, int, int, int]
_BLOCK_OF_STAT = 512
_DIGEST_BYTES = 16
_TICK_NS = 20_000_000
"""Longer than a tick of the clock from which files get their times (1 to 10 ms)."""
_GONE = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ESTALE})
"""The errors of a path at which there is something else than before."""


class StateChanged(HpcstageError):
    """The program changed an entry while it was being saved."""

    def __init__(self, what: Path | str) -> None:
        super().__init__(f"{what} changed while it was saved", "save it when nothing writes to it")


class EntryContent(Protocol):
    """The bytes of one entry."""

    def read_into(self, view: memoryview, offset: int) -> int:
        """Fills the buffer from a place of the content; returns how much there was."""

    def copy(self, offset: int, count: int, target: int, to: int) -> int:
        """Writes a part of the content to a place of a file; returns how much there was."""


class FoundState(Protocol):
    """A state at a moment, as a commit takes it: entries, some of which have bytes."""

    @property
    def entries(self) -> tuple[SavedEntry, ...]:
        """Returns the entries in the order of their blocks."""

    @property
    def left_out(self) -> tuple[str, ...]:
        """Returns the names of what is not saved."""

    def hashed(self, layout: BlockLayout, meter: CommitMeter) -> Hashes:
        """Returns the hash of every block. Raises StateChanged."""

    def opened(self, index: int) -> contextlib.AbstractContextManager[EntryContent]:
        """Gives the bytes of an entry. Raises StateChanged."""

    def changed(self, index: int) -> StateChanged:
        """Returns the error for an entry that was changed."""

    def check_unchanged(self) -> None:
        """Raises StateChanged if an entry is not as it was found."""


class StateSource(Protocol):
    """Where a state comes from."""

    def scan(self, files: Files) -> FoundState:
        """Returns the state at this moment."""


@dataclass(frozen=True)
class FileTree:
    """The entries of some names directly below a directory with all below them; of all names where none are given."""

    directory: Path
    names: Sequence[str] | None = None

    def scan(self, files: Files) -> FoundTree:
        """Returns the entries. Raises StateChanged, and a ValueError unless each of the given names is one of the
        directory itself, given once."""
        found: list[tuple[SavedEntry, Fingerprint]] = []
        left_out: list[str] = []
        if self.names is not None:
            _check_names(self.names)
        for name in sorted(_of_state(files, self.directory) if self.names is None else self.names):
            found += _walk(files, self.directory, name, left_out)
        entries, fingerprints = tuple(e for e, _ in found), tuple(f for _, f in found)
        return FoundTree(files, self.directory, entries, fingerprints, tuple(left_out))


@dataclass(frozen=True)
class FoundTree:
    """The names of a state of files at a moment."""

    files: Files
    directory: Path
    entries: tuple[SavedEntry, ...]
    fingerprints: tuple[Fingerprint, ...]
    """Values that change when an entry does; in the order of the entries."""
    left_out: tuple[str, ...]
    """Sockets, pipes and devices, which are not saved."""

    def path(self, index: int) -> Path:
        """Returns the path of an entry."""
        return self.directory / self.entries[index].name

    def hashed(self, layout: BlockLayout, meter: CommitMeter) -> Hashes:
        """Returns the hash of every block. Raises StateChanged."""
        largest = max((entry.size_bytes for entry in self.entries), default=0)
        digests, buffer = bytearray(), memoryview(bytearray(min(max(PIECE_BYTES, layout.block_bytes), largest)))
        for index, entry in enumerate(self.entries):
            if entry.size_bytes:
                with self.opened(index) as content:
                    blocks, before = layout.blocks(index), len(digests)
                    if _fingerprint(self.files.call(os.fstat, content.fd)) == self.fingerprints[index]:
                        lengths = layout.lengths[blocks.start : blocks.stop].tolist()
                        _hash_file(content, lengths, _Hashing(buffer, digests, meter))
                    if len(digests) - before != len(blocks) * _DIGEST_BYTES:
                        raise self.changed(index)
        return rows(digests)

    @contextlib.contextmanager
    def opened(self, index: int) -> Iterator[EntryFile]:
        """Gives the bytes of an entry's file. Raises StateChanged if the file is gone."""
        path = self.path(index)
        with _program_path(path), self.files.opened(path) as fd:
            yield EntryFile(self.files, fd)

    def changed(self, index: int) -> StateChanged:
        """Returns the error for an entry that was changed."""
        return StateChanged(self.path(index))

    def check_unchanged(self) -> None:
        """Raises StateChanged if an entry is not as it was when the state was scanned."""
        for index, fingerprint in enumerate(self.fingerprints):
            if _fingerprint(_lstat(self.files, self.path(index))) != fingerprint:
                raise self.changed(index)


@dataclass(frozen=True)
class EntryFile:
    """The bytes of an opened file."""

    files: Files
    fd: int

    def read_into(self, view: memoryview, offset: int) -> int:
        """Fills the buffer from a place of the file; returns how much there was."""
        return self.files.read_into(self.fd, view, offset)

    def copy(self, offset: int, count: int, target: int, to: int) -> int:
        """Copies a part of the file to a place of another; returns how much there was."""
        return self.files.copy(self.fd, offset, count, target, to)


def _walk(files: Files, directory: Path, name: str, left_out: list[str]) -> Iterator[tuple[SavedEntry, Fingerprint]]:
    path = directory / name
    status = _settled(files, path)
    mode, mtime_ns = stat.S_IMODE(status.st_mode), status.st_mtime_ns
    if stat.S_ISREG(status.st_mode):
        parts = _parts(files, path, status.st_size)
        yield SavedEntry(name, EntryType.FILE, mode, mtime_ns, status.st_size, parts=parts), _fingerprint(status)
    elif stat.S_ISLNK(status.st_mode):
        with _program_path(path):
            target = link_target(directory, name, files.call(os.readlink, path))
        yield SavedEntry(name, EntryType.LINK, mode, mtime_ns, target=target), _fingerprint(status)
    elif stat.S_ISDIR(status.st_mode):
        yield SavedEntry(name, EntryType.DIRECTORY, mode, mtime_ns), _fingerprint(status)
        for below in sorted(_listed(files, path)):
            yield from _walk(files, directory, f"{name}/{below}", left_out)
    else:
        left_out.append(name)


def link_target(directory: Path, name: str, target: str) -> str:
    """Returns the target of a link as it is saved: relative where it leads into the directory of the state, which lies
    elsewhere when it is restored."""
    for top in (os.fspath(directory), os.path.realpath(directory)):
        if target == top or target.startswith(f"{top}/"):
            return os.path.relpath(target, os.path.dirname(f"{top}/{name}"))
    return target


@dataclass(frozen=True)
class _Hashing:
    """The things with which the hashing of one file after the other goes on."""

    buffer: memoryview
    digests: bytearray
    meter: CommitMeter


def _hash_file(content: EntryFile, lengths: list[int], hashing: _Hashing) -> None:
    """Adds the hashes of a file's blocks; fewer if the file is shorter than them."""
    ends = list(accumulate(lengths))
    sparse = content.files.call(os.fstat, content.fd).st_blocks * _BLOCK_OF_STAT < ends[-1]
    block, offset = 0, 0
    while block < len(ends):
        if sparse and (after := bisect_right(ends, _data_from(content, offset), block)) > block:
            for length in lengths[block:after]:
                hashing.digests.extend(_hash_of_zeros(length))
        else:
            after = max(block + 1, bisect_right(ends, offset + len(hashing.buffer), block))
            view = hashing.buffer[: ends[after - 1] - offset]
            if content.read_into(view, offset) < len(view):
                return
            for end, length in zip(ends[block:after], lengths[block:after], strict=True):
                hashing.digests.extend(xxhash.xxh3_128_digest(view[end - length - offset : end - offset]))
        hashing.meter.add(ends[after - 1] - offset)
        block, offset = after, ends[after - 1]


def _data_from(content: EntryFile, offset: int) -> int:
    """Returns where data begins from here on; a place behind every file where none follows."""
    try:
        return content.files.call(os.lseek, content.fd, offset, os.SEEK_DATA)
    except OSError as error:
        return sys.maxsize if error.errno == errno.ENXIO else offset


@functools.lru_cache(maxsize=64)
def _hash_of_zeros(length: int) -> bytes:
    return xxhash.xxh3_128_digest(bytes(length))


def _parts(files: Files, path: Path, size_bytes: int) -> tuple[int, ...]:
    if size_bytes <= BLOCK_BYTES:
        return ()
    with _program_path(path), files.opened(path) as fd:
        return parts_of(files, fd, size_bytes)


@contextlib.contextmanager
def _program_path(path: Path) -> Iterator[None]:
    """Makes StateChanged of the errors that say that the program moved or removed the path."""
    try:
        yield
    except OSError as error:
        if error.errno in _GONE:
            raise StateChanged(path) from error
        raise


def _check_names(names: Sequence[str]) -> None:
    for name in names:
        if name in ("", ".", "..") or "/" in name or "\0" in name or name.startswith(RESTORING):
            raise ValueError(f"{name!r} is no name in the directory of a state")
    if len(set(names)) < len(names):
        raise ValueError("a name of a state is given twice")


def _of_state(files: Files, directory: Path) -> list[str]:
    """Returns the names of a directory without those of a restore that goes on or was killed."""
    return [name for name in _listed(files, directory) if not name.startswith(RESTORING)]


def _listed(files: Files, path: Path) -> list[str]:
    with _program_path(path):
        return files.call(os.listdir, path)


def _lstat(files: Files, path: Path) -> os.stat_result:
    with _program_path(path):
        return files.call(os.lstat, path)


def _settled(files: Files, path: Path) -> os.stat_result:
    """Returns the status of an entry that did not change within the last tick of the clock, after a wait if need be.

    Raises StateChanged if the entry changes during the wait.
    """
    status = _lstat(files, path)
    if _is_young(status):
        time.sleep(_TICK_NS / 1e9)
        before, status = status, _lstat(files, path)
        if _fingerprint(status) != _fingerprint(before):
            raise StateChanged(path)
    return status


def _is_young(status: os.stat_result) -> bool:
    """Tells whether an entry changed just now; a time of the future tells nothing."""
    return 0 <= time.time_ns() - status.st_ctime_ns < _TICK_NS


def _fingerprint(status: os.stat_result) -> Fingerprint:
    return status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
