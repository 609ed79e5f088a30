"""Writes the data of a generation: blocks of the state one behind the other, and those of entries that are kept.

Owns the data file while it is written. Runs of blocks go from file to file inside the kernel. A block is stored only if
it has the hash that the table says: what was copied is read back. Nothing here commits.
"""

from __future__ import annotations

import errno
import itertools
import os
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import xxhash

from hpcstage.checkpoint.generations.choice import KindChoice
from hpcstage.checkpoint.generations.draft import GenerationDraft
from hpcstage.checkpoint.generations.files import PIECE_BYTES, Files
from hpcstage.checkpoint.generations.manifest import GenerationKind
from hpcstage.checkpoint.generations.state import EntryContent
from hpcstage.checkpoint.generations.table import Indices, Table
from hpcstage.checkpoint.generations.terms import CommitMeter, CommitPhase, CommitTerms

_PAGE_BYTES = 4096
_STEP_BYTES = 32 << 20
"""The most bytes between two looks at whether the commit is still wanted."""
_PLACE = ("offset", "length", "generation")
"""The fields of a record that say where the bytes are."""


@dataclass(frozen=True)
class WrittenBlocks:
    """The result of writing."""

    table: bytes
    """The table of all blocks in its binary form."""
    data_bytes: int


class DataFile:
    """A data file that grows, within the terms of its commit."""

    def __init__(self, files: Files, fd: int, terms: CommitTerms) -> None:
        self._files = files
        self._fd = fd
        self._terms = terms
        self._written = 0

    @property
    def size_bytes(self) -> int:
        """Returns how long the file is."""
        return self._written

    def meter(self, total_bytes: int) -> CommitMeter:
        """Returns what counts the bytes of the state that are stored."""
        return CommitMeter(self._terms, CommitPhase.WRITING, total_bytes)

    def copy(self, source: EntryContent, offset: int, count: int) -> int | None:
        """Adds a part of an entry; returns where it stands, None if the entry was too short. Raises NoRoom.

        A part of more than a page begins on one, which a copy by reference needs.
        """
        if count > _PAGE_BYTES:
            self._written += -self._written % _PAGE_BYTES
        place = self._written
        self._terms.check_room(place + count)
        copied = source.copy(offset, count, self._fd, place)
        self._written += copied
        return place if copied == count else None

    def add(self, content: memoryview) -> int:
        """Adds some bytes; returns where they stand. Raises NoRoom."""
        place = self._written
        self._terms.check_room(place + len(content))
        self._files.write(self._fd, content, place)
        self._written += len(content)
        return place

    def read_into(self, view: memoryview, offset: int) -> int:
        """Fills the buffer from a place of what was copied; returns how much there was."""
        return self._files.read_into(self._fd, view, offset)

    def finish(self) -> None:
        """Has everything on the disk."""
        self._files.call(os.fsync, self._fd)


@dataclass
class DataWriter:
    """Writes chosen blocks of a draft and notes their places in the table."""

    draft: GenerationDraft
    data: DataFile
    table: Table
    number: int
    meter: CommitMeter

    def write(self, blocks: Indices) -> None:
        """Stores blocks, given in ascending order."""
        self.table["generation"][blocks] = self.number
        first_kept = int(np.searchsorted(blocks, self.draft.first_kept))
        for file, chosen in self._by_file(blocks[:first_kept]):
            with self.draft.state.opened(file) as content:
                for run in self._runs(chosen):
                    self._copy_run(content, file, run)
                    self.meter.add(int(self.draft.layout.lengths[run].sum()))
        self._copy_kept(blocks[first_kept:])

    def _copy_kept(self, blocks: Indices) -> None:
        """Stores blocks of the generation before, verified. Raises DamagedGeneration."""
        before, buffer = self.draft.before, memoryview(bytearray(self.draft.layout.block_bytes))
        for block in blocks.tolist():
            if before.opened is not None:
                view, row = buffer[: self.draft.layout.lengths[block]], int(self.draft.difference.found[block])
                before.reader.read_run(before.opened, row, row + 1, view)
                self.table["offset"][block], self.table["length"][block] = self.data.add(view), len(view)
                self.meter.add(len(view))

    def _runs(self, chosen: Indices) -> Iterator[Indices]:
        """Yields blocks that follow one another, so few that a commit can be ended in between."""
        longest = max(1, _STEP_BYTES // self.draft.layout.block_bytes)
        for run in np.split(chosen, np.flatnonzero(np.diff(chosen) != 1) + 1):
            for start in range(0, len(run), longest):
                yield run[start : start + longest]

    def _by_file(self, blocks: Indices) -> Iterator[tuple[int, Indices]]:
        edges = np.searchsorted(blocks, self.draft.layout.starts)
        for file in np.flatnonzero(np.diff(edges)):
            yield int(file), blocks[edges[file] : edges[file + 1]]

    def _copy_run(self, content: EntryContent, file: int, run: Indices) -> None:
        layout = self.draft.layout
        lengths, first = layout.lengths[run], int(layout.offsets[run[0]])
        place = self.data.copy(content, first, int(lengths.sum()))
        if place is None:
            raise self.draft.state.changed(file)
        self._check_copied(file, run, place)
        self.table["offset"][run] = place + layout.offsets[run] - first
        self.table["length"][run] = lengths

    def _check_copied(self, file: int, run: Indices, place: int) -> None:
        """Reads copied blocks back. Raises StateChanged if one is not what was hashed: no time tells of a store through
        a mapping."""
        layout, hashes = self.draft.layout, self.draft.difference.hashes
        longest = max(1, PIECE_BYTES // layout.block_bytes)
        buffer = memoryview(bytearray(layout.block_bytes * min(longest, len(run))))
        for start in range(0, len(run), longest):
            blocks = run[start : start + longest]
            lengths = layout.lengths[blocks].tolist()
            view = buffer[: sum(lengths)]
            if self.data.read_into(view, place) < len(view):
                raise OSError(errno.EIO, "copied bytes cannot be read back")
            edges = itertools.pairwise(itertools.accumulate(lengths, initial=0))
            for block, (begin, end) in zip(blocks.tolist(), edges, strict=True):
                if xxhash.xxh3_128_digest(view[begin:end]) != hashes[block].tobytes():
                    raise self.draft.state.changed(file)
            place += len(view)


def write_blocks(draft: GenerationDraft, choice: KindChoice, number: int, data: DataFile) -> WrittenBlocks:
    """Stores the blocks of a generation of the chosen kind and returns where all of its blocks are."""
    table = draft.difference.blank_table()
    if choice.kind is not GenerationKind.FULL and draft.before.table is not None:
        known = np.flatnonzero(draft.difference.found >= 0)
        table[known] = draft.before.table[draft.difference.found[known]]
    writer = DataWriter(draft, data, table, number, data.meter(draft.stored_bytes(choice.kind)))
    writer.write(draft.stored(choice.kind))
    data.finish()
    own, alike = np.flatnonzero(draft.wanted(choice.kind)), draft.alike(choice.kind)
    for name in _PLACE:
        table[name][own] = table[name][alike[own]]
    return WrittenBlocks(table.tobytes(), data.size_bytes)
