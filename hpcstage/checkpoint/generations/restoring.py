"""Restores entries of a generation, bit for bit; a damaged one is refused by name.

Each entry directly below a directory is one checkpoint. All is verified and on the disk when a restore has ended; it
goes into a directory that nobody looks into before.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Container
from pathlib import Path

from hpcstage.checkpoint.generations.files import Files
from hpcstage.checkpoint.generations.manifest import EntryType, GenerationManifest, SavedEntry
from hpcstage.checkpoint.generations.reading import BlockSource, GenerationReader, OpenGeneration
from hpcstage.upload.copying import sync_directory


def restore(
    source: BlockSource,
    number: int,
    directory: Path,
    names: Collection[str] | None = None,
    pace: Callable[[int], object] = lambda _: None,
) -> tuple[str, ...]:
    """Makes the entries of a generation in a directory, which is made if it is missing, and in which nothing has their
    names; with `names` those alone. Returns their names. Raises DamagedGeneration and OSError, after which some of them
    may be there in part."""
    directory.mkdir(0o700, exist_ok=True)
    reader = GenerationReader(source)
    opened = reader.generation(number)
    chosen = times_of(opened.manifest) if names is None else names
    _restore_entries(reader, opened, directory, chosen, pace)
    sync_directory(directory)
    return tuple(chosen)


def times_of(manifest: GenerationManifest) -> dict[str, int]:
    """Returns the checkpoints of a generation, the entries directly below its directory: by name the latest time at
    which one, or anything below it, was modified."""
    times: dict[str, int] = {}
    for entry in manifest.entries:
        top = entry.name.partition("/")[0]
        times[top] = max(times.get(top, entry.mtime_ns), entry.mtime_ns)
    return times


def verify(source: BlockSource, number: int) -> None:
    """Reads every block of a generation. Raises DamagedGeneration if one cannot be restored."""
    reader = GenerationReader(source)
    opened = reader.generation(number)
    for file in range(len(opened.manifest.entries)):
        for _ in reader.pieces(opened, file):
            pass


def _restore_entries(
    reader: GenerationReader,
    opened: OpenGeneration,
    directory: Path,
    names: Container[str],
    pace: Callable[[int], object],
) -> None:
    """Makes entries in a directory and has all of them on the disk; what is zero of a file stays a hole."""
    files = Files()
    entries = [(i, one) for i, one in enumerate(opened.manifest.entries) if one.name.partition("/")[0] in names]
    for index, entry in entries:
        path = directory / entry.name
        if entry.type is EntryType.DIRECTORY:
            path.mkdir(0o700)
        elif entry.type is EntryType.LINK:
            path.symlink_to(entry.target)
            os.utime(path, ns=(entry.mtime_ns, entry.mtime_ns), follow_symlinks=False)
        else:
            with files.created(path) as fd:
                os.ftruncate(fd, entry.size_bytes)
                for offset, content in reader.pieces(opened, index):
                    pace(len(content))
                    files.write(fd, content, offset)
                _finish(fd, entry)
    for _, entry in reversed(entries):  # a directory's times and mode come after all below it
        if entry.type is EntryType.DIRECTORY:
            with files.opened(directory / entry.name) as fd:
                _finish(fd, entry)


def _finish(fd: int, entry: SavedEntry) -> None:
    """Gives a file or directory its mode and time and has it on the disk."""
    os.fchmod(fd, entry.mode)
    os.utime(fd, ns=(entry.mtime_ns, entry.mtime_ns))
    os.fsync(fd)
