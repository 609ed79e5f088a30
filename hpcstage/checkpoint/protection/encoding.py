"""Encodes a generation of a group of stores that one process can reach: virtual nodes, and the check of the form.

Owns the order in which it reaches the disks: all data are there before, parities next, the record when all parities are
there, on one node after the other. A generation is encoded once: whoever finds a record that any node has of it spreads
that one, so that parities which a record names are never written again. Stripes go as a pipeline, duty by duty, each
with its own block and what came from the neighbour, as they do between nodes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hpcstage.checkpoint.coding.coder import Coder
from hpcstage.checkpoint.coding.erasurecode import ErasureCode
from hpcstage.checkpoint.coding.kernels import best_kernel
from hpcstage.checkpoint.coding.routes import pipeline
from hpcstage.checkpoint.coding.stages import carried_out, encoding_work
from hpcstage.checkpoint.coding.stripes import CodedBlock, Striping
from hpcstage.checkpoint.generations.files import OWN_PARTS, Files, GenerationId
from hpcstage.checkpoint.generations.layout import BLOCK_BYTES
from hpcstage.checkpoint.generations.reading import GenerationReader, LocalSource
from hpcstage.checkpoint.protection.groups import CodeSize
from hpcstage.checkpoint.protection.members import MemberChecksums, MemberWriter, read_data, read_record
from hpcstage.checkpoint.protection.record import CodedMember, CodingRecord
from hpcstage.errors import HpcstageError


class NotTogether(HpcstageError):
    """The nodes of a group do not have the same generation."""


@dataclass(frozen=True)
class GroupStore:
    """The store of one node of a group."""

    name: str
    directory: Path


@dataclass(frozen=True)
class StoreGroup:
    """Stores whose nodes protect each other."""

    stores: tuple[GroupStore, ...]
    size: CodeSize
    block_bytes: int = BLOCK_BYTES
    files: Files = field(default_factory=Files)

    def encode(self, number: int) -> CodingRecord:
        """Makes the parities of a generation that all nodes have, and its record; returns the record.

        Raises NotTogether, also where a record of this generation is that of another group, DamagedGeneration if a
        manifest is damaged, and OSError.
        """
        with contextlib.ExitStack() as opened:
            sources = [opened.enter_context(LocalSource(store.directory, self.files)) for store in self.stores]
            identity = self._identity(sources, number)
            found = [read_record(source, number) for source in sources]
            record = self._common([one for one in found if one is not None and one.generation == identity])
            if record is None:
                record = self._encoded(sources, identity)
        content = record.to_bytes()
        for store, kept in zip(self.stores, found, strict=True):
            if kept != record:
                MemberWriter(self.files, store.directory, number).record(content)
        return record

    def _common(self, found: Sequence[CodingRecord]) -> CodingRecord | None:
        """Returns the record of the group among those of its nodes; None where there is none yet. Raises NotTogether
        where there are those of another group only."""
        ours = [one for one in found if self._is_of(one)]
        if found and not ours:
            names = ", ".join(member.name for member in found[0].members)
            what = f"generation {found[0].generation.number} was encoded for another group, of {names}"
            raise NotTogether(what, "save it anew")
        return ours[0] if ours else None

    def _is_of(self, record: CodingRecord) -> bool:
        """Tells whether a record is of these nodes in their order, with this code and these blocks."""
        return record.is_of([one.name for one in self.stores], self.size.k, self.size.m, self.block_bytes)

    def _identity(self, sources: Sequence[LocalSource], number: int) -> GenerationId:
        ids = [GenerationReader(source).manifest(number).id for source in sources]
        if len(set(ids)) != 1:
            names = ", ".join(store.name for store in self.stores)
            raise NotTogether(f"generation {number} of {names} comes from several attempts", "save it anew")
        return ids[0]

    def _encoded(self, sources: Sequence[LocalSource], identity: GenerationId) -> CodingRecord:
        """Writes all parities; returns the record, which is not written."""
        sizes = [tuple(source.size_bytes(identity.number, part) for part in OWN_PARTS) for source in sources]
        totals = [sum(one) for one in sizes]
        striping = Striping(len(sources), self.size.k, self.size.m, self.block_bytes)
        code = ErasureCode.cauchy(self.size.k, self.size.m)
        sums = [MemberChecksums(striping, totals, place) for place in range(len(sources))]

        def own(block: CodedBlock) -> bytearray:
            made = bytearray(block.size_bytes)
            place = block.number * self.block_bytes
            if read_data(sources[block.node], identity.number, sizes[block.node], memoryview(made), place) < len(made):
                raise NotTogether(f"generation {identity.number} of {self.stores[block.node].name} became shorter")
            sums[block.node].note(block, block.number, made)
            return made

        coder = Coder(code, best_kernel())
        with contextlib.ExitStack() as opened:
            writers = [MemberWriter(self.files, store.directory, identity.number) for store in self.stores]
            parities = [opened.enter_context(writer.parities()) for writer in writers]
            for stripe in striping.stripes(totals):
                route = pipeline(stripe.data, stripe.parities)
                for block, content in carried_out(route, encoding_work(coder, stripe), own).items():
                    sums[block.node].note(block, block.number, content)
                    self.files.write(parities[block.node], content, block.number * self.block_bytes)
        members = (
            CodedMember(store.name, size, sums[node].to_bytes())
            for node, (store, size) in enumerate(zip(self.stores, sizes, strict=True))
        )
        return CodingRecord(identity, self.block_bytes, code, tuple(members))
