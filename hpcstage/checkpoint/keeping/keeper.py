"""Keeps the checkpoints of one run: puts the newest state into the directory, saves what is completed there, drains it.

Owns the order of a run, and the report. It works in a process of its own, one thing after the other: what may hang, as
a shared file system does, holds up nobody else. A generation is saved when a checkpoint has been completed; while one
is drained no other is saved, and the next then has all that came meanwhile.
"""

from __future__ import annotations

import os
import select
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from hpcstage.checkpoint.entries import CompleteEntries
from hpcstage.checkpoint.generations.files import GenerationId
from hpcstage.checkpoint.generations.manifest import DamagedGeneration, GenerationManifest
from hpcstage.checkpoint.generations.reading import BlockSource, GenerationReader, LocalSource
from hpcstage.checkpoint.generations.restoring import NothingToRestore, UnusableTarget, restore_newest, times_of
from hpcstage.checkpoint.generations.state import FileTree, StateChanged
from hpcstage.checkpoint.generations.store import GenerationStore, SavedGeneration
from hpcstage.checkpoint.generations.terms import CommitProgress, CommitTerms, NoRoom
from hpcstage.checkpoint.keeping.facts import (
    LOCAL_KEPT,
    CheckpointCharter,
    CheckpointPlace,
    KeepingReport,
    SavedRow,
    UndrainedEntry,
)
from hpcstage.checkpoint.keeping.plain import (
    DrainedGeneration,
    PacedSource,
    damaged,
    described,
    drain_generation,
    is_there,
    names_in,
    place_copies,
    size_of,
)
from hpcstage.units import format_size

SHARE = 0.5
"""The share of one processor that saving and draining may take while the command runs."""
ROOM_SHARE = 0.5
"""The share of what is free on the local disk that one generation, or the state at the start, may take."""
END_S = 5.0
"""The longest wait at the end until the command's entries are closed."""
RETRY_S = 5.0
MOST_ROWS = 100
_LOOK_S = 0.05


class CannotKeep(Exception):
    """The checkpoints cannot be kept on the local disk; the message says why. The program uses the target itself."""


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


