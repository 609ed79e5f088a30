"""Drains the checkpoints of a run that nobody keeps any more: its newest generation, what was completed since, and what
was not."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from hpcstage.checkpoint.generations.manifest import DamagedGeneration, GenerationManifest
from hpcstage.checkpoint.generations.reading import GenerationReader, LocalSource
from hpcstage.checkpoint.generations.restoring import times_of
from hpcstage.checkpoint.keeping.completed import completed_since, is_behind
from hpcstage.checkpoint.keeping.draining import DrainedEntries, EntryDrain, ProgramNames
from hpcstage.checkpoint.keeping.facts import CheckpointCharter, CheckpointPlace, KeepingReport, UndrainedEntry, reason
from hpcstage.checkpoint.keeping.history import names_of, whole_versions
from hpcstage.checkpoint.keeping.leftovers import leftovers, place_leftovers
from hpcstage.checkpoint.keeping.plain import names_in
from hpcstage.errors import HpcstageError


@dataclass
class LateDrain:
    """The drain of one place, with what it did so far."""

    place: CheckpointPlace
    drain: EntryDrain
    is_behind: bool
    """Whether the target has a newer state of another run."""
    done: DrainedEntries = field(default_factory=DrainedEntries)
    damaged: dict[str, str] = field(default_factory=dict)
    """By generation, for people: why it was not drained."""

    def generations(self) -> GenerationManifest | None:
        """Drains the newest generation that is whole, and what only older ones have; returns the newest. Raises
        OSError."""
        with LocalSource(self.place.store) as source:
            for number in reversed(source.numbers()):
                try:
                    made = GenerationReader(source).manifest(number)
                    if self.is_behind:
                        self._put_beside(source, made)
                    else:
                        self._bring(source, made)
                except DamagedGeneration as error:
                    self.damaged[f"generation {number}"] = error.what
                    continue
                return made
        return None

    def copies(self, names: Iterable[str]) -> list[UndrainedEntry]:
        """Drains complete entries of the directory as they are; returns those that could not be."""
        missing = []
        for name in names:
            try:
                self.done += self.drain.copies([name])
            except (OSError, HpcstageError) as error:
                missing.append(UndrainedEntry(name, reason(error)))
        return missing

    def _bring(self, source: LocalSource, made: GenerationManifest) -> None:
        self.done += self.drain.generation(source, made.number, ProgramNames(set(names_of(self.place))))
        for number, names in whole_versions(source, self.drain.tree, made.number).items():
            with suppress(DamagedGeneration):
                self.done += self.drain.entries(source, number, names)

    def _put_beside(self, source: LocalSource, made: GenerationManifest) -> None:
        if self.place.is_continued(made.number):
            return  # the run that went on from it answers for all that it had
        self.done += self.drain.beside(source, made.number, list(times_of(made)))
        for number, names in whole_versions(source, self.drain.tree, made.number).items():
            with suppress(DamagedGeneration):
                self.done += self.drain.beside(source, number, names)


def drain_late(place: CheckpointPlace, charter: CheckpointCharter, *, is_orderly: bool = False) -> KeepingReport:
    """Drains checkpoints; after an orderly end of the command all that lies in its directory is complete. Raises
    OSError where a file system fails."""
    charter.check_target()
    if charter.nodes:
        from hpcstage.checkpoint.jobwide.alone import drain_share_late

        return drain_share_late(place, charter)
    target = Path(charter.target)
    late = LateDrain(place, EntryDrain(place.tree, target, charter.run_id), is_behind(place, target))
    completed = completed_since(place)
    newest = late.generations()
    beside: dict[str, str] = {}
    if is_orderly:
        missing = late.copies(names_in(place.tree))
    else:
        missing = [] if late.is_behind else late.copies(completed)
        is_continued = place.is_continued(0 if newest is None else newest.number)
        left = [name for name in leftovers(late.drain, newest) if not (is_continued and name in completed)]
        torn, beside = place_leftovers(late.drain, left, charter)
        missing += torn
    return KeepingReport(
        drained_number=None if newest is None else newest.number,
        findings={"beside": dict(late.done.beside), "skipped": late.damaged},
        files=late.done.files,
        bytes_carried=late.done.size_bytes,
        undrained=tuple(missing),
        unclosed=tuple(beside.values()),
    )
