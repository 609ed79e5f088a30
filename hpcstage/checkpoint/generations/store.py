"""The generations of one node: commits new ones, drops old ones, and cleans up after a process that was killed.

Owns the order in which a commit reaches the disk: data, table, their names, the manifest, its name. A generation
without a manifest under its final name does not exist, and is removed when a store is opened, unless a committed one
needs it; a commit touches nothing of the generations before. One process writes a store at a time, one thread after the
other.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpcstage.checkpoint.generations.choice import GenerationPolicy, KindChoice
from hpcstage.checkpoint.generations.draft import GenerationBefore, GenerationDraft, draft_of, newest_of
from hpcstage.checkpoint.generations.files import Files, GenerationPart, generation_number, generation_path
from hpcstage.checkpoint.generations.manifest import DamagedGeneration, GenerationKind, GenerationManifest
from hpcstage.checkpoint.generations.reading import GenerationReader, LocalSource
from hpcstage.checkpoint.generations.restoring import RestoredState, restore_newest, verify
from hpcstage.checkpoint.generations.state import check_unchanged, scan_state
from hpcstage.checkpoint.generations.writing import DataFile, write_blocks
from hpcstage.errors import HpcstageError


class StoreInUse(HpcstageError):
    """Another process writes generations to the same directory."""


class UnsafeStore(HpcstageError):
    """The directory of a store is a link, or another user's."""


@dataclass(frozen=True)
class SavedGeneration:
    """What a commit did, for the report."""

    manifest: GenerationManifest
    blocks: int
    changed_blocks: int
    """The blocks that the generation before does not have; all that are not zero where there is none."""
    written_bytes: int
    """The bytes of data, table and manifest."""
    diff_s: float
    """The time for reading and hashing the state, comparing and the probe."""
    xor_s: float
    write_s: float
    """The time for everything else until the generation is on the disk."""
    left_out: tuple[str, ...]
    """Sockets, pipes and devices, which are not saved."""

    @property
    def changed_share(self) -> float:
        """Returns the share of the blocks that changed."""
        return self.changed_blocks / self.blocks if self.blocks else 0.0


