"""Reads generations block by block, each verified by its hash, from any source of their files.

Owns the way from a block of a generation to its bytes, through the generations that it needs. Does not own where the
files come from: `BlockSource` is that, so that survivors of an erasure code can stand in for a lost disk.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np
import xxhash

from hpcstage.checkpoint.generations.files import PIECE_BYTES, Files, GenerationPart, generation_number, generation_path
from hpcstage.checkpoint.generations.layout import RECORD, BlockLayout, Table
from hpcstage.checkpoint.generations.manifest import DamagedGeneration, GenerationManifest, checksum

_KEPT_OPEN = frozenset({GenerationPart.DATA, GenerationPart.PARITY})
"""The files that are read block by block."""


class BlockSource(Protocol):
    """Where the files of generations come from. An OSError of it counts as damage of the generation."""

    def size_bytes(self, number: int, part: GenerationPart) -> int:
        """Returns the size of a file of a generation."""

    def read_into(self, number: int, part: GenerationPart, view: memoryview, offset: int) -> int:
        """Fills the buffer from a place of a file of a generation; returns how much there was."""


def read_whole(source: BlockSource, number: int, part: GenerationPart) -> bytes:
    """Returns a file of a generation."""
    content = bytearray(source.size_bytes(number, part))
    return bytes(content[: source.read_into(number, part, memoryview(content), 0)])


class LocalSource:
    """The generations below a node-local directory. Owns the descriptors of the large files that were read."""

    def __init__(self, directory: Path, files: Files | None = None) -> None:
        self._directory = directory
        self._files = files or Files()
        self._opened = contextlib.ExitStack()
        self._descriptors: dict[tuple[int, GenerationPart], int] = {}

    def __enter__(self) -> LocalSource:
        return self

    def __exit__(self, *_: object) -> None:
        self._descriptors.clear()
        self._opened.close()

    def numbers(self) -> list[int]:
        """Returns the committed generations, oldest first; none of a directory that is not there."""
        try:
            names = self._files.call(os.listdir, self._directory)
        except FileNotFoundError:
            return []
        found = sorted(number for name in names if (number := generation_number(name)) is not None)
        return [number for number in found if self._has_manifest(number)]

    def size_bytes(self, number: int, part: GenerationPart) -> int:
        """Returns the size of a file of a generation."""
        return self._files.call(os.stat, self._path(number, part), follow_symlinks=False).st_size

    def read_into(self, number: int, part: GenerationPart, view: memoryview, offset: int) -> int:
        """Fills the buffer from a place of a file of a generation; returns how much there was."""
        if part not in _KEPT_OPEN:
            with self._files.opened(self._path(number, part)) as fd:
                return self._files.read_into(fd, view, offset)
        if (number, part) not in self._descriptors:
            opened = self._files.opened(self._path(number, part))
            self._descriptors[number, part] = self._opened.enter_context(opened)
        return self._files.read_into(self._descriptors[number, part], view, offset)

    def _has_manifest(self, number: int) -> bool:
        """Tells whether a generation is committed; one whose directory cannot be read is, as far as anybody knows."""
        try:
            self._files.call(os.lstat, self._path(number, GenerationPart.MANIFEST))
        except OSError as error:
            return not isinstance(error, FileNotFoundError | NotADirectoryError)
        return True

    def _path(self, number: int, part: GenerationPart) -> Path:
        return generation_path(self._directory, number) / part


@dataclass(frozen=True)
class OpenGeneration:
    """A generation's manifest and table, both verified."""

    manifest: GenerationManifest
    table: Table
    layout: BlockLayout

    def place(self, block: int) -> str:
        """Says for people where a block lies."""
        file = self.layout.file_of(block)
        return f"block {block - self.layout.starts[file]} of {self.manifest.entries[file].name!r}"


