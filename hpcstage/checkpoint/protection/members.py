"""The generations of one node of a group as the erasure code takes them: blocks of data and of parities.

Reads from any source, so the node may be another one. Writes parities and the coding record beside the generation that
they belong to, each under its final name as soon as it is on the disk.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from hpcstage.checkpoint.coding.blocks import Block
from hpcstage.checkpoint.coding.checksums import CHECKSUM_BYTES, checksum
from hpcstage.checkpoint.coding.stripes import CodedBlock, Striping
from hpcstage.checkpoint.generations.files import OWN_PARTS, Files, GenerationPart, generation_path
from hpcstage.checkpoint.generations.manifest import DamagedGeneration
from hpcstage.checkpoint.generations.reading import BlockSource, read_whole
from hpcstage.checkpoint.protection.record import CodingRecord


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
        self._made = bytearray((self._data + striping.parity_places(sizes_bytes)[place]) * CHECKSUM_BYTES)

    def note(self, block: CodedBlock, number: int, content: Block) -> None:
        """Keeps the checksum of the block with this number that stands where `block` does in its stripe."""
        start = (number + (0 if block.index < self._k else self._data)) * CHECKSUM_BYTES
        self._made[start : start + CHECKSUM_BYTES] = checksum(content)

    def to_bytes(self) -> bytes:
        """Returns all of them."""
        return bytes(self._made)


class MemberWriter:
    """Writes what the erasure code adds to one generation of a node."""

    def __init__(self, files: Files, store: Path, number: int) -> None:
        self._files = files
        self._directory = generation_path(store, number)

    @contextlib.contextmanager
    def parities(self) -> Iterator[int]:
        """Gives a descriptor to write parities to, which have their name at the end."""
        temporary = self._directory / f".{GenerationPart.PARITY.value}"
        self._remove(temporary)
        with self._files.created(temporary) as fd:
            yield fd
            self._files.call(os.fsync, fd)
        self._files.call(os.rename, temporary, self._directory / GenerationPart.PARITY)
        self._files.sync_directory(self._directory)

    def discard(self) -> None:
        """Removes parities that were given up."""
        self._remove(self._directory / f".{GenerationPart.PARITY.value}")

    def record(self, content: bytes) -> None:
        """Keeps the coding record."""
        self._remove(self._directory / f".{GenerationPart.CODING.value}")
        self._files.publish(self._directory / GenerationPart.CODING, content)

    def _remove(self, left: Path) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._files.call(os.unlink, left)
