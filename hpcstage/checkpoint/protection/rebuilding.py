"""Reads the generations of a node from what its group still has: its own blocks where they are intact, or rebuilt ones.

A block that cannot be read, or is not what its checksum says, is lost, whether a bit flipped or the node is gone. The
module gives a source of generations like a directory is, so that a restore works alike from both.
"""

from __future__ import annotations

import errno
from collections import Counter
from collections.abc import Mapping
from functools import lru_cache

from hpcstage.checkpoint.coding.erasurecode import NoErasureCode, TooMuchLost
from hpcstage.checkpoint.coding.kernels import best_kernel
from hpcstage.checkpoint.coding.stripes import CodedBlock, Stripe
from hpcstage.checkpoint.generations.files import GenerationPart
from hpcstage.checkpoint.generations.manifest import DamagedGeneration
from hpcstage.checkpoint.generations.reading import BlockSource
from hpcstage.checkpoint.protection.record import CodingRecord, checksum, read_intact, read_record


class NodeIsGone(FileNotFoundError):
    """A node is not there, and nobody can rebuild what it had."""


class GroupSource:
    """The generations of one node of a group. A generation that was not encoded is read from the node itself."""

    def __init__(self, name: str, sources: Mapping[str, BlockSource]) -> None:
        """Takes the sources of all nodes that can be reached, the node itself among them if it can."""
        self._name = name
        self._sources = sources
        self._records: dict[int, CodingRecord | None] = {}
        self._block = lru_cache(maxsize=4)(self._read_block)
        self.damaged: set[str] = set()
        """The nodes of which a block was asked for that is gone or damaged."""
        self.rebuilt_bytes = 0

    def size_bytes(self, number: int, part: GenerationPart) -> int:
        """Returns the size of a file of a generation."""
        record, place = self._coded(number)
        if record is None:
            return self._own().size_bytes(number, part)
        return record.members[place].size_of(part)

    def read_into(self, number: int, part: GenerationPart, view: memoryview, offset: int) -> int:
        """Fills the buffer from a place of a file of a generation; returns how much there was."""
        record, place = self._coded(number)
        if record is None:
            return self._own().read_into(number, part, view, offset)
        count = max(0, min(len(view), self.size_bytes(number, part) - offset))
        begin = offset + record.members[place].start_of(part)
        done = 0
        while done < count:
            block, within = divmod(begin + done, record.block_bytes)
            found = memoryview(self._block(number, block))[within : within + count - done]
            view[done : done + len(found)] = found
            done += len(found)
        return count

    def _own(self) -> BlockSource:
        try:
            return self._sources[self._name]
        except KeyError as error:
            raise NodeIsGone(errno.ENOENT, f"{self._name} is gone, and nobody has a record") from error

    def _coded(self, number: int) -> tuple[CodingRecord | None, int]:
        """Returns the record by which a generation can be rebuilt, and the node's place in it."""
        record = self._record(number)
        place = None if record is None else record.member(self._name)
        return (None, -1) if place is None else (record, place)

    def _record(self, number: int) -> CodingRecord | None:
        """Returns the record of a generation that names the node; the one that most nodes have, if they differ."""
        if number not in self._records:
            found = [read_record(source, number) for source in self._sources.values()]
            forms = Counter(one.to_bytes() for one in found if one is not None and one.member(self._name) is not None)
            most = max(forms, key=lambda form: (forms[form], form), default=None)
            self._records[number] = None if most is None else CodingRecord.from_bytes(most)
        return self._records[number]

    def _read_block(self, number: int, block: int) -> bytearray:
        """Returns a block of the node's data."""
        record, place = self._coded(number)
        assert record is not None
        striping = record.striping
        in_stripe, index = striping.place(place, block)
        stripe = striping.stripe(in_stripe, record.sizes_bytes)
        assert stripe is not None
        wanted = next(one for one in stripe.data if one.index == index)
        made = self._intact(record, wanted)
        return self._rebuilt(record, stripe, wanted) if made is None else made

    def _intact(self, record: CodingRecord, block: CodedBlock) -> bytearray | None:
        name = record.members[block.node].name
        source = self._sources.get(name)
        found = None if source is None else read_intact(source, record, block)
        if found is None:
            self.damaged.add(name)
        return found

    def _rebuilt(self, record: CodingRecord, stripe: Stripe, wanted: CodedBlock) -> bytearray:
        """Returns a block from the others of its stripe; parities are read as far as they are needed."""
        known: dict[int, bytearray] = {}
        for block in (*stripe.data, *stripe.parities):
            is_needed = block != wanted and len(known) < len(stripe.data)
            if is_needed and (content := self._intact(record, block)) is not None:
                known[block.index] = content
        lost = [block.index for block in stripe.data if block.index not in known]
        try:
            sources, rows = record.code.restoring(lost, known)
        except (TooMuchLost, NoErasureCode) as error:
            raise DamagedGeneration(self._refusal(record, stripe, known)) from error
        size, made = wanted.size_bytes, bytearray(wanted.size_bytes)
        parts = (known[index] for index in sources)
        whole = [part if len(part) == size else part[:size].ljust(size, b"\0") for part in parts]
        best_kernel().product((rows[lost.index(wanted.index)],), whole, (made,))
        if checksum(made) != record.checksum(wanted):
            where = f"{record.members[wanted.node].name}, block {wanted.number}"
            raise DamagedGeneration(f"a rebuilt block of {where} differs from its checksum")
        self.rebuilt_bytes += size
        return made

    @staticmethod
    def _refusal(record: CodingRecord, stripe: Stripe, known: Mapping[int, object]) -> str:
        gone = {block.node for block in (*stripe.data, *stripe.parities) if block.index not in known}
        names = ", ".join(record.members[node].name for node in sorted(gone))
        return f"parts on {len(gone)} nodes are gone or damaged ({names}), and {record.code.m} can be rebuilt"
