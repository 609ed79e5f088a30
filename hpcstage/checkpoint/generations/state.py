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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Protocol

import numpy as np
import xxhash

from hpcstage.checkpoint.generations.files import OURS, PIECE_BYTES, Files
from hpcstage.checkpoint.generations.layout import BlockLayout, Hashes
from hpcstage.checkpoint.generations.manifest import EntryType, SavedEntry
from hpcstage.checkpoint.generations.terms import unheard
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


@dataclass(frozen=True)
class FoundState:
    """The entries of a state at a moment."""

    files: Files
    directory: Path
    entries: tuple[SavedEntry, ...]
    fingerprints: tuple[Fingerprint, ...]
    """Values that change when an entry does; in the order of the entries."""

    def hashed(self, layout: BlockLayout, progress: Callable[[int], None] = unheard) -> Hashes:
        """Returns the hash of every block; the layout begins with those of the entries. `progress` hears of the bytes
        that were just hashed. Raises StateChanged."""
        largest = max((entry.size_bytes for entry in self.entries), default=0)
        digests, buffer = bytearray(), memoryview(bytearray(min(max(PIECE_BYTES, layout.block_bytes), largest)))
        for index, entry in enumerate(self.entries):
            if entry.size_bytes:
                blocks = layout.blocks(index)
                with self.opened(index) as fd:
                    if _fingerprint(self.files.call(os.fstat, fd)) != self.fingerprints[index]:
                        raise self.changed(index)
                    lengths = layout.lengths[blocks.start : blocks.stop].tolist()
                    for count, found in _hashes(self.files, fd, lengths, buffer):
                        digests += found
                        progress(count)
                if len(digests) != blocks.stop * _DIGEST_BYTES:
                    raise self.changed(index)
        return np.frombuffer(digests, "<u8").reshape(-1, 2)

    @contextlib.contextmanager
    def opened(self, index: int) -> Iterator[int]:
        """Gives a descriptor of an entry's file. Raises StateChanged if the file is gone."""
        path = self._path(index)
        with _program_path(path), self.files.opened(path) as fd:
            yield fd

    def changed(self, index: int) -> StateChanged:
        """Returns the error for an entry that was changed."""
        return StateChanged(self._path(index))

    def check_unchanged(self) -> None:
        """Raises StateChanged if an entry is not as it was when the state was scanned."""
        for index, fingerprint in enumerate(self.fingerprints):
            if _fingerprint(_lstat(self.files, self._path(index))) != fingerprint:
                raise self.changed(index)

    def _path(self, index: int) -> Path:
        return self.directory / self.entries[index].name


class StateSource(Protocol):
    """Where a state comes from."""

    def scan(self, files: Files) -> FoundState:
        """Returns the state at this moment."""


@dataclass(frozen=True)
class FileTree:
    """The entries of some names directly below a directory with all below them; of all names where none are given."""

    directory: Path
    names: Sequence[str] | None = None
    known_as: str = ""
    """The directory as the program knew it, where that was moved since."""

    def scan(self, files: Files) -> FoundState:
        """Returns the entries. Raises StateChanged, and a ValueError unless each of the given names is one of the
        directory itself, given once."""
        names = self.names
        if names is None:  # without what is ours
            names = [name for name in _listed(files, self.directory) if not name.startswith(OURS)]
        _check_names(names)
        found = [one for name in sorted(names) for one in self._walk(files, name)]
        return FoundState(files, self.directory, tuple(e for e, _ in found), tuple(f for _, f in found))

    def _walk(self, files: Files, name: str) -> Iterator[tuple[SavedEntry, Fingerprint]]:
        """Yields an entry with all below it that is a file, a link or a directory."""
        path = self.directory / name
        status = _settled(files, path)
        mode, mtime_ns = stat.S_IMODE(status.st_mode), status.st_mtime_ns
        if stat.S_ISREG(status.st_mode):
            yield SavedEntry(name, EntryType.FILE, mode, mtime_ns, status.st_size), _fingerprint(status)
        elif stat.S_ISLNK(status.st_mode):
            with _program_path(path):
                target = link_target(self.directory, name, files.call(os.readlink, path), self.known_as)
            yield SavedEntry(name, EntryType.LINK, mode, mtime_ns, target=target), _fingerprint(status)
        elif stat.S_ISDIR(status.st_mode):
            yield SavedEntry(name, EntryType.DIRECTORY, mode, mtime_ns), _fingerprint(status)
            for below in sorted(_listed(files, path)):
                yield from self._walk(files, f"{name}/{below}")


def link_target(directory: Path, name: str, target: str, known_as: str = "") -> str:
    """Returns the target of a link as it is saved: relative where it leads into the directory of the state, which lies
    elsewhere when it is restored."""
    for top in filter(None, (os.fspath(directory), os.path.realpath(directory), known_as)):
        if target == top or target.startswith(f"{top}/"):
            return os.path.relpath(target, os.path.dirname(f"{top}/{name}"))
    return target


def _hashes(files: Files, fd: int, lengths: list[int], buffer: memoryview) -> Iterator[tuple[int, bytes]]:
    """Yields the hashes of a file's blocks, with the bytes that they stand for; fewer if the file is shorter."""
    ends = list(accumulate(lengths))
    sparse = files.call(os.fstat, fd).st_blocks * _BLOCK_OF_STAT < ends[-1]
    block, offset = 0, 0
    while block < len(ends):
        if sparse and (after := bisect_right(ends, _data_from(files, fd, offset), block)) > block:
            found = [_hash_of_zeros(length) for length in lengths[block:after]]
        else:
            after = max(block + 1, bisect_right(ends, offset + len(buffer), block))
            view = buffer[: ends[after - 1] - offset]
            if files.read_into(fd, view, offset) < len(view):
                return
            edges = pairwise(accumulate(lengths[block:after], initial=0))
            found = [xxhash.xxh3_128_digest(view[begin:end]) for begin, end in edges]
        yield ends[after - 1] - offset, b"".join(found)
        block, offset = after, ends[after - 1]


def _data_from(files: Files, fd: int, offset: int) -> int:
    """Returns where data begins from here on; a place behind every file where none follows."""
    try:
        return files.call(os.lseek, fd, offset, os.SEEK_DATA)
    except OSError as error:
        return sys.maxsize if error.errno == errno.ENXIO else offset


@functools.lru_cache(maxsize=64)
def _hash_of_zeros(length: int) -> bytes:
    return xxhash.xxh3_128_digest(bytes(length))


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
        if name in ("", ".", "..") or "/" in name or "\0" in name or name.startswith(OURS):
            raise ValueError(f"{name!r} is no name in the directory of a state")
    if len(set(names)) < len(names):
        raise ValueError("a name of a state is given twice")


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
