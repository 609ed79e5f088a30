"""A generation before it is written: the state compared with the generation before, and the choice of a kind.

Entries that are kept from the generation before are not read: they come with the hashes that its table has. Reads the
state and the generation before; writes nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass

import numpy as np

from hpcstage.checkpoint.generations.choice import GenerationPolicy, KindChoice, Measurement, choose
from hpcstage.checkpoint.generations.files import GenerationId, GenerationPart
from hpcstage.checkpoint.generations.layout import BlockLayout
from hpcstage.checkpoint.generations.manifest import (
    DamagedGeneration,
    GenerationKind,
    GenerationManifest,
    SavedEntry,
    checksum,
    layout_of,
)
from hpcstage.checkpoint.generations.reading import GenerationReader, LocalSource, OpenGeneration
from hpcstage.checkpoint.generations.state import FoundState
from hpcstage.checkpoint.generations.table import Difference, Indices, Mask, Table, compare, first_alike
from hpcstage.checkpoint.generations.terms import CommitMeter, CommitPhase, CommitTerms


@dataclass(frozen=True)
class GenerationBefore:
    """The newest generation."""

    reader: GenerationReader
    opened: OpenGeneration | None = None
    """None where there is none, or its manifest or table is damaged."""
    damage: str = ""
    """Why the next one cannot refer to its blocks."""
    chain_bytes: int = 0
    """The bytes of its data and of the data of all that it needs."""

    @property
    def chain(self) -> tuple[int, ...]:
        """Returns the generations that the next one would need."""
        return () if self.opened is None else (*self.opened.manifest.needs, self.opened.manifest.number)

    @property
    def table(self) -> Table | None:
        """Returns the table of its blocks."""
        return None if self.opened is None else self.opened.table

    def kept(self, names: Collection[str]) -> list[int]:
        """Returns where in the manifest the checkpoints of these names are. Raises DamagedGeneration if it cannot be
        read, and a ValueError unless it has all of them."""
        if names and self.opened is None and self.damage:
            raise DamagedGeneration(self.damage)
        tops = [] if self.opened is None else [entry.name.partition("/")[0] for entry in self.opened.manifest.entries]
        if missing := set(names).difference(tops):
            raise ValueError(f"the newest generation has no {min(missing)!r} that could be kept")
        return [index for index, top in enumerate(tops) if top in names]


def newest_of(source: LocalSource, verify: Callable[[int], object]) -> GenerationBefore:
    """Returns what the next generation can build on; `verify` raises DamagedGeneration."""
    reader, numbers = GenerationReader(source), source.numbers()
    if not numbers:
        return GenerationBefore(reader)
    opened = None
    try:
        opened = reader.generation(numbers[-1])
        chain_bytes = sum(_data_bytes(source, reader, n) for n in (numbers[-1], *opened.manifest.needs))
        verify(numbers[-1])
    except DamagedGeneration as error:
        return GenerationBefore(reader, opened, f"the generation before is damaged: {error.what}")
    return GenerationBefore(reader, opened, chain_bytes=chain_bytes)


@dataclass(frozen=True)
class GenerationDraft:
    """A state and what is kept, compared."""

    state: FoundState
    entries: tuple[SavedEntry, ...]
    """The entries of the state, and after them those that are kept."""
    first_kept: int
    """The first block of the latter."""
    layout: BlockLayout
    difference: Difference
    before: GenerationBefore

    def wanted(self, kind: GenerationKind) -> Mask:
        """Tells which blocks have their bytes in a generation of this kind."""
        return ~self.difference.zeros if kind is GenerationKind.FULL else self.difference.changed

    def alike(self, kind: GenerationKind) -> Indices:
        """Returns for each of them the first one of the same content; other blocks stand for themselves."""
        return first_alike(self.difference.hashes, self.wanted(kind))

    def stored(self, kind: GenerationKind) -> Indices:
        """Returns the blocks that a generation of this kind stores, each content once."""
        first = self.alike(kind) == np.arange(self.layout.count)
        return np.flatnonzero(self.wanted(kind) & first)

    def stored_bytes(self, kind: GenerationKind) -> int:
        """Returns the bytes of the blocks that a generation of this kind stores."""
        return int(self.layout.lengths[self.stored(kind)].sum())

    def choose(self, policy: GenerationPolicy) -> KindChoice:
        """Chooses the kind."""
        state_bytes = self.stored_bytes(GenerationKind.FULL)
        is_usable = self.before.opened is not None and not self.before.damage
        changed_bytes = self.stored_bytes(GenerationKind.DELTA) if is_usable else None
        measured = Measurement(
            state_bytes, changed_bytes, len(self.before.chain), self.before.chain_bytes, self.before.damage
        )
        return choose(measured, policy)

    def manifest(
        self,
        identity: GenerationId,
        choice: KindChoice,
        table: bytes,
        data_bytes: int,
        after_ns: int,
    ) -> GenerationManifest:
        """Returns the manifest of what was written; its time is later than that of the generation before."""
        chain = () if choice.kind is GenerationKind.FULL else self.before.chain
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
            self.entries,
            data_bytes,
            checksum(table),
        )


def draft_of(
    state: FoundState, kept: Collection[str], before: GenerationBefore, block_bytes: int, terms: CommitTerms
) -> GenerationDraft:
    """Reads a state and compares it. Raises as `GenerationBefore.kept` does, and a ValueError if the state has what is
    kept."""
    chosen = before.kept(kept)
    if twice := set(kept).intersection(entry.name for entry in state.entries):
        raise ValueError(f"{min(twice)!r} cannot be both saved and kept")
    entries, rows = state.entries, []
    if before.opened is not None and chosen:
        block_bytes = before.opened.layout.block_bytes
        entries += tuple(before.opened.manifest.entries[index] for index in chosen)
        rows = [before.opened.table["hash"][slice(*before.opened.layout.starts[i : i + 2])] for i in chosen]
    layout = layout_of(entries, block_bytes)
    total_bytes = sum(entry.size_bytes for entry in state.entries)
    read = state.hashed(layout, CommitMeter(terms, CommitPhase.READING, total_bytes))
    hashes = np.concatenate([read, *rows])
    return GenerationDraft(state, entries, len(read), layout, compare(hashes, layout, before.table), before)


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