class CheckpointKeeper:
    """Keeps one directory. `commands` is a descriptor that has a byte when the command has ended."""

    def __init__(
        self,
        place: CheckpointPlace,
        commands: int,
        tell: Callable[[KeepingReport], object],
        pace: Callable[[int], object] | None = None,
    ) -> None:
        """`tell` hears each report; `pace` delays a drain. Raises OSError, ValueError and HpcstageError."""
        self._place = place
        self._charter = CheckpointCharter.load(place)
        self._target = Path(self._charter.target)
        self._commands = commands
        self._tell = tell
        self._pace = pace
        self._store = GenerationStore(place.store)
        self._capped = ProcessorShare(SHARE, self._is_ending)
        self._report = KeepingReport()
        self._since_drain = 0
        self._retry_at = 0.0

    # ---- the start

    def begin(self) -> None:
        """Puts the newest state that can be restored into the directory. Raises CannotKeep."""
        try:
            self._charter.check_target()
            restored = self._restored_locally() or self._copied_from_target()
        except OSError as error:
            raise CannotKeep(f"{error.filename or self._target}: {error.strerror}") from None
        self._add(restored=restored)

    def _restored_locally(self) -> str:
        """Restores the newest state that a killed run left on this node and did not drain; says what it is."""
        drained = described(self._target)
        found = [(newest, Path(base)) for base in self._charter.earlier if (newest := _newest(Path(base))) is not None]
        for manifest, base in sorted(found, key=lambda one: one[0].created_ns, reverse=True):
            if drained is not None and drained.manifest.created_ns >= manifest.created_ns:
                break
            with LocalSource(CheckpointPlace(base).store) as source, suppress(NothingToRestore, UnusableTarget):
                restored = restore_newest(source, self._place.tree)
                self._refuse(*(one.line() for one in restored.refused))
                return f"generation {restored.number} of a killed run, verified, from this node"
        return ""

    def _copied_from_target(self) -> str:
        """Copies what the target holds; says what it is. What its description says is verified."""
        names = names_in(self._target)
        size_bytes = sum(size_of(self._target / name) for name in names)
        room_bytes = self._room_bytes()
        if size_bytes > room_bytes:
            sizes = f"{format_size(size_bytes)}, and the local disk has room for {format_size(room_bytes)}"
            raise CannotKeep(f"{self._target} holds {sizes}")
        place_copies(self._target, {name: name for name in names}, self._place.tree)
        opened = described(self._target)
        if opened is None:
            return f"{len(names)} from {self._target}, not verified" if names else ""
        present = {name for name in times_of(opened.manifest) if is_there(self._target, opened.manifest, name)}
        bad = {name: why for name, why in damaged(self._place.tree, opened).items() if name in present}
        for name, why in bad.items():
            self._refuse(f"{name} in {self._target} was damaged, and is not shown: {why}")
            _remove(self._place.tree, name)
        return f"generation {opened.manifest.number}, {len(present) - len(bad)} of {len(names)} verified, from DIR"

    # ---- while the command runs

    def keep(self) -> None:
        """Saves and drains until the command has ended, and then what is left. Raises OSError if the directory cannot
        be watched."""
        tree = self._place.tree
        entries = CompleteEntries(tree, time.monotonic(), known=names_in(tree))
        try:
            self._tell(self._report)
            revision = -1
            while not self._is_ending():
                now = time.monotonic()
                entries.look(now)
                if entries.revision != revision and now >= self._retry_at:
                    revision = entries.revision if self._save(entries.names()) else -1
                self._wait(entries)
            entries.look_at_once(time.monotonic())
            is_gone, completed = entries.is_gone, entries.names()
        finally:
            entries.close()
        self._end(completed, is_gone=is_gone)

    def _wait(self, entries: CompleteEntries) -> None:
        now = time.monotonic()
        wait_s = entries.wake_after(now)
        if self._retry_at > now:
            wait_s = self._retry_at - now if wait_s is None else max(wait_s, 0.0)
        select.select([self._commands, *([] if entries.is_gone else [entries.fd])], [], [], wait_s)

    def _is_ending(self) -> bool:
        return bool(select.select([self._commands], [], [], 0)[0])

    def _save(self, names: tuple[str, ...]) -> bool:
        """Saves a generation of some entries, if there is anything new in them. Tells whether nothing is to be tried
        again."""
        if not names or self._is_saved(names):
            return True
        self._capped.begin()
        began_s = time.monotonic()
        try:
            saved = self._commit(names)
        except StateChanged:
            self._retry_at = time.monotonic() + _LOOK_S
            return False
        except (NoRoom, OSError, DamagedGeneration) as error:
            self._refuse(f"a generation could not be saved: {_reason(error)}")
            self._retry_at = time.monotonic() + RETRY_S
            return False
        rows = (*self._report.saved, SavedRow.of(saved, time.monotonic() - began_s))[-MOST_ROWS:]
        self._add(saved=rows, saved_count=self._report.saved_count + 1)
        self._since_drain += 1
        if self._since_drain >= (self._charter.drain_every or 1):
            self._drain(saved.manifest.number)
        self._store.prune(LOCAL_KEPT)
        return True

    def _commit(self, names: tuple[str, ...]) -> SavedGeneration:
        terms = CommitTerms(budget_bytes=self._room_bytes(), progress=self._capped)
        tree = FileTree(self._place.tree, names)
        number = max(self._store.next_number(), self._after_earlier())
        try:
            return self._store.commit(tree, GenerationId.new(number), terms)
        except NoRoom:
            if not self._store.prune(1):
                raise
        return self._store.commit(tree, GenerationId.new(number), replace(terms, budget_bytes=self._room_bytes()))

    def _after_earlier(self) -> int:
        """Returns a number after those of the generations before this run: the numbers of a target grow."""
        drained = described(self._target)
        known = [0 if drained is None else drained.manifest.number]
        known += [found.number for base in self._charter.earlier if (found := _newest(Path(base))) is not None]
        return max(known) + 1

    def _is_saved(self, names: tuple[str, ...]) -> bool:
        """Tells whether the newest generation, here or in the target, is what these entries are."""
        drained = described(self._target)
        newest = _newest(self._place.base) or (drained.manifest if drained is not None else None)
        if newest is None or set(times_of(newest)) != set(names):
            return False
        return all(is_there(self._place.tree, newest, name) for name in names)

    def _drain(self, number: int) -> bool:
        """Drains a generation. Tells whether it is in the target."""
        try:
            self._charter.check_target()
            with LocalSource(self._place.store) as source:
                done = self._drained(source, number)
        except (OSError, DamagedGeneration, UnusableTarget) as error:
            self._add(undrained=self._all_undrained(number, _reason(error)))
            return False
        self._since_drain = 0
        report = self._report
        beside = {**report.findings.get("beside", {}), **(done.beside or {})}
        self._add(
            undrained=(),
            drained_number=number,
            findings={"beside": beside},
            files=report.files + done.files,
            bytes_carried=report.bytes_carried + done.size_bytes,
        )
        return True

    def _drained(self, source: BlockSource, number: int) -> DrainedGeneration:
        run_id = self._charter.run_id
        return drain_generation(self._paced(source), number, self._target, run_id, self._place.tree)

    def _paced(self, source: BlockSource) -> BlockSource:
        def wait(size_bytes: int) -> None:
            self._capped(size_bytes)
            if self._pace is not None:
                self._pace(size_bytes)

        return PacedSource(source, wait)

    def _all_undrained(self, number: int, why: str) -> tuple[UndrainedEntry, ...]:
        with LocalSource(self._place.store) as source:
            names = times_of(GenerationReader(source).manifest(number))
        return tuple(UndrainedEntry(name, why) for name in names)

    # ---- the end

    def _end(self, completed: tuple[str, ...], *, is_gone: bool) -> None:
        """Saves and drains what is left. After an orderly end all is complete that is closed; otherwise what was not
        complete before may be half-written."""
        self._retry_at = 0.0
        is_orderly = os.read(self._commands, 1) == b"0"
        if is_gone and not self._place.tree.is_dir():
            self._add(is_gone=True)
            completed = ()
        elif is_orderly:
            completed = self._all_closed()
        deadline = time.monotonic() + END_S
        while not self._save(completed) and time.monotonic() < deadline:
            time.sleep(_LOOK_S)
        newest = _newest(self._place.base)
        if newest is not None and self._report.drained_number != newest.number:
            self._drain(newest.number)
        if not self._report.is_gone:
            self._add_leftovers(newest)
        self._tell(self._report)
        self._store.close()

    def _all_closed(self) -> tuple[str, ...]:
        """Returns the entries that nobody has open: the command has ended. Waits for a program that lives on."""
        entries = CompleteEntries(self._place.tree, time.monotonic(), 0.0)
        try:
            deadline = time.monotonic() + END_S
            while True:
                entries.look(time.monotonic())
                names = entries.names()
                if list(names) == names_in(self._place.tree) or time.monotonic() >= deadline:
                    return names
                time.sleep(_LOOK_S)
        finally:
            entries.close()

    def _add_leftovers(self, newest: GenerationManifest | None) -> None:
        """Puts entries that are in no generation beside the others in the target: nothing is lost, and no resume takes
        them for checkpoints."""
        found = leftovers(self._place, newest, self._target)
        missing, beside = place_leftovers(self._place, found, self._charter)
        findings = {"beside": {**self._report.findings.get("beside", {}), **beside}}
        self._add(unclosed=tuple(found), findings=findings, undrained=(*self._report.undrained, *missing))

    # ---- parts

    def _room_bytes(self) -> int:
        found = os.statvfs(self._place.base)
        return int(found.f_bavail * found.f_frsize * ROOM_SHARE)

    def _refuse(self, *lines: str) -> None:
        self._add(refused=(*self._report.refused, *lines)[-MOST_ROWS:])

    def _add(self, **news: object) -> None:
        self._report = replace(self._report, **news)  # type: ignore[arg-type]
        self._tell(self._report)