@dataclass
class GenerationReader:
    """Opens generations and reads their blocks. Every failure is a DamagedGeneration that names what is damaged."""

    source: BlockSource
    _open: dict[int, OpenGeneration] = field(default_factory=dict)
    _manifests: dict[int, GenerationManifest] = field(default_factory=dict)

    def generation(self, number: int) -> OpenGeneration:
        """Returns a generation with its manifest and table verified; they are read once."""
        if number not in self._open:
            self._open[number] = self._verified(number)
        return self._open[number]

    def manifest(self, number: int) -> GenerationManifest:
        """Returns a generation's manifest, verified; it is read once."""
        if number not in self._manifests:
            with _named_damage(number):
                found = GenerationManifest.from_bytes(read_whole(self.source, number, GenerationPart.MANIFEST))
                if found.number != number:
                    raise DamagedGeneration("its manifest is that of another one")
            self._manifests[number] = found
        return self._manifests[number]

    def pieces(self, generation: OpenGeneration, file: int) -> Iterator[tuple[int, memoryview]]:
        """Yields what is not zero of a file, verified: offsets and bytes, which hold until the next are asked for."""
        layout, table = generation.layout, generation.table
        first, longest = layout.starts[file], max(1, PIECE_BYTES // layout.block_bytes)
        size_bytes = generation.manifest.entries[file].size_bytes
        buffer = memoryview(bytearray(min(longest * layout.block_bytes, size_bytes)))
        for start, end in _runs(table[first : layout.starts[file + 1]], longest):
            start, end = first + start, first + end
            if table["length"][start]:
                count = int(layout.lengths[start:end].sum())
                self._read_run(generation, start, end, buffer[:count])
                yield int(layout.offsets[start]), buffer[:count]

    def _read_run(self, generation: OpenGeneration, start: int, end: int, view: memoryview) -> None:
        """Fills the buffer with blocks that lie one behind the other, verified."""
        record, place = generation.table[start], generation.place
        owner = int(record["generation"])
        try:
            count = self.source.read_into(owner, GenerationPart.DATA, view, int(record["offset"]))
        except OSError as error:
            what = f"{place(start)} cannot be read from the data of generation {owner}: {error.strerror}"
            raise DamagedGeneration(what) from error
        if count < len(view):
            raise DamagedGeneration(f"the data of generation {owner} is too short for {place(start)}")
        edges = itertools.accumulate(generation.layout.lengths[start:end].tolist(), initial=0)
        for block, (begin, until) in enumerate(itertools.pairwise(edges), start):
            if xxhash.xxh3_128_digest(view[begin:until]) != generation.table["hash"][block].tobytes():
                raise DamagedGeneration(f"{place(block)} differs from its hash")

    def _verified(self, number: int) -> OpenGeneration:
        manifest = self.manifest(number)
        with _named_damage(number):
            content = read_whole(self.source, number, GenerationPart.BLOCKS)
        layout = manifest.layout
        if checksum(content) != manifest.table_checksum or len(content) != layout.count * RECORD.itemsize:
            raise DamagedGeneration(f"generation {number}: its table of blocks differs from its checksum")
        table = np.frombuffer(content, RECORD)
        if len(table) and int(table["generation"].max()) > number:
            raise DamagedGeneration(f"generation {number}: its table is that of another one")
        return OpenGeneration(manifest, table, layout)


@contextlib.contextmanager
def _named_damage(number: int) -> Iterator[None]:
    """Says of which generation a file is damaged or cannot be read."""
    try:
        yield
    except OSError as error:
        raise DamagedGeneration(f"generation {number} cannot be read: {error.strerror}") from error
    except DamagedGeneration as error:
        raise DamagedGeneration(f"generation {number}: {error.what}") from error.__cause__


def _runs(table: Table, longest: int) -> Iterator[tuple[int, int]]:
    """Cuts blocks into runs that one read gets: zeros, or blocks one behind the other."""
    if not len(table):
        return
    zeros = table["length"] == 0
    behind = table["offset"][1:] == table["offset"][:-1] + table["length"][:-1]
    same = table["generation"][1:] == table["generation"][:-1]
    joined = (~zeros[1:] & ~zeros[:-1] & behind & same) | (zeros[1:] & zeros[:-1])
    edges = [0, *(np.flatnonzero(~joined) + 1).tolist(), len(table)]
    for start, end in itertools.pairwise(edges):
        for first in range(start, end, longest):
            yield first, min(first + longest, end)
