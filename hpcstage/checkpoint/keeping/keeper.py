"""Keeps the checkpoints of one run: puts the newest state into the directory, saves what is completed there, drains it.

Owns the order of a run, and the report. It works in a process of its own, and drains in another one: a shared file
system that hangs holds up that alone. A generation is saved when a checkpoint has been completed; while one is drained
others are saved, and the newest is drained next. Where the local disk has no room for a generation, complete
checkpoints are copied as they are.
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
from hpcstage.checkpoint.keeping.completed import CompletedNote, lacking_of_origin
from hpcstage.checkpoint.keeping.drainer import DrainProcess, DrainResult
from hpcstage.checkpoint.keeping.draining import EntryDrain, PacedSource, ProgramNames
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
from hpcstage.checkpoint.keeping.history import whole_versions
from hpcstage.checkpoint.keeping.leftovers import leftovers, place_leftovers
from hpcstage.checkpoint.keeping.plain import OURS, names_in
from hpcstage.checkpoint.keeping.saving import SHARE, GenerationSaver, ProcessorShare
from hpcstage.reading import readable

END_S = 5.0
"""The longest wait at the end until the command's entries are closed."""
_LOOK_S = 0.05
_DIED = "the process that copied it died"
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
        self._saver = GenerationSaver(place, self._charter, capped, self._look)
        self._report = KeepingReport(state.restored, round(time.monotonic() - began_s, 3), refused=state.refused)
        self._names = ProgramNames(set(names_in(place.tree)) | seen_before(self._charter))
        self._entries = CompleteEntries(place.tree, time.monotonic(), known=names_in(place.tree))
        self._noted: CompletedNote | None = None
        self._drain: DrainProcess | None = None
        self._since_drain = 0
        self._is_due = False
        """Whether the newest generation is to be drained when nothing else is."""
        self._to_copy: tuple[str, ...] = ()
        """Checkpoints that are to be copied as they are when nothing else is drained."""
        self._under_way: tuple[int | None, tuple[str, ...]] = None, ()
        """The generation and the checkpoints of the drain that goes on."""
        self._has_failed = False
        """Whether the last drain failed: the next save tries again."""
        self._retry_at = 0.0
        self._has_ended = False
        """Whether the byte of the command's end was read."""

    def keep(self) -> None:
        """Saves and drains until the command has ended, and then what is left. Raises OSError if the directory cannot
        be watched."""
        entries = self._entries
        try:
            entries.look(time.monotonic())  # before the program may write: what is there is complete as it is now
            self._noted = CompletedNote(self._place, self._charter, entries)
            self._tell(self._report)
            revision = -1
            while not self._is_ending():
                self._look()
                if entries.revision != revision and time.monotonic() >= self._retry_at:
                    before, marks = entries.revision, {name: mark for name, (mark, _) in entries.states().items()}
                    revision = before if self._save(entries.names(), marks) else -1
                self._drain_due()
                self._wait(entries)
            entries.look_at_end(time.monotonic())
            self._noted.note()
            is_gone, completed = entries.is_gone, entries.names()
        finally:
            entries.close()
            self._noted = None
        self._end(completed, is_gone=is_gone)

    def _look(self) -> None:
        """Looks at the entries, also while a generation is saved, and notes the complete ones."""
        if self._noted is not None:
            self._entries.look(time.monotonic())
            self._noted.note()

    def _wait(self, entries: CompleteEntries) -> None:
        now = time.monotonic()
        retry_s = self._retry_at - now if self._retry_at > now else None
        hurry_s = self._terms.wake_after() if self._since_drain else None
        wait_s = min((one for one in (entries.wake_after(now), retry_s, hurry_s) if one is not None), default=None)
        fds = [self._commands, *([] if entries.is_gone else [entries.fd])]
        readable([*fds, *([] if self._drain is None else [self._drain.fd])], wait_s)

    def _is_ending(self) -> bool:
        return self._has_ended or bool(readable([self._commands], 0))

    def _save(self, names: tuple[str, ...], marks: Mapping[str, str] | None = None) -> bool:
        """Saves a generation. Tells whether nothing is to be tried again. `marks` are of when the entries were
        complete: what differs from them is being written again."""
        self._names.seen.update(names)
        try:
            row = self._saver.save(names, marks)
        except StateChanged:
            self._retry_at = time.monotonic() + _LOOK_S
            return False
        except (NoRoom, OSError, DamagedGeneration) as error:
            self._retry_at = time.monotonic() + RETRY_S
            others = [line for line in self._report.refused if not line.startswith(_NOT_SAVED)]
            self._add(refused=(*others, f"{_NOT_SAVED}: {reason(error)}"))
            self._to_copy, self._is_due = tuple(names), self._is_due or self._since_drain > 0
            return False
        if row is not None:
            self._add(saved=(*self._report.saved, row)[-MOST_ROWS:], saved_count=self._report.saved_count + 1)
            self._since_drain += 1
            is_turn = self._has_failed or self._since_drain >= (self._charter.drain_every or 1)
            self._is_due = self._is_due or is_turn
            self._saver.prune()
        return True

    # ---- draining

    @property
    def _drained_to(self) -> EntryDrain:
        return EntryDrain(self._place.tree, Path(self._charter.target), self._charter.run_id)

    def _drain_due(self, *, waits: bool = False) -> None:
        """Takes the result of a drain that has ended, and begins the next one that is due. `waits`: until that is
        over, too."""
        if self._since_drain and self._terms.hurries():
            self._is_due = True
        while True:
            if self._drain is not None:
                if not waits and not readable([self._drain.fd], 0):
                    return
                self._take(self._drain.result())
                self._drain = None
            if not self._begin_drain():
                return

    def _begin_drain(self) -> bool:
        newest = self._saver.newest() if self._is_due else None
        number = newest.number if newest is not None and newest.number != self._report.drained_number else None
        copied, self._to_copy = self._to_copy, ()
        if self._is_due:
            self._is_due, self._since_drain = False, 0
        if number is None and not copied:
            return False
        self._saver.pinned = set() if number is None else {number, *self._versions(number)}
        self._under_way = number, copied
        self._drain = DrainProcess(lambda is_hurried: self._drained(number, copied, is_hurried))
        return True

    def _versions(self, number: int) -> Mapping[int, list[str]]:
        """Returns what only older generations have whole."""
        with LocalSource(self._place.store) as source:
            return whole_versions(source, self._place.tree, number)

    def _drained(self, number: int | None, copied: Sequence[str], is_hurried: Callable[[], bool]) -> DrainResult:
        """Brings the target up to a generation, and to what only older ones have whole; then copies complete
        checkpoints for which no generation could be saved. Works in a process of its own."""
        capped = ProcessorShare(SHARE, lambda: is_hurried() or self._terms.hurries())
        result = DrainResult(number, removed=self._names.removed)
        wait_for = capped.and_below(self._terms.pace)
        if number is not None:
            try:
                self._charter.check_target()
                with LocalSource(self._place.store) as source:
                    paced = PacedSource(source, wait_for)
                    result.done += self._drained_to.generation(paced, number, self._names)
                    for older, names in whole_versions(source, self._place.tree, number).items():
                        result.done += self._drained_to.entries(paced, older, names)
                if not lacking_of_origin(self._place, Path(self._charter.target), number):
                    self._place.confirm_origin()
            except (OSError, DamagedGeneration, UnusableTarget) as error:
                result.number = None
                result.undrained = list(_undrained(self._place, number, reason(error)))
        for name in copied:
            try:
                self._charter.check_target()
                result.done += self._drained_to.copies([name], wait_for)
            except (OSError, StateChanged) as error:
                result.undrained.append(UndrainedEntry(name, reason(error)))
        return result

    def _take(self, result: DrainResult | None) -> None:
        """Takes what became of a drain; None if its process died."""
        self._saver.pinned = set()
        if result is None:
            number, copied = self._under_way
            result = DrainResult(None, self._names.removed)
            result.undrained = [UndrainedEntry(name, _DIED) for name in copied]
            if number is not None:
                result.undrained += _undrained(self._place, number, _DIED)
        self._has_failed = bool(result.undrained)
        report, self._names.removed = self._report, result.removed
        self._add(
            undrained=tuple(result.undrained),
            drained_number=report.drained_number if result.number is None else result.number,
            findings={"beside": {**report.findings.get("beside", {}), **result.done.beside}},
            files=report.files + result.done.files,
            bytes_carried=report.bytes_carried + result.done.size_bytes,
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
        if self._drain is not None:
            self._drain.hurry()
        self._is_due = True
        self._drain_due(waits=True)
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
