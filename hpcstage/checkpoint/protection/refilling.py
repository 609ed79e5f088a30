"""Gives a node in the place of a lost one its generations back: their files, and the parities that it holds for others.

Without that, the next loss would count together with the one before. The files are made as a commit makes them: the
manifest has its name last, and what was not finished is removed when the store is opened.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from hpcstage.checkpoint.generations.files import PIECE_BYTES, Files, GenerationPart, generation_path
from hpcstage.checkpoint.generations.manifest import DamagedGeneration
from hpcstage.checkpoint.generations.reading import BlockSource, GenerationReader, read_whole
from hpcstage.checkpoint.generations.restoring import verify

_BEFORE_THE_MANIFEST = (GenerationPart.DATA, GenerationPart.BLOCKS, GenerationPart.PARITY, GenerationPart.CODING)


def refill(source: BlockSource, numbers: list[int], store: Path, files: Files | None = None) -> list[int]:
    """Makes the generations that the store of a node lacks from what its group has; returns their numbers.

    Those that a generation needs are made with it. One that cannot be rebuilt is left out, and so are those that need
    it. The caller holds the store, or no process does.
    """
    reader, made = GenerationReader(source), list[int]()
    calls = files or Files()
    for number in sorted(numbers):
        with contextlib.suppress(DamagedGeneration):
            verify(source, number)
            for each in (*reader.manifest(number).needs, number):
                if not os.path.lexists(generation_path(store, each)):
                    _refill_one(source, each, generation_path(store, each), calls)
                    made.append(each)
    return made


def _refill_one(source: BlockSource, number: int, directory: Path, files: Files) -> None:
    files.call(os.mkdir, directory, 0o700)
    try:
        files.sync_directory(directory.parent)
        for part in _BEFORE_THE_MANIFEST:
            with files.created(directory / part) as fd:
                for offset, piece in _pieces(source, number, part):
                    files.write(fd, piece, offset)
                files.call(os.fsync, fd)
        files.publish(directory / GenerationPart.MANIFEST, read_whole(source, number, GenerationPart.MANIFEST))
    except BaseException:
        with contextlib.suppress(OSError):
            files.remove_generation(directory)
        raise


def _pieces(source: BlockSource, number: int, part: GenerationPart) -> Iterator[tuple[int, memoryview]]:
    """Yields a file of a generation from its beginning to its end."""
    size_bytes = source.size_bytes(number, part)
    buffer = memoryview(bytearray(min(size_bytes, PIECE_BYTES)))
    for offset in range(0, size_bytes, PIECE_BYTES):
        view = buffer[: size_bytes - offset]
        if source.read_into(number, part, view, offset) < len(view):
            raise DamagedGeneration(f"generation {number} is shorter than its coding record says")
        yield offset, view
