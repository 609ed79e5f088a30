"""A state of tensors by name, whose bytes are in memory: compared name by name, whatever order or file they had.

Owns what stands for such a state in a generation, and its way back. The bytes belong to the caller, who leaves them as
they are while a commit runs; a change that is noticed ends it. No library of tensors is needed: a type is a word.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import xxhash

from hpcstage.checkpoint.generations.files import PIECE_BYTES, Files
from hpcstage.checkpoint.generations.layout import BlockLayout
from hpcstage.checkpoint.generations.manifest import DamagedGeneration, EntryType, SavedEntry
from hpcstage.checkpoint.generations.reading import BlockSource, GenerationReader
from hpcstage.checkpoint.generations.state import StateChanged
from hpcstage.checkpoint.generations.table import Hashes, rows
from hpcstage.checkpoint.generations.terms import CommitMeter


@dataclass(frozen=True)
class TensorBytes:
    """One tensor: its numbers one behind the other, in the order of its rows."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    content: memoryview


@dataclass(frozen=True)
class TensorState:
    """Tensors of different names."""

    tensors: Sequence[TensorBytes]

    def scan(self, files: Files) -> FoundTensors:
        """Returns the state as a commit takes it. Raises a ValueError for a name that is given twice."""
        held = {tensor.name: tensor.content.cast("B") for tensor in self.tensors}
        if len(held) < len(self.tensors):
            raise ValueError("a name of a tensor is given twice")
        entries = tuple(
            SavedEntry(one.name, EntryType.TENSOR, 0, 0, len(held[one.name]), dtype=one.dtype, shape=one.shape)
            for one in self.tensors
        )
        return FoundTensors(files, entries, tuple(held.values()))


@dataclass(frozen=True)
class FoundTensors:
    """The tensors of a state at a moment."""

    files: Files
    entries: tuple[SavedEntry, ...]
    held: tuple[memoryview, ...]

    @property
    def left_out(self) -> tuple[str, ...]:
        """Returns what is not saved: nothing."""
        return ()

    def hashed(self, layout: BlockLayout, meter: CommitMeter) -> Hashes:
        """Returns the hash of every block."""
        digests, lengths, block = bytearray(), layout.lengths.tolist(), 0
        for content in self.held:
            start = heard = 0
            while start < len(content):
                end = start + lengths[block]
                digests += xxhash.xxh3_128_digest(content[start:end])
                start, block = end, block + 1
                if start - heard >= PIECE_BYTES or start == len(content):
                    meter.add(start - heard)
                    heard = start
        return rows(digests)

    @contextlib.contextmanager
    def opened(self, index: int) -> Iterator[TensorContent]:
        """Gives the bytes of a tensor."""
        yield TensorContent(self.files, self.held[index])

    def changed(self, index: int) -> StateChanged:
        """Returns the error for a tensor that was changed."""
        return StateChanged(f"tensor {self.entries[index].name!r}")

    def check_unchanged(self) -> None:
        """Does nothing: each block was compared with its hash when it was written."""


@dataclass(frozen=True)
class TensorContent:
    """The bytes of a tensor, to be read and written to a file."""

    files: Files
    content: memoryview

    def read_into(self, view: memoryview, offset: int) -> int:
        """Fills the buffer from a place of the content; returns how much there was."""
        found = self.content[offset : offset + len(view)]
        view[: len(found)] = found
        return len(found)

    def copy(self, offset: int, count: int, target: int, to: int) -> int:
        """Writes a part of the content to a place of a file; returns how much there was."""
        found = self.content[offset : offset + count]
        self.files.write(target, found, to)
        return len(found)


def restored_tensors(source: BlockSource, number: int) -> Iterator[TensorBytes]:
    """Yields the tensors of a generation, each verified. Raises DamagedGeneration."""
    reader = GenerationReader(source)
    opened = reader.generation(number)
    if opened.manifest.entries and not opened.manifest.holds_tensors:
        raise DamagedGeneration(f"generation {number} holds files, no tensors")
    for index, entry in enumerate(opened.manifest.entries):
        content = memoryview(bytearray(entry.size_bytes))
        for offset, data in reader.pieces(opened, index):
            content[offset : offset + len(data)] = data
        yield TensorBytes(entry.name, entry.dtype, entry.shape, content)
