"""Keeps the checkpoints of one run: puts the newest state into the directory, saves what is completed there, drains it.

Owns the order of a run, and the report. It works in a process of its own, one thing after the other: what may hang, as
a shared file system does, holds up nobody else. A generation is saved when a checkpoint has been completed; while one
is drained no other is saved, and the next then has all that came meanwhile. Where the local disk has no room for a
generation, complete checkpoints are copied as they are.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from hpcstage.checkpoint.entries import CompleteEntries
from hpcstage.checkpoint.generations.manifest import DamagedGeneration
from hpcstage.checkpoint.generations.reading import GenerationReader, LocalSource
from hpcstage.checkpoint.generations.restoring import UnusableTarget, times_of
from hpcstage.checkpoint.generations.state import StateChanged
from hpcstage.checkpoint.generations.terms import NoRoom
from hpcstage.checkpoint.keeping.beginning import restore_state, seen_before
from hpcstage.checkpoint.keeping.draining import DrainedEntries, EntryDrain, PacedSource, ProgramNames
from hpcstage.checkpoint.keeping.facts import (
    MOST_ROWS,
    RETRY_S,
    CheckpointCharter,
    CheckpointPlace,
    DrainTerms,
    KeepingReport,
    UndrainedEntry,
    reason,
)
from hpcstage.checkpoint.keeping.history import lacking_of_origin, whole_versions
from hpcstage.checkpoint.keeping.leftovers import leftovers, place_leftovers
from hpcstage.checkpoint.keeping.plain import OURS, names_in
from hpcstage.checkpoint.keeping.saving import SHARE, GenerationSaver, ProcessorShare
from hpcstage.reading import readable

END_S = 5.0
"""The longest wait at the end until the command's entries are closed."""
_LOOK_S = 0.05
_NOT_SAVED = "a state could not be saved on the local disk, and was copied as it is"


