"""Saves generations of what a program completed, within the room on the disk and a share of a processor.

Owns the numbers, which grow over the runs of one target, and the room.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hpcstage.checkpoint.entries import mark_of
from hpcstage.checkpoint.generations.files import Files, GenerationId
from hpcstage.checkpoint.generations.manifest import GenerationManifest
from hpcstage.checkpoint.generations.restoring import times_of
from hpcstage.checkpoint.generations.state import FileTree, FoundState, StateChanged, StateSource
from hpcstage.checkpoint.generations.store import GenerationStore, SavedGeneration
from hpcstage.checkpoint.generations.terms import CommitProgress, CommitTerms, NoRoom
from hpcstage.checkpoint.keeping.facts import LOCAL_KEPT, CheckpointCharter, CheckpointPlace, SavedRow
from hpcstage.checkpoint.keeping.history import known_before, newest_manifest, whole_versions
from hpcstage.checkpoint.keeping.plain import HIDDEN, is_there

SHARE = 0.5
"""The share of one processor that saving and draining may take while the command runs."""
_LOOK_S = 0.05


class ProcessorShare:
    """Delays work so that it takes no more than a share of a processor, until somebody hurries it."""

    def __init__(self, share: float, hurries: Callable[[], bool]) -> None:
        self._share = share
        self._hurries = hurries
        self._since_s = time.monotonic(), time.process_time()

    def begin(self) -> None:
        """Begins a piece of work: what was not used before is not saved up."""
        self._since_s = time.monotonic(), time.process_time()

    def __call__(self, _: CommitProgress | int) -> None:
        """Waits, after some work, until the share is kept."""
        while not self._hurries():
            due_s = self._since_s[0] + (time.process_time() - self._since_s[1]) / self._share
            if time.monotonic() >= due_s:
                break
            time.sleep(min(_LOOK_S, max(0.0, due_s - time.monotonic())))

    def and_below(self, rate: Callable[[int], object] | None) -> Callable[[int], None]:
        """Returns a function that waits, after so many bytes, until the share and a rate are kept."""

        def wait(size_bytes: int) -> None:
            self(size_bytes)
            if rate is not None:
                rate(size_bytes)

        return wait


@dataclass(frozen=True)
class MarkedTree:
    """Entries of a directory for a generation, as they were when they were complete: `marks` are of then."""

    directory: Path
    marks: Mapping[str, str]

    def scan(self, files: Files) -> FoundState:
        """See StateSource. What the program writes afterwards, the commit finds; what it wrote before, this does."""
        found = FileTree(self.directory, sorted(self.marks)).scan(files)
        for name, mark in self.marks.items():
            if mark_of(self.directory, name) != mark:
                raise StateChanged(self.directory / name)
        return found


class GenerationSaver:
    """Owns the generations of one run."""

    def __init__(
        self,
        place: CheckpointPlace,
        charter: CheckpointCharter,
        capped: ProcessorShare,
        meanwhile: Callable[[], object],
    ) -> None:
        """`meanwhile` is called every few MB of a save."""
        self._place = place
        self._capped = capped
        self._meanwhile = meanwhile
        self.pinned: Collection[int] = ()
        """Generations that stay until they are drained."""
        self._store = GenerationStore(place.store)
        before = known_before(place, charter)
        self._lowest_number = max((one.number for one in before), default=0) + 1
        self._after_ns = max((one.created_ns for one in before), default=0)
        self._drained = max(before, key=lambda one: one.created_ns, default=None) if not charter.earlier else None
        """The state that lay in the directory at the start and that the target has; None where it is not drained."""

    def save(self, names: Sequence[str], marks: Mapping[str, str] | None = None) -> SavedRow | None:
        """Saves a generation of some entries; None if that is the state which was saved last. `marks` are of when they
        were complete; one that differs from its own is being written again.

        Raises StateChanged, NoRoom and OSError.
        """
        if not names or self._is_saved(names):
            return None
        self._capped.begin()
        began_s = time.monotonic()
        tree = self._place.tree
        wanted = FileTree(tree, names) if marks is None else MarkedTree(tree, {name: marks[name] for name in names})
        saved = self._commit(wanted)
        return SavedRow.of(saved, time.monotonic() - began_s)

    def prune(self, keep: int = LOCAL_KEPT) -> list[int]:
        """Drops generations, but not what has a checkpoint whole that is being written again; returns the dropped."""
        newest = self.newest()
        if newest is None:
            return []
        with self._store.source() as source:
            versions = whole_versions(source, self._place.tree, newest.number)
        return self._store.drop_all_but(self._store.retained(keep).union(versions, self.pinned))

    def newest(self) -> GenerationManifest | None:
        """Returns the newest generation of this run."""
        return newest_manifest(self._place.base)

    def close(self) -> None:
        """Ends the use of the store."""
        self._store.close()

    def _commit(self, tree: StateSource) -> SavedGeneration:
        terms = CommitTerms(self._place.room_bytes(), self._after_ns, progress=self._progressed)
        identity = GenerationId.new(max(self._store.next_number(), self._lowest_number))
        try:
            return self._store.commit(tree, identity, terms)
        except NoRoom:
            if not self.prune(1):
                raise
        return self._store.commit(tree, identity, replace(terms, budget_bytes=self._place.room_bytes()))

    def _progressed(self, progress: CommitProgress) -> None:
        self._meanwhile()
        self._capped(progress)

    def _is_saved(self, names: Collection[str]) -> bool:
        newest = self.newest() or self._drained
        if newest is None:
            return False
        saved = times_of(newest)
        lacking = [name for name in saved if name not in names and not name.startswith(HIDDEN)]
        return not lacking and all(name in saved and is_there(self._place.tree, newest, name) for name in names)
