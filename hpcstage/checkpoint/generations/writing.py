"""Makes the data of a generation: compares a state with the generation before, chooses a kind, writes what is missing.

Compares by hashes alone: no old byte is read, a block that moved to another file or place is found again, and blocks of
one hash are stored once. Owns the data file while it is written. Runs of blocks go from file to file inside the kernel;
a block is stored only if it has the hash that the table says: what was copied is read back. Nothing here commits.
"""

from __future__ import annotations

import errno
import itertools
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import xxhash

from hpcstage.checkpoint.generations.files import PIECE_BYTES, Files, GenerationId, GenerationPart
from hpcstage.checkpoint.generations.layout import RECORD, BlockLayout, Hashes, Indices, Mask, find, first_alike
from hpcstage.checkpoint.generations.manifest import (
    DamagedGeneration,
    GenerationKind,
    GenerationManifest,
    checksum,
    layout_of,
)
from hpcstage.checkpoint.generations.reading import GenerationReader, LocalSource, OpenGeneration
from hpcstage.checkpoint.generations.state import FoundState
from hpcstage.checkpoint.generations.terms import CommitTerms, GenerationPolicy, KindChoice, choose

_PAGE_BYTES = 4096
_STEP_BYTES = 32 << 20
"""The most bytes between two calls of what hears of progress."""


@dataclass(frozen=True)
class GenerationBefore:
    """The newest generation, which the next one builds on if it can."""

    opened: OpenGeneration | None = None
    """None where there is none, or its manifest or table is damaged."""
    damage: str = ""
    """Why the next one cannot refer to its blocks."""
    chain_bytes: int = 0
    """The bytes of its data and of the data of all that it needs."""

    def chain(self) -> tuple[int, ...]:
        """Returns the generations that the next one would need."""
        return () if self.opened is None else (*self.opened.manifest.needs, self.opened.manifest.number)

    def found(self, hashes: Hashes) -> Indices:
        """Returns which of its blocks have these hashes; -1 where none has."""
        return find(hashes, np.zeros((0, 2), np.uint64) if self.opened is None else self.opened.table["hash"])


def newest_of(source: LocalSource, verify: Callable[[int], object]) -> GenerationBefore:
    """Returns what the next generation can build on; `verify` raises DamagedGeneration."""
    reader, numbers = GenerationReader(source), source.numbers()
    if not numbers:
        return GenerationBefore()
    opened = None
    try:
        opened = reader.generation(numbers[-1])
        chain_bytes = sum(_data_bytes(source, reader, n) for n in (numbers[-1], *opened.manifest.needs))
        verify(numbers[-1])
    except DamagedGeneration as error:
        return GenerationBefore(opened, f"the generation before is damaged: {error.what}")
    return GenerationBefore(opened, chain_bytes=chain_bytes)


def _data_bytes(source: LocalSource, reader: GenerationReader, number: int) -> int:
    """Returns the size of a generation's data. Raises DamagedGeneration if it is not all there."""
    expected = reader.manifest(number).data_bytes
    try:
        size = source.size_bytes(number, GenerationPart.DATA)
    except OSError as error:
        raise DamagedGeneration(f"the data of generation {number} cannot be read: {error.strerror}") from error
    if size != expected:
        raise DamagedGeneration(f"the data of generation {number} has {size} of {expected} bytes")
    return size


@dataclass(frozen=True)
class GenerationDraft:
    """A state, compared with the generation before."""

    state: FoundState
    before: GenerationBefore
    layout: BlockLayout
    hashes: Hashes
    zeros: Mask
    """The blocks of nothing but zeros."""
    found: Indices
    """Which block of the generation before each one is; -1: none, so it changed."""

    @property
    def changed(self) -> Mask:
        """Tells which blocks the generation before does not have."""
        return (self.found < 0) & ~self.zeros

    def own(self, kind: GenerationKind) -> tuple[Indices, Indices]:
        """Returns the blocks that have their bytes in a generation of this kind, and for each the one that is stored:
        the first of the same content."""
        own = np.flatnonzero(~self.zeros if kind is GenerationKind.FULL else self.changed)
        return own, own[first_alike(self.hashes[own])]

    def stored_bytes(self, kind: GenerationKind) -> int:
        """Returns the bytes of the blocks that a generation of this kind stores."""
        return int(self.layout.lengths[np.unique(self.own(kind)[1])].sum())

    def choose(self, policy: GenerationPolicy, full_why: str) -> KindChoice:
        """Chooses the kind."""
        if full_why or self.before.damage or self.before.opened is None:
            why = full_why or self.before.damage or "there is no generation before"
            return KindChoice(GenerationKind.FULL, why)
        sizes = self.stored_bytes(GenerationKind.FULL), self.stored_bytes(GenerationKind.DELTA)
        return choose(policy, *sizes, len(self.before.chain()), self.before.chain_bytes)

    def manifest(
        self, identity: GenerationId, choice: KindChoice, table: bytes, data_bytes: int, after_ns: int
    ) -> GenerationManifest:
        """Returns the manifest of what was written; its time is later than that of the generation before."""
        chain = () if choice.kind is GenerationKind.FULL else self.before.chain()
        before_ns = 0 if self.before.opened is None else self.before.opened.manifest.created_ns
        return GenerationManifest(
            identity.number,
            identity.attempt,
            choice.kind,
            choice.reason,
            max(chain, default=None),
            chain,
            max(time.time_ns(), before_ns + 1, after_ns + 1),
            self.layout.block_bytes,
            self.state.entries,
            data_bytes,
            checksum(table),
        )


