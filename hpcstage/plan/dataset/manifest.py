"""Holds the manifest, the frozen list of a job's files, in one binary file that is mapped, never parsed.

This module owns the file format and look-ups in it. Scanning is in `scan`; who reads what, when, is in `order`. Opening
a corrupt, truncated or foreign file raises a UsageError; it never crashes later.

    header    magic, version, counts, byte offsets, CRC of the rest
    columns   size u64, mtime i64, device u64, inode u64, offset of the path u64 (one more than files), ctime i64,
              mode u32, number of names u32, owner u32, group u32, dataset u16, flags u16
    index     u32 per slot: id + 1 of the file whose hash (CRC-32 of its path, started with its dataset) leads there
    paths     below the roots, one behind the other
    datasets  JSON
"""

from __future__ import annotations

import json
import mmap
import os
import struct
import zlib
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate
from pathlib import Path

from hpcstage.errors import UsageError
from hpcstage.jsonform import read, written
from hpcstage.plan.dataset.columns import LINK_FLAG, Columns
from hpcstage.plan.dataset.roots import Roots, join, tidy
from hpcstage.plan.types import Dataset, ManifestEntry
from hpcstage.writing import replacing

_MAGIC = b"hpcstage manifest\n\0\0\0\0\0\0"
_VERSION = 2
_ENDIAN_MARK = 0x01020304
_NUMBERS = struct.Struct("=IIQQQQQ")
"""The numbers are version, endian mark, files, index slots, bytes of paths, bytes of datasets, and bytes of content."""
_CRC = struct.Struct("=Q")
_HEADER_BYTES = len(_MAGIC) + _NUMBERS.size + _CRC.size
_COLUMNS = "QqQQQqIIIIHH"
"""Type codes of the columns, widest first, so that every column is aligned."""
_INODES = 3
_INODE = struct.Struct("=Q")
_NO_ID = 0
_PATHS_AT_ONCE = 4096


