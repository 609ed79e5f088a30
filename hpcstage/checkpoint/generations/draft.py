"""A generation before it is written: the state compared with the generation before, and the choice of a kind.

Reads the state and the generation before; writes nothing.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from hpcstage.checkpoint.generations.choice import GenerationPolicy, KindChoice, Measurement, choose
from hpcstage.checkpoint.generations.files import GenerationId, GenerationPart
from hpcstage.checkpoint.generations.layout import BlockLayout
from hpcstage.checkpoint.generations.manifest import (
    DamagedGeneration,
    GenerationKind,
    GenerationManifest,
    checksum,
    layout_of,
)
from hpcstage.checkpoint.generations.reading import GenerationReader, LocalSource, OpenGeneration
from hpcstage.checkpoint.generations.state import FoundState
from hpcstage.checkpoint.generations.table import Difference, Indices, Mask, Table, compare, first_alike
from hpcstage.checkpoint.generations.terms import CommitMeter, CommitPhase, CommitTerms


@dataclass(frozen=True)
class GenerationBefore:
    """The newest generation, as far as the next one can build on it."""

    opened: OpenGeneration | None = None
    hindrance: str = ""
    """Why it cannot be built on."""
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


def newest_of(source: LocalSource) -> GenerationBefore:
    """Returns what the next generation can build on."""
    reader, numbers = GenerationReader(source), source.numbers()
    if not numbers:
        return GenerationBefore()
    try:
        newest = reader.generation(numbers[-1])
        chain_bytes = sum(_data_bytes(source, reader, n) for n in (numbers[-1], *newest.manifest.needs))
    except DamagedGeneration as error:
        return GenerationBefore(hindrance=f"the generation before is damaged: {error.what}")
    return GenerationBefore(newest, chain_bytes=chain_bytes)


@dataclass(frozen=True)
class GenerationDraft:
    """A state, compared."""

    state: FoundState
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
        changed_bytes = None if self.before.opened is None else self.stored_bytes(GenerationKind.DELTA)
        measured = Measurement(
            state_bytes, changed_bytes, len(self.before.chain), self.before.chain_bytes, self.before.hindrance
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
            self.state.entries,
            data_bytes,
            checksum(table),
        )


def draft_of(state: FoundState, before: GenerationBefore, block_bytes: int, terms: CommitTerms) -> GenerationDraft:
    """Reads a state and compares it."""
    layout = layout_of(state.entries, block_bytes)
    total_bytes = sum(entry.size_bytes for entry in state.entries)
    hashes = state.hashed(layout, CommitMeter(terms, CommitPhase.READING, total_bytes))
    return GenerationDraft(state, layout, compare(hashes, layout, before.table), before)


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