def draft_of(state: FoundState, before: GenerationBefore, block_bytes: int, terms: CommitTerms) -> GenerationDraft:
    """Reads a state and compares it."""
    layout = layout_of(state.entries, block_bytes)
    hashes = state.hashed(layout, terms.progress)
    return GenerationDraft(state, before, layout, hashes, _zero_blocks(hashes, layout), before.found(hashes))


def _zero_blocks(hashes: Hashes, layout: BlockLayout) -> Mask:
    """Tells which blocks are nothing but zeros."""
    lengths, which = np.unique(layout.lengths, return_inverse=True)
    zeros = np.frombuffer(b"".join(xxhash.xxh3_128_digest(bytes(int(length))) for length in lengths), "<u8")
    return np.asarray((hashes == zeros.reshape(-1, 2)[which]).all(axis=1))


class DataWriter:
    """Writes the data file of a generation within the terms of its commit, and notes the places in its table."""

    def __init__(self, files: Files, fd: int, draft: GenerationDraft, kind: GenerationKind, terms: CommitTerms) -> None:
        self._files = files
        self._fd = fd
        self._draft = draft
        self._kind = kind
        self._terms = terms
        self._table = np.zeros(draft.layout.count, RECORD)
        self._size_bytes = 0

    def write(self, number: int) -> tuple[bytes, int]:
        """Stores the blocks of a generation, and has them on the disk; returns the table of all its blocks in its
        binary form, and the size of the data. Raises NoRoom and StateChanged."""
        draft, kind, table = self._draft, self._kind, self._table
        table["hash"] = draft.hashes
        if kind is not GenerationKind.FULL and draft.before.opened is not None:
            known = np.flatnonzero(draft.found >= 0)
            table[known] = draft.before.opened.table[draft.found[known]]
        own, alike = draft.own(kind)
        stored = np.unique(alike)
        table["generation"][stored] = number
        for file, chosen in self._by_file(stored):
            with draft.state.opened(file) as source:
                for run in self._runs(chosen):
                    self._copy_run(source, file, run)
        self._files.call(os.fsync, self._fd)
        table[own] = table[alike]
        return table.tobytes(), self._size_bytes

    def _by_file(self, blocks: Indices) -> Iterator[tuple[int, Indices]]:
        edges = np.searchsorted(blocks, self._draft.layout.starts)
        for file in np.flatnonzero(np.diff(edges)):
            yield int(file), blocks[edges[file] : edges[file + 1]]

    def _runs(self, chosen: Indices) -> Iterator[Indices]:
        """Yields blocks that follow one another, so few that a commit can be ended in between."""
        longest = max(1, _STEP_BYTES // self._draft.layout.block_bytes)
        for run in np.split(chosen, np.flatnonzero(np.diff(chosen) != 1) + 1):
            for start in range(0, len(run), longest):
                yield run[start : start + longest]

    def _copy_run(self, source: int, file: int, run: Indices) -> None:
        """Stores a run of blocks of a file. More than a page begins on one, which a copy by reference needs."""
        layout = self._draft.layout
        lengths, first = layout.lengths[run], int(layout.offsets[run[0]])
        count = int(lengths.sum())
        place = self._size_bytes + (-self._size_bytes % _PAGE_BYTES if count > _PAGE_BYTES else 0)
        self._terms.check_room(place + count)
        if self._files.copy(source, first, count, self._fd, place) < count:
            raise self._draft.state.changed(file)
        self._check_copied(file, run, place)
        self._note(run, place + layout.offsets[run] - first)

    def _check_copied(self, file: int, run: Indices, place: int) -> None:
        """Reads copied blocks back. Raises StateChanged if one is not what was hashed: no time tells of a store through
        a mapping."""
        layout, hashes = self._draft.layout, self._draft.hashes
        longest = max(1, PIECE_BYTES // layout.block_bytes)
        buffer = memoryview(bytearray(layout.block_bytes * min(longest, len(run))))
        for start in range(0, len(run), longest):
            blocks = run[start : start + longest]
            lengths = layout.lengths[blocks].tolist()
            view = buffer[: sum(lengths)]
            if self._files.read_into(self._fd, view, place) < len(view):
                raise OSError(errno.EIO, "copied bytes cannot be read back")
            edges = itertools.pairwise(itertools.accumulate(lengths, initial=0))
            for block, (begin, end) in zip(blocks.tolist(), edges, strict=True):
                if xxhash.xxh3_128_digest(view[begin:end]) != hashes[block].tobytes():
                    raise self._draft.state.changed(file)
            place += len(view)

    def _note(self, blocks: Indices, offsets: Indices) -> None:
        """Notes where blocks are that were stored behind all others."""
        lengths = self._draft.layout.lengths[blocks]
        self._table["offset"][blocks] = offsets
        self._table["length"][blocks] = lengths
        self._size_bytes = int(offsets[-1]) + int(lengths[-1])
        self._terms.progress(int(lengths.sum()))