class Manifest:
    """The files of a job. An id is a position; files are sorted by (dataset, path)."""

    def __init__(self, buffer: bytes | mmap.mmap, header: tuple[int, int, int, int]) -> None:
        """Only `build` and `open` call this."""
        files, slots, path_bytes, json_bytes = header
        self._buffer = buffer
        view = memoryview(buffer)
        columns: list[memoryview[int]] = []
        at = _HEADER_BYTES
        for position, code in enumerate(_COLUMNS):
            if position == _INODES:
                self._inodes_at = at
            size = array(code).itemsize * (files + (1 if position == 4 else 0))
            columns.append(_cast(view[at : at + size], code))
            at = _aligned(at + size)
        self._sizes, self._mtimes, self._devices, self.inodes = columns[:4]
        self._offsets, self._ctimes, self._modes, self._links, self._uids, self._gids, self._of, self._flags = columns[
            4:
        ]
        self._index = _cast(view[at : at + 4 * slots], "I")
        at += 4 * slots
        self._paths_at = at
        self._mask = slots - 1
        blob = bytes(view[at + path_bytes : at + path_bytes + json_bytes])
        self.datasets: list[Dataset] = [read(Dataset, item) for item in json.loads(blob)]
        self._roots = Roots(self.datasets)
        self._names = [os.fsencode(dataset.name) + b"/" for dataset in self.datasets]
        self._total_bytes: int | None = None

    # ---- making, saving, opening

    @classmethod
    def build(cls, datasets: Sequence[Dataset], entries: Iterable[ManifestEntry] | Columns) -> Manifest:
        """Makes a manifest in memory. It takes the first of entries with the same dataset and path. Columns are empty
        afterwards."""
        if isinstance(entries, Columns):
            found = entries
        else:
            found = Columns()
            for entry in entries:
                found.add_entry(entry)
        found.sort()
        return _opened(_encode(datasets, found), "the new manifest", verify=False)

    @classmethod
    def open(cls, path: Path, *, verify: bool = True) -> Manifest:
        """Maps a manifest. Raises UsageError if it is not one; `verify` reads all of it once (50 ms for a million)."""
        try:
            with open(path, "rb") as file:
                size = os.fstat(file.fileno()).st_size
                mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if size >= _HEADER_BYTES else b""
        except OSError as error:
            raise UsageError(f"cannot open the manifest {path}: {error.strerror}", _REMEDY) from None
        return _opened(mapped, str(path), verify=verify)

    def save(self, path: Path) -> None:
        """Writes the file atomically."""
        with replacing(path) as file:
            file.write(memoryview(self._buffer))

    # ---- one file

    def __len__(self) -> int:
        return len(self._sizes)

    def entry(self, file_id: int) -> ManifestEntry:
        """Returns all that the manifest knows of a file."""
        return ManifestEntry(
            dataset=self._of[file_id],
            path=self.path(file_id),
            size_bytes=self._sizes[file_id],
            mtime_ns=self._mtimes[file_id],
            mode=self._modes[file_id],
            device=self.devices[file_id],
            inode=self.inodes[file_id],
            is_link=self.is_link(file_id),
            ctime_ns=self._ctimes[file_id],
            links=self._links[file_id],
            uid=self._uids[file_id],
            gid=self._gids[file_id],
        )

    def path(self, file_id: int) -> bytes:
        """Returns the file's path below the root of its dataset."""
        at = self._paths_at
        return self._buffer[at + self._offsets[file_id] : at + self._offsets[file_id + 1]]

    def dataset_of(self, file_id: int) -> int:
        """Returns the index of a file's dataset."""
        return self._of[file_id]

    def size(self, file_id: int) -> int:
        """Returns the size in bytes that the scan found."""
        return self._sizes[file_id]

    def source_path(self, file_id: int) -> bytes:
        """Returns the file's absolute path at the source."""
        return join(self.datasets[self._of[file_id]].root, self.path(file_id))

    def store_path(self, file_id: int) -> bytes:
        """Returns the path of the staged copy below `store/`."""
        return self._names[self._of[file_id]] + self.path(file_id)

    def is_link(self, file_id: int) -> bool:
        """Returns whether the file is a symbolic link at the source."""
        return bool(self._flags[file_id] & LINK_FLAG)

    def has_links(self) -> bool:
        """Returns whether any file may lie outside of the datasets: it is a symbolic link, or was found behind one."""
        return any(self._flags)

    def named_elsewhere(self) -> Iterator[int]:
        """Yields the ids of symbolic links and of files with several names."""
        return (
            i
            for i, (flags, links) in enumerate(zip(self._flags, self._links, strict=True))
            if flags & LINK_FLAG or links > 1
        )

    # ---- look-ups

    def find(self, dataset: int, path: bytes) -> int | None:
        """Returns the id of a path below a dataset's root; None if the manifest lacks it."""
        slot = zlib.crc32(path, dataset) & self._mask
        while (mark := self._index[slot]) != _NO_ID:
            if self.path(mark - 1) == path and self._of[mark - 1] == dataset:
                return mark - 1
            slot = (slot + 1) & self._mask
        return None

    def find_source(self, path: bytes) -> int | None:
        """Returns the id of an absolute path, spelt with a root or an alias; `//` and `/./` do not matter."""
        place = self._roots.locate(path)
        return None if place is None else self.find(*place)

    def ids_below(self, directory: bytes) -> range:
        """Returns the ids of all files below an absolute directory (none for a file)."""
        place = self._roots.locate(tidy(directory))
        if place is None:
            return range(0)
        dataset, below = place
        first, last = self.ids_of(dataset).start, self.ids_of(dataset).stop
        if not below:
            return range(first, last)
        # Files of a directory are neighbours: their paths begin with it and a slash; "0" follows "/".
        return range(self._bisect(below + b"/", first, last), self._bisect(below + b"0", first, last))

    def store_directory(self, directory: bytes) -> bytes | None:
        """Returns the path below `store/` of an absolute directory; None outside the datasets."""
        place = self._roots.locate(directory)
        return None if place is None else (self._names[place[0]] + place[1]).rstrip(b"/")

    def ids_of_inode(self, inode: int) -> list[int]:
        """Returns the ids with this inode on any device; searches the whole column."""
        wanted, found = _INODE.pack(inode), []
        at, end = self._inodes_at, self._inodes_at + _INODE.size * len(self)
        while (at := self._buffer.find(wanted, at, end)) >= 0:
            id_, rest = divmod(at - self._inodes_at, _INODE.size)
            if not rest:
                found.append(id_)
            at += 1
        return found

    def ids_of(self, dataset: int) -> range:
        """Returns the ids of a dataset's files."""
        return range(_bisect_column(self._of, dataset), _bisect_column(self._of, dataset + 1))

    def _bisect(self, path: bytes, low: int, high: int) -> int:
        while low < high:
            middle = (low + high) // 2
            if self.path(middle) < path:
                low = middle + 1
            else:
                high = middle
        return low

    # ---- all files

    @property
    def sizes(self) -> memoryview[int]:
        """Returns the sizes in bytes, by id."""
        return self._sizes

    @property
    def devices(self) -> memoryview[int]:
        """Returns the devices that the files are on, by id."""
        return self._devices

    @property
    def total_bytes(self) -> int:
        """Returns the sum of all sizes."""
        if self._total_bytes is None:
            self._total_bytes = sum(self._sizes)
        return self._total_bytes

    def paths_digest(self) -> str:
        """Returns a SHA-256 in hexadecimal. Equal digests mean that ids mean the same paths below as many roots."""
        import hashlib

        paths = memoryview(self._buffer)[self._paths_at : self._paths_at + self._offsets[len(self)]]
        found = hashlib.sha256()
        for part in (self._offsets, self._of, paths):
            found.update(part)
        return found.hexdigest()

    def entries(self) -> Iterator[ManifestEntry]:
        """Yields all files by id."""
        return map(self.entry, range(len(self)))