class GenerationStore:
    """The generations below a directory, which is made if it is not there; this process alone writes to it until it
    closes the store. Opening one removes what a killed commit or drop left.

    A generation of an earlier process is read and verified once before another builds on it: a delta would inherit its
    damage, and so would all that follow.
    """

    def __init__(self, directory: Path, policy: GenerationPolicy | None = None, files: Files | None = None) -> None:
        self._directory = directory
        self._policy = policy or GenerationPolicy()
        self._files = files or Files()
        self._verified: set[int] = set()
        self._turn = threading.Lock()
        self._pid = os.getpid()
        self._lock = _opened_directory(self._files, directory)
        try:
            self._take_over()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> GenerationStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Lets other processes write to the directory."""
        if self._lock >= 0:
            self._files.call(os.close, self._lock)
            self._lock = -1

    def source(self) -> LocalSource:
        """Returns the generations for reading."""
        return LocalSource(self._directory, self._files)

    def numbers(self) -> list[int]:
        """Returns the committed generations, oldest first."""
        with self.source() as source:
            return source.numbers()

    def commit(self, state: Path, names: Sequence[str] | None = None, coding: Any = None) -> SavedGeneration:  # noqa: ANN401
        """Makes a generation of the entries of these names below a directory, of all where none are given.

        Raises StateChanged if one of them changes meanwhile, and OSError where the disk fails; then the generations
        before are what they were, and nothing of the new one stays.
        """
        began_s = time.monotonic()
        with self._writing(), self.source() as source:
            found = scan_state(self._files, state, names)
            draft = draft_of(self._files, found, self._before(source), self._policy.block_bytes)
            try:
                saved = self._write(draft, draft.choose(self._policy), coding, began_s)
            except DamagedGeneration as error:
                saved = self._write(draft, _full_beside(error), coding, began_s)
            self._verified.add(saved.manifest.number)
        return saved

    def restore_newest(self, target: Path) -> RestoredState:
        """Restores the newest generation that verifies. Raises NothingToRestore if none does."""
        with self.source() as source:
            restored = restore_newest(source, target)
        self._verified.add(restored.number)
        return restored

    def prune(self, keep: int) -> list[int]:
        """Drops all but the newest `keep` generations (at least one) and those that they need; returns the dropped.

        A generation counts if this process wrote or verified it; others are verified now. Damaged ones do not count,
        and go with those that are older than the kept.
        """
        with self._writing(), self.source() as source:
            reader, numbers = GenerationReader(source), source.numbers()
            kept: set[int] = set()
            needed: set[int] = set()
            for number in reversed(numbers):
                with contextlib.suppress(DamagedGeneration):
                    if len(kept) < max(1, keep):
                        self._verify(source, number)
                        needed.update(reader.generation(number).manifest.needs)
                        kept.add(number)
            newest = max(kept, default=0)
            dropped = [n for n in reversed(numbers) if n < newest and n not in kept | needed]
            for number in dropped:  # none is ever there without those that it needs
                self._files.remove_generation(generation_path(self._directory, number))
        return dropped

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """Lets one thread at a time change the directory, and no process that was forked from the store's."""
        if self._pid != os.getpid() or self._lock < 0:
            raise StoreInUse(f"this process does not hold the store {self._directory}")
        with self._turn:
            yield

    def _verify(self, source: LocalSource, number: int) -> None:
        """Reads a generation once in this process. Raises DamagedGeneration."""
        if number not in self._verified:
            verify(source, number)
            self._verified.add(number)

    def _take_over(self) -> None:
        try:
            self._files.call(fcntl.flock, self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise StoreInUse(f"another process writes checkpoints to {self._directory}") from error
        committed = self.numbers()
        for number in committed:  # a process that was killed may have left the name of a manifest in memory only
            with contextlib.suppress(OSError):
                self._files.sync_directory(generation_path(self._directory, number))
        left = [number for number in self._taken() if number not in committed]
        needed = self._needed(committed) if left else set()
        for number in left:
            path = generation_path(self._directory, number)
            with contextlib.suppress(OSError):  # no generation gets the number of what stays
                if number not in needed and stat.S_ISDIR(self._files.call(os.lstat, path).st_mode):
                    self._files.remove_generation(path)

    def _taken(self) -> list[int]:
        """Returns the numbers that a name of the directory has, whatever it is."""
        names = self._files.call(os.listdir, self._directory)
        return [number for name in names if (number := generation_number(name)) is not None]

    def _needed(self, committed: Sequence[int]) -> set[int]:
        """Returns what committed generations need; of one whose manifest cannot be read all that is older."""
        needed: set[int] = set()
        with self.source() as source:
            reader = GenerationReader(source)
            for number in committed:
                try:
                    needed.update(reader.manifest(number).needs)
                except DamagedGeneration:
                    needed.update(n for n in self._taken() if n < number)
        return needed

    def _before(self, source: LocalSource) -> GenerationBefore:
        """Returns what the next generation can build on: the newest, verified once in this process."""
        before = newest_of(source)
        if before.opened is None:
            return before
        try:
            self._verify(source, before.opened.manifest.number)
        except DamagedGeneration as error:
            return GenerationBefore(before.reader, hindrance=_full_beside(error).reason)
        return before

    def _write(self, draft: GenerationDraft, choice: KindChoice, coding: Any, began_s: float) -> SavedGeneration:  # noqa: ANN401
        compared_s = time.monotonic()
        number = max(self._taken(), default=0) + 1
        directory = generation_path(self._directory, number)
        self._files.call(os.mkdir, directory, 0o700)
        try:
            self._files.sync_directory(self._directory)
            with self._files.created(directory / GenerationPart.DATA) as fd:
                written = write_blocks(draft, choice, number, DataFile(self._files, fd))
            self._files.write_new(directory / GenerationPart.BLOCKS, written.table)
            check_unchanged(self._files, draft.state)
            manifest = draft.manifest(number, choice, written.table, written.data_bytes, coding)
            text = _readable(manifest)
            self._publish(directory, text)
        except BaseException:
            with contextlib.suppress(OSError):
                self._files.remove_generation(directory)
            raise
        return SavedGeneration(
            manifest,
            draft.layout.count,
            int(draft.difference.changed.sum()),
            written.data_bytes + len(written.table) + len(text),
            compared_s - began_s,
            written.xor_s,
            time.monotonic() - compared_s - written.xor_s,
            draft.state.left_out,
        )

    def _publish(self, directory: Path, text: bytes) -> None:
        """Commits: all that is named so far is on the disk before the manifest has its name."""
        temporary = directory / f".{GenerationPart.MANIFEST.value}"
        self._files.write_new(temporary, text)
        self._files.sync_directory(directory)
        self._files.call(os.rename, temporary, directory / GenerationPart.MANIFEST)
        self._files.sync_directory(directory)


def _opened_directory(files: Files, directory: Path) -> int:
    """Returns a descriptor of a store's directory, which is made if it is missing and is private then.

    Raises UnsafeStore if it is a link or another user's.
    """
    with contextlib.suppress(FileExistsError):
        files.call(os.mkdir, directory, 0o700)
        files.sync_directory(directory.parent)
    if stat.S_ISLNK(files.call(os.lstat, directory).st_mode):
        raise UnsafeStore(f"{directory} is a symbolic link, which is not followed", "give the directory itself")
    fd = files.call(os.open, directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        status = files.call(os.fstat, fd)
        if status.st_uid != os.geteuid():
            raise UnsafeStore(f"{directory} belongs to user {status.st_uid}", "give another directory")
        if status.st_mode & 0o077:
            files.call(os.fchmod, fd, 0o700)
    except BaseException:
        files.call(os.close, fd)
        raise
    return fd


def _readable(manifest: GenerationManifest) -> bytes:
    """Returns the manifest as it is written. Raises a ValueError if it could not be read again as it is."""
    text = manifest.to_bytes()
    try:
        GenerationManifest.from_bytes(text)
    except DamagedGeneration as error:
        raise ValueError(f"the generation could not be read again: {error.what}") from error
    return text


def _full_beside(error: DamagedGeneration) -> KindChoice:
    """Returns the choice where the generation before cannot be built on."""
    return KindChoice(GenerationKind.FULL, f"the generation before is damaged: {error.what}")
