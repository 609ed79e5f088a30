"""The generations of one node: commits new ones and drops old ones.

Owns the order in which a commit reaches the disk: data, table, their names, the manifest, its name. A generation
without a manifest under its final name does not exist; a commit touches nothing of the generations before. One process
writes a store at a time, one thread after the other.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from hpcstage.checkpoint.generations.choice import GenerationPolicy, KindChoice
from hpcstage.checkpoint.generations.directory import StoreDirectory
from hpcstage.checkpoint.generations.draft import GenerationDraft, draft_of, newest_of
from hpcstage.checkpoint.generations.files import (
    Files,
    GenerationId,
    GenerationPart,
)
from hpcstage.checkpoint.generations.manifest import DamagedGeneration, GenerationKind, GenerationManifest
from hpcstage.checkpoint.generations.reading import GenerationReader, LocalSource
from hpcstage.checkpoint.generations.restoring import RestoredState, restore_newest, verify
from hpcstage.checkpoint.generations.state import StateSource
from hpcstage.checkpoint.generations.table import RECORD
from hpcstage.checkpoint.generations.terms import CommitTerms
from hpcstage.checkpoint.generations.writing import DataFile, write_blocks


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
    left_out: tuple[str, ...]
    """Sockets, pipes and devices, which are not saved."""

    @property
    def changed_share(self) -> float:
        """Returns the share of the blocks that changed."""
        return self.changed_blocks / self.blocks if self.blocks else 0.0


@dataclass(frozen=True)
class _Commit:
    """One commit: what it makes and where, on which terms, and since when."""

    directory: Path
    identity: GenerationId
    terms: CommitTerms
    began_s: float


class GenerationStore:
    """The generations below a directory, which is made if it is not there; this process alone writes to it until it
    closes the store. Opening one removes what a killed commit or drop left.

    A generation of an earlier process is read and verified once before another builds on it: a delta would inherit its
    damage, and so would all that follow.
    """

    def __init__(self, directory: Path, policy: GenerationPolicy | None = None, files: Files | None = None) -> None:
        self._policy = policy or GenerationPolicy()
        self._files = files or Files()
        self._verified: set[int] = set()
        self._turn = threading.Lock()
        self._directory = StoreDirectory(self._files, directory)

    def __enter__(self) -> GenerationStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Lets other processes write to the directory."""
        self._directory.close()

    def source(self) -> LocalSource:
        """Returns the generations for reading."""
        return self._directory.source()

    def numbers(self) -> list[int]:
        """Returns the committed generations, oldest first."""
        return self._directory.numbers()

    def next_number(self) -> int:
        """Returns the lowest number that a new generation may have here; a job takes the highest of all its nodes."""
        return self._directory.next_number()

    def commit(
        self,
        state: StateSource,
        identity: GenerationId | None = None,
        terms: CommitTerms | None = None,
        kept: Collection[str] = (),
    ) -> SavedGeneration:
        """Makes a generation of a state. Without an identity it has the next number, and is an attempt of its own.

        `kept` are checkpoints that it has as the newest generation has them, whatever lies in the program's directory.
        Raises a ValueError if that generation has none of such a name, or the state has it, too; DamagedGeneration if
        what is kept cannot be read where it has to be.

        Raises StaleNumber if there are generations of this number or a higher one, StateChanged if the state changes
        meanwhile, NoRoom and CommitCancelled as the terms say, and OSError where the disk fails; then the generations
        before are what they were, and nothing of the new one stays.
        """
        began_s = time.monotonic()
        allowed = terms or CommitTerms()
        with self._writing(), self.source() as source:
            chosen = self._directory.identity(identity)
            found = state.scan(self._files)
            before = newest_of(source, functools.partial(self._verify, source))
            draft = draft_of(found, kept, before, self._policy.block_bytes, allowed)
            commit = _Commit(self._directory.path(chosen.number), chosen, allowed, began_s)
            full = KindChoice(GenerationKind.FULL, allowed.full_why) if allowed.full_why else None
            saved = _written(self._files, draft, full or draft.choose(self._policy), commit)
            self._verified.add(saved.manifest.number)
        return saved

    def restore_newest(self, directory: Path) -> RestoredState:
        """Restores the newest generation that verifies. Raises NothingToRestore if none does."""
        with self.source() as source:
            restored = restore_newest(source, directory)
        self._verified.add(restored.number)
        return restored

    def prune(self, keep: int) -> list[int]:
        """Drops all but the newest `keep` generations (at least one) and those that they need; returns the dropped.

        Damaged ones do not count, and go with those that are older than the kept.
        """
        return self.drop_all_but(self.retained(keep))

    def retained(self, keep: int) -> frozenset[int]:
        """Returns the newest `keep` generations that verify (at least one), those that they need, and all newer ones.

        A generation counts if this process wrote or verified it; others are verified now. A job keeps what any of its
        nodes retains: the parities of a generation lie with those of the others.
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
            return frozenset({n for n in numbers if n >= max(kept, default=0)} | kept | needed)

    def drop_all_but(self, retained: Collection[int]) -> list[int]:
        """Drops the generations that are not retained, the newest first; returns them. None is ever there without those
        that it needs: what a retained one needs stays."""
        with self._writing(), self.source() as source:
            reader, numbers, stay = GenerationReader(source), source.numbers(), set(retained)
            for number in stay.intersection(numbers):
                with contextlib.suppress(DamagedGeneration):
                    stay.update(reader.manifest(number).needs)
            dropped = [number for number in reversed(numbers) if number not in stay]
            for number in dropped:
                self._directory.remove(number)
        return dropped

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """Lets one thread at a time change the directory, and no process that was forked from the store's."""
        self._directory.check_held()
        with self._turn:
            yield

    def _verify(self, source: LocalSource, number: int) -> None:
        """Reads a generation once in this process. Raises DamagedGeneration."""
        if number not in self._verified:
            verify(source, number)
            self._verified.add(number)


def _written(files: Files, draft: GenerationDraft, choice: KindChoice, commit: _Commit) -> SavedGeneration:
    """Writes and commits a generation; nothing of it stays if that fails."""
    compared_s, terms, directory = time.monotonic(), commit.terms, commit.directory
    terms.check_room(draft.stored_bytes(choice.kind) + draft.layout.count * RECORD.itemsize)
    files.call(os.mkdir, directory, 0o700)
    try:
        files.sync_directory(directory.parent)
        with files.created(directory / GenerationPart.DATA) as fd:
            written = write_blocks(draft, choice, commit.identity.number, DataFile(files, fd, terms))
        files.write_new(directory / GenerationPart.BLOCKS, written.table)
        draft.state.check_unchanged()
        manifest = draft.manifest(commit.identity, choice, written.table, written.data_bytes, terms.after_ns)
        text = _readable(manifest)
        written_bytes = written.data_bytes + len(written.table) + len(text)
        terms.check_room(written_bytes)
        files.publish(directory / GenerationPart.MANIFEST, text)
    except BaseException:
        with contextlib.suppress(OSError):
            files.remove_generation(directory)
        raise
    return SavedGeneration(
        manifest,
        draft.layout.count,
        int(draft.difference.changed.sum()),
        written_bytes,
        compared_s - commit.began_s,
        time.monotonic() - compared_s,
        draft.state.left_out,
    )


def _readable(manifest: GenerationManifest) -> bytes:
    """Returns the manifest as it is written. Raises a ValueError if it could not be read again as it is."""
    text = manifest.to_bytes()
    try:
        GenerationManifest.from_bytes(text)
    except DamagedGeneration as error:
        raise ValueError(f"the generation could not be read again: {error.what}") from error
    return text