_REMEDY = "scan again: start a new run, or give --data instead of a run directory"


def _cast(view: memoryview[int], code: str) -> memoryview[int]:
    cast: Callable[[str], memoryview[int]] = view.cast  # type: ignore[assignment]
    return cast(code)


def _bisect_column(column: memoryview[int], value: int) -> int:
    low, high = 0, len(column)
    while low < high:
        middle = (low + high) // 2
        if column[middle] < value:
            low = middle + 1
        else:
            high = middle
    return low


def _aligned(at: int) -> int:
    return (at + 7) & ~7


def _encode(datasets: Sequence[Dataset], found: Columns) -> mmap.mmap:
    """Returns a manifest in memory, and empties the columns meanwhile: a million files take a hundred megabytes."""
    index = _hash_index(found.paths, found.datasets)
    blob = json.dumps([written(d) for d in datasets]).encode()
    counts = (len(found), len(index), sum(map(len, found.paths)), len(blob))
    size = _expected(*counts)
    numbers = _NUMBERS.pack(_VERSION, _ENDIAN_MARK, *counts, size - _HEADER_BYTES)
    made = mmap.mmap(-1, size)
    made.seek(_HEADER_BYTES)
    sizes, mtimes, devices, inodes, *others = found.arrays()
    offsets = array("Q", accumulate(map(len, found.paths), initial=0))
    for column in (sizes, mtimes, devices, inodes, offsets, *others):
        made.write(column)
        made.seek(_aligned(made.tell()))
        del column[:]
    made.write(index)
    for start in range(0, len(found), _PATHS_AT_ONCE):
        made.write(b"".join(found.paths[start : start + _PATHS_AT_ONCE]))
    found.paths.clear()
    made.write(blob)
    crc = zlib.crc32(memoryview(made)[_HEADER_BYTES:], zlib.crc32(numbers))
    made[:_HEADER_BYTES] = b"".join((_MAGIC, numbers, _CRC.pack(crc)))
    return made


def _hash_index(paths: Sequence[bytes], owners: Sequence[int]) -> array[int]:
    slots = 1 << max(3, (2 * len(paths)).bit_length())
    index = array("I", bytes(4 * slots))
    mask = slots - 1
    for mark, code in enumerate(map(zlib.crc32, paths, owners), 1):
        slot = code & mask
        while index[slot]:
            slot = (slot + 1) & mask
        index[slot] = mark
    return index


def _opened(buffer: bytes | mmap.mmap, name: str, *, verify: bool) -> Manifest:
    if len(buffer) < _HEADER_BYTES or buffer[: len(_MAGIC)] != _MAGIC:
        raise UsageError(f"{name} is not a manifest of hpcstage", _REMEDY)
    numbers = buffer[len(_MAGIC) : len(_MAGIC) + _NUMBERS.size]
    version, endian, files, slots, path_bytes, json_bytes, content = _NUMBERS.unpack(numbers)
    if version != _VERSION or endian != _ENDIAN_MARK:
        raise UsageError(f"the manifest {name} is of another version of hpcstage or another kind of machine", _REMEDY)
    whole = len(buffer) == _HEADER_BYTES + content == _expected(files, slots, path_bytes, json_bytes)
    try:
        if whole and (not verify or _checksum(buffer, numbers)):
            return Manifest(buffer, (files, slots, path_bytes, json_bytes))
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(f"the manifest {name} is damaged", _REMEDY) from error
    raise UsageError(f"the manifest {name} is damaged", _REMEDY)


def _checksum(buffer: bytes | mmap.mmap, numbers: bytes) -> bool:
    crc = _CRC.unpack(buffer[_HEADER_BYTES - _CRC.size : _HEADER_BYTES])[0]
    return bool(zlib.crc32(memoryview(buffer)[_HEADER_BYTES:], zlib.crc32(numbers)) == crc)


def _expected(files: int, slots: int, path_bytes: int, json_bytes: int) -> int:
    at = _HEADER_BYTES
    for position, code in enumerate(_COLUMNS):
        at = _aligned(at + array(code).itemsize * (files + (1 if position == 4 else 0)))
    return at + 4 * slots + path_bytes + json_bytes
