"""Encodes a generation of a group of stores that one process can reach, for benchmarks and tests.

Each stripe goes as between nodes: duty by duty, each with its own block and what came from the neighbour.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hpcstage.checkpoint.coding.erasurecode import ErasureCode
from hpcstage.checkpoint.coding.kernels import best_kernel
from hpcstage.checkpoint.coding.stripes import CodedBlock, Stripe, Striping, summed
from hpcstage.checkpoint.generations.files import OWN_PARTS, Files, GenerationId, generation_path
from hpcstage.checkpoint.generations.layout import BLOCK_BYTES
from hpcstage.checkpoint.generations.reading import GenerationReader, LocalSource
from hpcstage.checkpoint.protection.groups import CodeSize
from hpcstage.checkpoint.protection.record import (
    CodedMember,
    CodingRecord,
    MemberChecksums,
    made_parities,
    read_data,
    write_record,
)


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
        """Makes the parities of a generation that all nodes have, and its record; returns the record."""
        with contextlib.ExitStack() as opened:
            sources = [opened.enter_context(LocalSource(store.directory, self.files)) for store in self.stores]
            (identity,) = {GenerationReader(source).manifest(number).id for source in sources}
            record = self._encoded(sources, identity)
        for store in self.stores:
            write_record(self.files, generation_path(store.directory, number), record.to_bytes())
        return record

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
            read_data(sources[block.node], identity.number, sizes[block.node], memoryview(made), place)
            sums[block.node].note(block, made)
            return made

        with contextlib.ExitStack() as opened:
            generations = [generation_path(store.directory, identity.number) for store in self.stores]
            parities = [opened.enter_context(made_parities(self.files, generation)) for generation in generations]
            for stripe in striping.stripes(totals):
                for block, content in encoded(code, stripe, own).items():
                    sums[block.node].note(block, content)
                    self.files.write(parities[block.node], content, block.number * self.block_bytes)
        members = (
            CodedMember(store.name, size, sums[node].to_bytes())
            for node, (store, size) in enumerate(zip(self.stores, sizes, strict=True))
        )
        return CodingRecord(identity, self.block_bytes, code, tuple(members))


def encoded(code: ErasureCode, stripe: Stripe, own: Callable[[CodedBlock], bytearray]) -> dict[CodedBlock, bytearray]:
    """Carries out all duties of a stripe; returns the parities."""
    messages: dict[CodedBlock, bytearray] = {}
    for duty in stripe.duties():
        assert len(messages.get(duty.block, b"")) == duty.received_bytes
        if not duty.keeps:
            before = messages.pop(duty.block, None)
            sums = summed(best_kernel(), code.column(duty.block.index), own(duty.block), before)
            for place, receiver in enumerate(duty.receivers):
                messages[receiver] = sums[place * duty.sent_bytes : (place + 1) * duty.sent_bytes]
            assert len(sums) == duty.sent_bytes * len(duty.receivers)
    return messages
