"""The generations of one node: commits new ones and drops old ones.

Owns the lock of the directory, and the order in which a commit reaches the disk: data, table, their names, the
manifest, its name. A generation without a manifest under its final name does not exist, and is removed when the store
is opened unless a committed one needs it; a commit touches nothing of the generations before. One process writes a
store at a time.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import stat
import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from hpcstage.checkpoint.generations.files import (
    Files,
    GenerationId,
    GenerationPart,
    generation_number,
    generation_path,
    is_number,
)
from hpcstage.checkpoint.generations.layout import RECORD
from hpcstage.checkpoint.generations.manifest import DamagedGeneration, GenerationManifest
from hpcstage.checkpoint.generations.reading import GenerationReader, LocalSource
from hpcstage.checkpoint.generations.restoring import verify
from hpcstage.checkpoint.generations.state import StateSource
from hpcstage.checkpoint.generations.terms import CommitTerms, GenerationPolicy, KindChoice
from hpcstage.checkpoint.generations.writing import DataWriter, GenerationDraft, draft_of, newest_of
from hpcstage.errors import HpcstageError


class StoreInUse(HpcstageError):
    """Another process writes generations to the same directory."""


class StaleNumber(HpcstageError):
    """A new generation cannot have this number."""


@dataclass(frozen=True)
class SavedGeneration:
    """The result of a commit, for the report."""

    manifest: GenerationManifest
    blocks: int
    changed_blocks: int
    """The blocks that the generation before does not have; all that are not zero where there is none."""
    written_bytes: int
    """The bytes of data, table and manifest."""
    diff_s: float
    """The time for reading and hashing the state, and comparing."""
    write_s: float
    """The time for everything else until the generation is on the disk."""

    @property
    def changed_share(self) -> float:
        """Returns the share of the blocks that changed."""
        return self.changed_blocks / self.blocks if self.blocks else 0.0


class GenerationStore:
    """The generations below a directory, which is made if it is not there; this process alone writes to it until it
    closes the store.

    A generation of an earlier process is read and verified once before another builds on it: a delta would inherit its
    damage, and so would all that follow.
    """

    def __init__(self, directory: Path, policy: GenerationPolicy | None = None, files: Files | None = None) -> None:
        """Removes what a killed commit or drop left. Raises StoreInUse if another process has the store, and
        OSError."""
        self._directory = directory
        self._policy = policy or GenerationPolicy()
        self._files = files or Files()
        self._verified: set[int] = set()
        with contextlib.suppress(FileExistsError):
            self._files.call(os.mkdir, directory, 0o700)
            self._files.sync_directory(directory.parent)
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        self._lock = self._files.call(os.open, directory, flags)
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
        return self.source().numbers()

    def next_number(self) -> int:
        """Returns the lowest number that a new generation may have here; a job takes the highest of all its nodes."""
        return max(self._taken(), default=0) + 1

    def commit(
        self, state: StateSource, identity: GenerationId | None = None, terms: CommitTerms | None = None
    ) -> SavedGeneration:
        """Makes a generation of a state. Without an identity it has the next number, and is an attempt of its own.

        Raises StaleNumber if there are generations of this number or a higher one, StateChanged if the state changes
        meanwhile, NoRoom as the terms say, and OSError where the disk fails; then the generations before are what they
        were, and nothing of the new one stays.
        """
        began_s = time.monotonic()
        allowed = terms or CommitTerms()
        with self.source() as source:
            chosen = self._identity(identity)
            found = state.scan(self._files)
            before = newest_of(source, functools.partial(self._verify, source))
            draft = draft_of(found, before, self._policy.block_bytes, allowed)
            choice = draft.choose(self._policy, allowed.full_why)
            compared_s = time.monotonic()
            manifest, written_bytes = self._write(draft, chosen, choice, allowed)
            self._verified.add(manifest.number)
        times_s = compared_s - began_s, time.monotonic() - compared_s
        return SavedGeneration(manifest, draft.layout.count, int(draft.changed.sum()), written_bytes, *times_s)

    def doubt(self) -> None:
        """Has the newest generation read once more before the next one builds on it: there is a damaged block."""
        self._verified.clear()

    def drop_all_but(self, retained: Collection[int]) -> list[int]:
        """Drops the generations that are not retained, the newest first; returns them. None is ever there without those
        that it needs: what a retained one needs stays."""
        with self.source() as source:
            reader, numbers, stay = GenerationReader(source), source.numbers(), set(retained)
            for number in stay.intersection(numbers):
                with contextlib.suppress(DamagedGeneration):
                    stay.update(reader.manifest(number).needs)
            dropped = [number for number in reversed(numbers) if number not in stay]
            for number in dropped:
                self._remove(number)
        return dropped

    def _verify(self, source: LocalSource, number: int) -> None:
        """Reads a generation once in this process. Raises DamagedGeneration."""
        if number not in self._verified:
            verify(source, number)
            self._verified.add(number)

    def _identity(self, given: GenerationId | None) -> GenerationId:
        """Returns what the next generation is called."""
        lowest = self.next_number()
        if given is not None and given.number < lowest:
            what = f"generation {given.number} cannot be made: {lowest - 1} is there"
            raise StaleNumber(what, "take a higher number")
        if not is_number(lowest):
            raise StaleNumber(f"there are no numbers after {lowest - 1}", f"move {self._directory} away")
        return given or GenerationId.new(lowest)

    def _write(
        self, draft: GenerationDraft, identity: GenerationId, choice: KindChoice, terms: CommitTerms
    ) -> tuple[GenerationManifest, int]:
        """Writes and commits a generation; nothing of it stays if that fails. Returns its bytes, too."""
        files, directory = self._files, self._path(identity.number)
        terms.check_room(draft.stored_bytes(choice.kind) + draft.layout.count * RECORD.itemsize)
        files.call(os.mkdir, directory, 0o700)
        try:
            files.sync_directory(directory.parent)
            with files.created(directory / GenerationPart.DATA) as fd:
                table, data_bytes = DataWriter(files, fd, draft, choice.kind, terms).write(identity.number)
            files.write_new(directory / GenerationPart.BLOCKS, table)
            draft.state.check_unchanged()
            manifest = draft.manifest(identity, choice, table, data_bytes, terms.after_ns)
            text = _readable(manifest)
            written_bytes = data_bytes + len(table) + len(text)
            terms.check_room(written_bytes)
            files.publish(directory / GenerationPart.MANIFEST, text)
        except BaseException:
            with contextlib.suppress(OSError):
                self._remove(identity.number)
            raise
        return manifest, written_bytes

    def _take_over(self) -> None:
        try:
            self._files.call(fcntl.flock, self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise StoreInUse(f"another process writes checkpoints to {self._directory}") from error
        committed = self.numbers()
        for number in committed:  # a process that was killed may have left the name of a manifest in memory only
            with contextlib.suppress(OSError):
                self._files.sync_directory(self._path(number))
        left = [number for number in self._taken() if number not in committed]
        needed = self._needed(committed) if left else set()
        for number in left:
            with contextlib.suppress(OSError):  # no generation gets the number of what stays
                if number not in needed and stat.S_ISDIR(self._files.call(os.lstat, self._path(number)).st_mode):
                    self._remove(number)

    def _needed(self, committed: Collection[int]) -> set[int]:
        """Returns what committed generations need; of one whose manifest cannot be read all that is older."""
        needed: set[int] = set()
        reader = GenerationReader(self.source())
        for number in committed:
            try:
                needed.update(reader.manifest(number).needs)
            except DamagedGeneration:
                needed.update(n for n in self._taken() if n < number)
        return needed

    def _taken(self) -> list[int]:
        """Returns the numbers that a name of the directory has, whatever it is."""
        names = self._files.call(os.listdir, self._directory)
        return [number for name in names if (number := generation_number(name)) is not None]

    def _path(self, number: int) -> Path:
        return generation_path(self._directory, number)

    def _remove(self, number: int) -> None:
        self._files.remove_generation(self._path(number))


def _readable(manifest: GenerationManifest) -> bytes:
    """Returns the manifest as it is written. Raises a ValueError if it could not be read again as it is."""
    text = manifest.to_bytes()
    try:
        GenerationManifest.from_bytes(text)
    except DamagedGeneration as error:
        raise ValueError(f"the generation could not be read again: {error.what}") from error
    return text