def leftovers(place: CheckpointPlace, newest: GenerationManifest | None, target: Path) -> list[str]:
    """Returns the entries of the directory that are not in the newest generation as they are, here or in the target."""
    drained = described(target)
    known = [one for one in (newest, None if drained is None else drained.manifest) if one is not None]
    with suppress(OSError):
        names = names_in(place.tree)
        return [name for name in names if not any(_has(place.tree, one, name) for one in known)]
    return []


def place_leftovers(
    place: CheckpointPlace, names: list[str], charter: CheckpointCharter
) -> tuple[list[UndrainedEntry], dict[str, str]]:
    """Copies entries to the target as NAME.RUN-ID, those that it does not hold as they are. Returns what could not be
    copied, and the new names."""
    missing, beside = [], {}
    target = Path(charter.target)
    for name in names:
        other = f"{name}.{charter.run_id}"
        try:
            charter.check_target()
            if not _is_same(place.tree / name, target / name):
                place_copies(place.tree, {name: other}, target)
                beside[name] = other
        except OSError as error:
            missing.append(UndrainedEntry(name, _reason(error)))
    return missing, beside


def _has(tree: Path, manifest: GenerationManifest, name: str) -> bool:
    return name in times_of(manifest) and is_there(tree, manifest, name)


def _is_same(one: Path, other: Path) -> bool:
    """Tells whether two entries are files of one size and time: a copy that was made at the start."""
    try:
        ours, theirs = os.lstat(one), os.lstat(other)
    except OSError:
        return False
    is_file = not (one.is_dir() or other.is_dir())
    return is_file and (ours.st_size, ours.st_mtime_ns) == (theirs.st_size, theirs.st_mtime_ns)


def _newest(base: Path) -> GenerationManifest | None:
    """Returns the manifest of the newest generation below a base whose manifest can be read."""
    with LocalSource(CheckpointPlace(base).store) as source:
        reader = GenerationReader(source)
        for number in reversed(source.numbers()):
            with suppress(DamagedGeneration):
                return reader.manifest(number)
    return None


def _remove(tree: Path, name: str) -> None:
    from hpcstage.checkpoint.keeping.plain import remove_entry

    with suppress(OSError):
        remove_entry(tree, name)


def _reason(error: Exception) -> str:
    if isinstance(error, OSError):
        return f"{error.filename or 'a file'}: {error.strerror or error}"
    return getattr(error, "what", str(error))