class CheckpointKeeper:
    """Keeps one directory. `commands` is a descriptor that has a byte when the command has ended."""

    def __init__(
        self,
        place: CheckpointPlace,
        commands: int,
        tell: Callable[[KeepingReport], object],
        terms: DrainTerms,
    ) -> None:
        """`tell` hears each report. Puts the newest state into the directory. Raises CannotKeep, OSError, ValueError
        and HpcstageError."""
        began_s = time.monotonic()
        self._place = place
        self._charter = CheckpointCharter.load(place)
        self._commands = commands
        self._tell = tell
        self._terms = terms
        state = restore_state(place, self._charter)
        capped = ProcessorShare(SHARE, lambda: self._is_ending() or terms.hurries())
        self._wait_for = capped.and_below(terms.pace)
        self._saver = GenerationSaver(place, self._charter, capped)
        self._report = KeepingReport(state.restored, round(time.monotonic() - began_s, 3), refused=state.refused)
        self._names = ProgramNames(set(names_in(place.tree)) | seen_before(self._charter))
        self._since_drain = 0
        self._retry_at = 0.0
        self._has_ended = False
        """Whether the byte of the command's end was read."""

    def keep(self) -> None:
        """Saves and drains until the command has ended, and then what is left. Raises OSError if the directory cannot
        be watched."""
        tree = self._place.tree
        entries = CompleteEntries(tree, time.monotonic(), known=names_in(tree))
        try:
            entries.look(time.monotonic())  # before the program may write: what is there is complete as it is now
            self._tell(self._report)
            revision = -1
            while not self._is_ending():
                now = time.monotonic()
                entries.look(now)
                if entries.revision != revision and now >= self._retry_at:
                    marks = {name: mark for name, (mark, _) in entries.states().items()}
                    revision = entries.revision if self._save(entries.names(), marks) else -1
                if self._since_drain and self._terms.hurries():
                    self._drain_newest()
                self._wait(entries)
            entries.look_at_end(time.monotonic())
            is_gone, completed = entries.is_gone, entries.names()
        finally:
            entries.close()
        self._end(completed, is_gone=is_gone)

    def _wait(self, entries: CompleteEntries) -> None:
        now = time.monotonic()
        retry_s = self._retry_at - now if self._retry_at > now else None
        hurry_s = self._terms.wake_after() if self._since_drain else None
        wait_s = min((one for one in (entries.wake_after(now), retry_s, hurry_s) if one is not None), default=None)
        readable([self._commands, *([] if entries.is_gone else [entries.fd])], wait_s)

    def _is_ending(self) -> bool:
        return self._has_ended or bool(readable([self._commands], 0))

    def _save(self, names: tuple[str, ...], marks: Mapping[str, str] | None = None) -> bool:
        """Saves a generation, and drains it if it is its turn. Tells whether nothing is to be tried again. `marks` are
        of when the entries were complete: what differs from them is being written again."""
        self._names.seen.update(names)
        try:
            row = self._saver.save(names, marks)
        except StateChanged:
            self._retry_at = time.monotonic() + _LOOK_S
            return False
        except (NoRoom, OSError, DamagedGeneration) as error:
            self._retry_at = time.monotonic() + RETRY_S
            self._copy(names, reason(error))
            return False
        if row is not None:
            self._add(saved=(*self._report.saved, row)[-MOST_ROWS:], saved_count=self._report.saved_count + 1)
            self._since_drain += 1
            if self._since_drain >= (self._charter.drain_every or 1):
                self._drain(row.number)
            self._saver.prune()
        return True

    # ---- draining

    @property
    def _drained_to(self) -> EntryDrain:
        return EntryDrain(self._place.tree, Path(self._charter.target), self._charter.run_id)

    def _drain(self, number: int) -> None:
        """Brings the target up to a generation, and to what only older ones have whole."""
        try:
            self._charter.check_target()
            with LocalSource(self._place.store) as source:
                paced = PacedSource(source, self._wait_for)
                done = self._drained_to.generation(paced, number, self._names)
                for older, names in whole_versions(source, self._place.tree, number).items():
                    done += self._drained_to.entries(paced, older, names)
            if not lacking_of_origin(self._place, Path(self._charter.target), number):
                self._place.confirm_origin()
        except (OSError, DamagedGeneration, UnusableTarget) as error:
            self._add(undrained=_undrained(self._place, number, reason(error)))
            return
        self._since_drain = 0
        self._add(undrained=(), drained_number=number)
        self._count(done)

    def _drain_newest(self) -> None:
        newest = self._saver.newest()
        if newest is not None and self._report.drained_number != newest.number:
            self._drain(newest.number)
        self._since_drain = 0

    def _copy(self, names: Sequence[str], why: str) -> None:
        """Copies complete checkpoints to the target, since no generation could be saved."""
        if self._since_drain:
            self._drain_newest()
        others = [line for line in self._report.refused if not line.startswith(_NOT_SAVED)]
        missing: list[UndrainedEntry] = []
        for name in names:
            try:
                self._charter.check_target()
                self._count(self._drained_to.copies([name], self._wait_for))
            except (OSError, StateChanged) as error:
                missing.append(UndrainedEntry(name, reason(error)))
        self._add(refused=(*others, f"{_NOT_SAVED}: {why}"), undrained=tuple(missing))

    def _count(self, done: DrainedEntries) -> None:
        report = self._report
        self._add(
            findings={"beside": {**report.findings.get("beside", {}), **done.beside}},
            files=report.files + done.files,
            bytes_carried=report.bytes_carried + done.size_bytes,
        )

    # ---- the end

    def _end(self, completed: tuple[str, ...], *, is_gone: bool) -> None:
        """Saves and drains what is left. After an orderly end all is complete that is closed; otherwise what was not
        complete before may be half-written."""
        is_orderly, self._has_ended = os.read(self._commands, 1) == b"0", True
        if is_gone and not self._place.tree.is_dir():
            self._add(is_gone=True)
        elif is_orderly:
            completed = all_closed(self._place.tree)
        deadline = time.monotonic() + END_S
        while not self._save(completed) and self._retry_at < deadline:
            time.sleep(_LOOK_S)
        self._drain_newest()
        if not self._report.is_gone:
            newest = self._saver.newest()
            self._carry_leftovers(leftovers(self._drained_to, newest))
        self._tell(self._report)
        self._saver.close()

    def _carry_leftovers(self, names: list[str]) -> None:
        known = {one.name for one in self._report.undrained}
        missing, beside = place_leftovers(self._drained_to, [one for one in names if one not in known], self._charter)
        self._add(unclosed=tuple(beside.values()), undrained=(*self._report.undrained, *missing))

    def _add(self, **news: object) -> None:
        self._report = replace(self._report, **news)  # type: ignore[arg-type]
        self._tell(self._report)


def _undrained(place: CheckpointPlace, number: int, why: str) -> tuple[UndrainedEntry, ...]:
    """Returns all checkpoints of a generation with the reason why it was not drained."""
    with LocalSource(place.store) as source:
        names = times_of(GenerationReader(source).manifest(number))
    return tuple(UndrainedEntry(name, why) for name in names)


def all_closed(tree: Path) -> tuple[str, ...]:
    """Returns the entries that nobody has open, hidden ones, too: the command has ended. Waits for a program that lives
    on."""
    deadline = time.monotonic() + END_S
    entries = CompleteEntries(tree, time.monotonic(), 0.0, skipped=OURS)
    try:
        while True:
            entries.look(time.monotonic())
            if list(entries.names()) == names_in(tree) or time.monotonic() >= deadline:
                return entries.names()
            time.sleep(_LOOK_S)
    finally:
        entries.close()
