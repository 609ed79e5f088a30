"""What the erasure code adds to a generation on each node of a group: parities, and the record of how they were made.

The record has the matrix, which node holds what, and the checksum of every block: xxh3-128, faster than memory is read.
It is written when all data and parities are on the disks, on all nodes of the group, and never changes. The bytes that
a node gives to the code are the files of its generation one behind the other, in the order of `OWN_PARTS`. They are
read from any source, so the node may be another one.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import xxhash

from hpcstage.checkpoint.coding.erasurecode import ErasureCode, NoErasureCode
from hpcstage.checkpoint.coding.stripes import CodedBlock, Striping
from hpcstage.checkpoint.generations.files import OWN_PARTS, Files, GenerationId, GenerationPart
from hpcstage.checkpoint.generations.manifest import DamagedGeneration
from hpcstage.checkpoint.generations.reading import BlockSource, read_whole

FORMAT = 1
CHECKSUM_BYTES = 16


def checksum(block: bytes | bytearray | memoryview) -> bytes:
    """Returns a block's checksum."""
    return xxhash.xxh3_128_digest(block)


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
            parities = made.striping.parity_places(made.sizes_bytes)
            blocks = [-(-size // made.block_bytes) + parities for size in made.sizes_bytes]
            if [len(one.checksums) for one in made.members] != [count * CHECKSUM_BYTES for count in blocks]:
                raise ValueError("there is not one checksum for each block")
        except (ValueError, KeyError, TypeError, RecursionError, NoErasureCode) as error:
            raise DamagedGeneration("its coding record is none of a group") from error
        return made


def _members(listed: Sequence[Any], checksums: bytes) -> Iterator[CodedMember]:
    start = 0
    for name, sizes, length in listed:
        if not (isinstance(name, str) and len(sizes) == len(OWN_PARTS) and min(*map(int, sizes), length) >= 0):
            raise ValueError("no member of a group")
        yield CodedMember(name, tuple(sizes), checksums[start : start + length])
        start += length
    if start != len(checksums):
        raise ValueError("there are checksums of no member")


def read_data(source: BlockSource, number: int, sizes_bytes: tuple[int, ...], view: memoryview, offset: int) -> int:
    """Fills the buffer from a place among the bytes that a node gives to the code; returns how much there was."""
    done, start = 0, 0
    for part, size in zip(OWN_PARTS, sizes_bytes, strict=True):
        begin, end = max(offset, start), min(offset + len(view), start + size)
        if begin < end:
            count = source.read_into(number, part, view[done : done + end - begin], begin - start)
            done += count
            if count < end - begin:
                break
        start += size
    return done


def read_intact(source: BlockSource, record: CodingRecord, block: CodedBlock) -> bytearray | None:
    """Returns a block of a node; None if it cannot be read, or is not what it was."""
    made = bytearray(block.size_bytes)
    number, start = record.generation.number, block.number * record.block_bytes
    try:
        if block.index < record.code.k:
            read_data(source, number, record.members[block.node].sizes_bytes, memoryview(made), start)
        else:
            source.read_into(number, GenerationPart.PARITY, memoryview(made), start)
    except OSError:
        return None
    return made if checksum(made) == record.checksum(block) else None


def read_record(source: BlockSource, number: int) -> CodingRecord | None:
    """Returns the record that a node has of a generation; None if it has none, or a damaged one."""
    try:
        record = CodingRecord.from_bytes(read_whole(source, number, GenerationPart.CODING))
    except (OSError, DamagedGeneration):
        return None
    return record if record.generation.number == number else None


class MemberChecksums:
    """The checksums of what a node gives to the code and of the parities that it holds, as a record has them."""

    def __init__(self, striping: Striping, sizes_bytes: Sequence[int], place: int) -> None:
        self._data = -(-sizes_bytes[place] // striping.block_bytes)
        self._k = striping.k
        self._made = bytearray((self._data + striping.parity_places(sizes_bytes)) * CHECKSUM_BYTES)

    def note(self, block: CodedBlock, content: bytes | bytearray | memoryview) -> None:
        """Keeps the checksum of a block."""
        start = (block.number + (0 if block.index < self._k else self._data)) * CHECKSUM_BYTES
        self._made[start : start + CHECKSUM_BYTES] = checksum(content)

    def to_bytes(self) -> bytes:
        """Returns all of them."""
        return bytes(self._made)


@contextlib.contextmanager
def made_parities(files: Files, generation: Path) -> Iterator[int]:
    """Gives a descriptor to write the parities of a node to, beside a generation; they get their name at the end, and
    are removed after an error."""
    temporary = generation / f".{GenerationPart.PARITY.value}"
    _remove(files, temporary)
    try:
        with files.created(temporary) as fd:
            yield fd
            files.call(os.fsync, fd)
        files.call(os.rename, temporary, generation / GenerationPart.PARITY)
    except Exception:
        _remove(files, temporary)
        raise
    files.sync_directory(generation)


def write_record(files: Files, generation: Path, content: bytes) -> None:
    """Keeps the record beside the generation."""
    _remove(files, generation / f".{GenerationPart.CODING.value}")
    files.publish(generation / GenerationPart.CODING, content)


def _remove(files: Files, left: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        files.call(os.unlink, left)
