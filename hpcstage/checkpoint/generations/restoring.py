"""Restores a generation to a directory, bit for bit, or the newest one that can be: damaged ones are refused by name.

Nothing of a generation that turns out to be damaged ever stands in the target: it is restored beside it, and renamed
when the last block was verified and all is on the disk.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpcstage.checkpoint.generations.manifest import DamagedGeneration, EntryType, GenerationManifest, SavedEntry
from hpcstage.checkpoint.generations.reading import BlockSource, GenerationReader, OpenGeneration
from hpcstage.errors import HpcstageError


@dataclass(frozen=True)
class RefusedGeneration:
    """A generation that was not restored, and why."""

    number: int
    reason: str

    def line(self) -> str:
        """Says it on one line."""
        return f"generation {self.number} cannot be restored: {self.reason}"


@dataclass(frozen=True)
class RestoredState:
    """The generation that was restored."""

    number: int
    entries: int
    state_bytes: int
    refused: tuple[RefusedGeneration, ...]
    """The newer ones, newest first."""


class UnusableTarget(HpcstageError):
    """A state cannot be restored to the directory that was named."""


class NothingToRestore(HpcstageError):
    """No generation can be restored."""

    def __init__(self, refused: Sequence[RefusedGeneration]) -> None:
        what = "; ".join(one.line() for one in refused) or "there is no generation to restore"
        super().__init__(what, "older checkpoints may have been drained")
        self.refused = tuple(refused)


def restore_newest(source: BlockSource, target: Path) -> RestoredState:
    """Restores the newest generation that verifies. Raises NothingToRestore if none does."""
    refused: dict[int, RefusedGeneration] = {}
    # The generations are listed again each time: a writer may commit newer ones and drop those of an earlier list.
    while untried := set(source.numbers()) - refused.keys():
        number = max(untried)
        try:
            opened = restore(source, number, target)
        except DamagedGeneration as error:
            refused[number] = RefusedGeneration(number, error.what)
            continue
        newer = tuple(refused[n] for n in sorted(refused, reverse=True) if n > number)
        return RestoredState(number, len(opened.entries), opened.state_bytes, newer)
    raise NothingToRestore([refused[n] for n in sorted(refused, reverse=True)])


def restore(source: BlockSource, number: int, target: Path) -> GenerationManifest:
    """Makes the directory `target`, which must not be there or be empty, with all entries of a generation.

    Raises DamagedGeneration or UnusableTarget, after which the target is as before.
    """
    _check_target(target)
    beside = target.with_name(f".{target.name}.{os.urandom(6).hex()}")
    beside.mkdir(0o700)
    try:
        reader = GenerationReader(source)
        opened = reader.generation(number)
        _restore_entries(reader, opened, beside)
        _sync_directory(beside)
        beside.replace(target)
        _sync_directory(target.parent)
    except BaseException:
        _remove(beside)
        raise
    return opened.manifest


def _check_target(target: Path) -> None:
    """Refuses what cannot be replaced at the end, before anything is read."""
    try:
        mode = os.lstat(target).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISDIR(mode):
        raise UnusableTarget(f"{target} is no directory", "name one that is not there, or is empty")
    if os.path.ismount(target):
        raise UnusableTarget(f"{target} is a mount point, which cannot be replaced", "name a directory below it")
    if os.listdir(target):
        raise UnusableTarget(f"{target} is not empty", "name a directory that is not there, or is empty")


def verify(source: BlockSource, number: int) -> GenerationManifest:
    """Reads every block of a generation. Raises DamagedGeneration if one cannot be restored."""
    reader = GenerationReader(source)
    opened = reader.generation(number)
    for file in range(len(opened.manifest.entries)):
        for _ in reader.pieces(opened, file):
            pass
    return opened.manifest


def _restore_entries(reader: GenerationReader, opened: OpenGeneration, directory: Path) -> None:
    entries = opened.manifest.entries
    for index, entry in enumerate(entries):
        path = directory / entry.name
        if entry.type is EntryType.DIRECTORY:
            path.mkdir(0o700)
        elif entry.type is EntryType.LINK:
            path.symlink_to(entry.target)
            os.utime(path, ns=(entry.mtime_ns, entry.mtime_ns), follow_symlinks=False)
        else:
            _restore_file(reader, opened, index, path)
    for entry in reversed(entries):  # a directory's times and mode come after all below it
        if entry.type is EntryType.DIRECTORY:
            with _directory(directory / entry.name) as fd:
                _finish(fd, entry)


def _restore_file(reader: GenerationReader, opened: OpenGeneration, index: int, path: Path) -> None:
    """Writes what is not zero; the rest of the file is a hole."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        entry = opened.manifest.entries[index]
        os.ftruncate(fd, entry.size_bytes)
        for offset, data in reader.pieces(opened, index):
            left, place = data, offset
            while left:
                count = os.pwrite(fd, left, place)
                left, place = left[count:], place + count
        _finish(fd, entry)
    finally:
        os.close(fd)


def _finish(fd: int, entry: SavedEntry) -> None:
    """Gives a file or directory its mode and time and has it on the disk."""
    os.fchmod(fd, entry.mode)
    os.utime(fd, ns=(entry.mtime_ns, entry.mtime_ns))
    os.fsync(fd)


@contextlib.contextmanager
def _directory(path: Path) -> Iterator[int]:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield fd
    finally:
        os.close(fd)


def _sync_directory(path: Path) -> None:
    """Has the names of a directory on the disk."""
    with _directory(path) as fd:
        os.fsync(fd)


def _remove(directory: Path) -> None:
    """Removes what was restored in part, also below directories that the program made unwritable."""
    pending = [os.fspath(directory)]
    while pending:
        with contextlib.suppress(OSError):
            path = pending.pop()
            os.chmod(path, 0o700)
            with os.scandir(path) as found:
                pending += [entry.path for entry in found if entry.is_dir(follow_symlinks=False)]
    shutil.rmtree(directory, ignore_errors=True)
