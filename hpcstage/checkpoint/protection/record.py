"""The record of the erasure code of one generation: its matrix, which node holds what, and the checksum of every block.

It is written when all data and parities are on the disks, on all nodes of the group, and never changes. Owns its binary
form, which has a checksum of its own. The bytes that a node gives to the code are the files of its generation one
behind the other, in the order of `OWN_PARTS`. Pure.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from hpcstage.checkpoint.coding.checksums import CHECKSUM_BYTES, checksum
from hpcstage.checkpoint.coding.erasurecode import ErasureCode, NoErasureCode
from hpcstage.checkpoint.coding.stripes import CodedBlock, Striping
from hpcstage.checkpoint.generations.files import OWN_PARTS, GenerationId, GenerationPart
from hpcstage.checkpoint.generations.manifest import DamagedGeneration

FORMAT = 1


@dataclass(frozen=True)
class CodedMember:
    """One node of a group."""

    name: str
    sizes_bytes: tuple[int, ...]
    """The sizes of the files that it gives to the code."""
    checksums: bytes
    """The checksums of its data blocks, then those of the parities that it holds."""

    @property
    def size_bytes(self) -> int:
        """Returns the bytes that it gives to the code."""
        return sum(self.sizes_bytes)

    def size_of(self, part: GenerationPart) -> int:
        """Returns the size of one of these files."""
        return self.sizes_bytes[OWN_PARTS.index(part)]

    def start_of(self, part: GenerationPart) -> int:
        """Returns where the file begins among the bytes."""
        return sum(self.sizes_bytes[: OWN_PARTS.index(part)])


@dataclass(frozen=True)
class CodingRecord:
    """One generation of a group."""

    generation: GenerationId
    block_bytes: int
    code: ErasureCode
    members: tuple[CodedMember, ...]
    """The nodes in the order of the circle of stripes."""

    @cached_property
    def striping(self) -> Striping:
        """Returns how the blocks are put together."""
        return Striping(len(self.members), self.code.k, self.code.m, self.block_bytes)

    @cached_property
    def sizes_bytes(self) -> list[int]:
        """Returns how many bytes each member gives."""
        return [member.size_bytes for member in self.members]

    def is_of(self, names: Sequence[str], k: int, m: int, block_bytes: int) -> bool:
        """Tells whether the record is of these nodes in their order, with this code and these blocks."""
        found = [member.name for member in self.members], self.code.k, self.code.m, self.block_bytes
        return found == (list(names), k, m, block_bytes)

    def checksum(self, block: CodedBlock) -> bytes:
        """Returns the checksum of a block."""
        member = self.members[block.node]
        before = 0 if block.index < self.code.k else -(-member.size_bytes // self.block_bytes)
        start = (before + block.number) * CHECKSUM_BYTES
        return member.checksums[start : start + CHECKSUM_BYTES]

    def member(self, name: str) -> int | None:
        """Returns the place of a node in the group; None if it has none."""
        return next((place for place, member in enumerate(self.members) if member.name == name), None)

    def to_bytes(self) -> bytes:
        """Returns the record as it is written."""
        head = {
            "format": FORMAT,
            "number": self.generation.number,
            "attempt": self.generation.attempt,
            "block_bytes": self.block_bytes,
            "rows": self.code.rows,
            "members": [[one.name, one.sizes_bytes, len(one.checksums)] for one in self.members],
        }
        text = json.dumps(head, sort_keys=True, separators=(",", ":")).encode()
        body = b"\n".join((text, b"".join(one.checksums for one in self.members)))
        return checksum(body) + body

    @classmethod
    def from_bytes(cls, content: bytes) -> CodingRecord:
        """Reads a record. Raises DamagedGeneration unless every byte is as it was written."""
        body = content[CHECKSUM_BYTES:]
        if checksum(body) != content[:CHECKSUM_BYTES]:
            raise DamagedGeneration("its coding record differs from its checksum")
        text, _, checksums = body.partition(b"\n")
        try:
            head = json.loads(text)
            if head["format"] != FORMAT:
                raise DamagedGeneration("its coding record has a form that this version does not know")
            code, generation = ErasureCode.from_json(head["rows"]), GenerationId(head["number"], head["attempt"])
            made = cls(generation, head["block_bytes"], code, tuple(_members(head["members"], checksums)))
            _check_counts(made)
        except (ValueError, KeyError, TypeError, RecursionError, NoErasureCode) as error:
            raise DamagedGeneration("its coding record is none of a group") from error
        return made


def _members(listed: Sequence[Any], checksums: bytes) -> list[CodedMember]:
    made, start = [], 0
    for name, sizes, length in listed:
        if not (isinstance(name, str) and len(sizes) == len(OWN_PARTS) and min(*map(int, sizes), length) >= 0):
            raise ValueError("no member of a group")
        made.append(CodedMember(name, tuple(sizes), checksums[start : start + length]))
        start += length
    if start != len(checksums):
        raise ValueError("there are checksums of no member")
    return made


def _check_counts(record: CodingRecord) -> None:
    """Raises a ValueError unless there is a checksum for every block."""
    parities = record.striping.parity_places(record.sizes_bytes)
    for member, count in zip(record.members, parities, strict=True):
        blocks = -(-member.size_bytes // record.block_bytes) + count
        if len(member.checksums) != blocks * CHECKSUM_BYTES:
            raise ValueError(f"{member.name} has another number of checksums than of blocks")
