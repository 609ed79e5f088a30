"""Drains what a program completed to a directory on the shared file system, as plain files under its own names.

A drain of a generation is a restore: all of it was verified block by block. A checkpoint that the program has removed
is removed here, too, if it is as it was drained and a newer one has come: the last one is never removed, nor is one
that the program never had.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hpcstage.checkpoint.generations.files import RESTORING, Files, GenerationPart, generation_path
from hpcstage.checkpoint.generations.manifest import EntryType, GenerationManifest
from hpcstage.checkpoint.generations.reading import BlockSource, GenerationReader, OpenGeneration, read_whole
from hpcstage.checkpoint.generations.restoring import making_in, restore, sync_directory, times_of
from hpcstage.checkpoint.keeping.plain import (
    DESCRIPTION,
    described,
    forget_beside,
    is_same,
    is_there,
    note_beside,
    place_copies,
    remove_entry,
    remove_torn,
    size_of,
    top_of,
)


@dataclass(frozen=True)
class DrainedEntries:
    """The result of a drain."""

    files: int = 0
    size_bytes: int = 0
    beside: Mapping[str, str] = field(default_factory=dict)
    """By name: the name under which a checkpoint lies, since somebody else's newer one has its own."""

    def __add__(self, other: DrainedEntries) -> DrainedEntries:
        beside = {**self.beside, **other.beside}
        return DrainedEntries(self.files + other.files, self.size_bytes + other.size_bytes, beside)


@dataclass
class ProgramNames:
    """The checkpoints that a program had at some time, and those that it removed although they were the newest."""

    seen: set[str]
    removed: dict[str, GenerationManifest] = field(default_factory=dict)
    """By name: the generation of which the one in the target is."""


@dataclass(frozen=True)
class PacedSource:
    """A source whose reads wait, so that a drain keeps below a rate."""

    source: BlockSource
    pace: Callable[[int], object]

    def numbers(self) -> Sequence[int]:
        """See BlockSource."""
        return self.source.numbers()

    def size_bytes(self, number: int, part: GenerationPart) -> int:
        """See BlockSource."""
        return self.source.size_bytes(number, part)

    def read_into(self, number: int, part: GenerationPart, view: memoryview, offset: int) -> int:
        """See BlockSource."""
        self.pace(len(view))
        return self.source.read_into(number, part, view, offset)


@dataclass(frozen=True)
class EntryDrain:
    """The way of checkpoints of one run from its local directory `tree` to the target. Of its methods each raises
    OSError where a file system fails; then each checkpoint of the target is whole, an old or a new one."""

    tree: Path
    target: Path
    run_id: str

    def generation(self, source: BlockSource, number: int, names: ProgramNames) -> DrainedEntries:
        """Brings the target up to a generation of a program. Raises DamagedGeneration."""
        opened = GenerationReader(source).generation(number)
        before = described(self.target)
        done = self._restored(source, opened, list(times_of(opened.manifest)), before)
        if before is None or before.manifest != opened.manifest:
            _describe(source, number, self.target)
        if before is not None:
            self._remove_superseded(before.manifest, opened.manifest, names)
        remove_torn(self.target, opened.manifest)
        return done

    def entries(self, source: BlockSource, number: int, names: Sequence[str]) -> DrainedEntries:
        """Brings some checkpoints of an older generation to the target. Raises DamagedGeneration."""
        return self._restored(source, GenerationReader(source).generation(number), names, described(self.target))

    def beside(self, source: BlockSource, number: int, names: Sequence[str]) -> DrainedEntries:
        """Brings checkpoints of a generation that the target does not have there as NAME.RUN-ID: another run went on
        from an older state. Raises DamagedGeneration."""
        manifest = GenerationReader(source).generation(number).manifest
        beside = {name: self.aside(name) for name in names if not is_there(self.target, manifest, name)}
        if beside:
            restore(source, number, self.target, beside)
        return _counted(manifest, beside.keys(), beside)

    def copies(self, names: Sequence[str], pace: Callable[[int], object] | None = None) -> DrainedEntries:
        """Copies complete checkpoints of the program's directory as they are. Raises StateChanged if one is written to
        meanwhile."""
        before, done = described(self.target), DrainedEntries()
        for name in names:
            if is_same(self.tree, self.target, name):
                continue
            is_ours = before is not None and is_there(self.target, before.manifest, name)
            kept = place_copies(self.tree, {name: name}, self.target, (name,) if is_ours else (), pace)
            beside = {name: self.aside(name) for name in kept}
            place_copies(self.tree, beside, self.target, kept, pace)
            forget_beside(self.target, {name} - set(kept))
            done += DrainedEntries(1, size_of(self.tree / name), beside)
        return done

    def aside(self, name: str, more: str = "") -> str:
        """Returns the name in the target of a checkpoint whose own is taken, or that is not complete; no program takes
        it for one."""
        other = f"{name}.{self.run_id}{more}"
        note_beside(self.target, other)
        return other

    def _restored(
        self, source: BlockSource, opened: OpenGeneration, names: Sequence[str], before: OpenGeneration | None
    ) -> DrainedEntries:
        manifest, target = opened.manifest, self.target
        missing = [name for name in names if not is_there(target, manifest, name)]
        if not missing:
            return DrainedEntries()
        ours = [name for name in missing if before is not None and is_there(target, before.manifest, name)]
        kept = restore(source, manifest.number, target, {name: name for name in missing}, ours).kept
        beside = {name: self.aside(name) for name in kept}
        if kept:
            restore(source, manifest.number, target, beside, kept)
        forget_beside(target, set(missing) - set(kept))
        return _counted(manifest, missing, beside)

    def _remove_superseded(self, before: GenerationManifest, now: GenerationManifest, names: ProgramNames) -> None:
        """Removes checkpoints that the program removed, each if a newer one has come. One that is being written again
        is in no generation, and stays."""
        new = times_of(now)
        newest_ns = max(new.values(), default=0)
        for name, made in (names.removed | {name: before for name in times_of(before) if name in names.seen}).items():
            if name in new or os.path.lexists(self.tree / name):
                names.removed.pop(name, None)
            elif times_of(made)[name] >= newest_ns:
                names.removed[name] = made
            else:
                names.removed.pop(name, None)
                if is_there(self.target, made, name):
                    remove_entry(self.target, name)


def _counted(manifest: GenerationManifest, names: Collection[str], beside: Mapping[str, str]) -> DrainedEntries:
    sizes = [one.size_bytes for one in manifest.entries if top_of(one) in names and one.type is EntryType.FILE]
    return DrainedEntries(len(sizes), sum(sizes), beside)


def _describe(source: BlockSource, number: int, target: Path) -> None:
    """Puts the description of a generation beside its files; those of others go."""
    directory = target / DESCRIPTION
    directory.mkdir(0o700, exist_ok=True)
    old = [name for name in os.listdir(directory) if name != f"{number:08}"]
    with making_in(directory) as beside:
        made = generation_path(beside, number)
        made.mkdir(0o700)
        for part in (GenerationPart.BLOCKS, GenerationPart.MANIFEST):
            Files().write_new(made / part, read_whole(source, number, part))
        if generation_path(directory, number).exists():
            os.rename(generation_path(directory, number), beside / "old")
        os.rename(made, generation_path(directory, number))
        sync_directory(directory)
        for name in old:
            if not name.startswith(RESTORING):
                os.rename(directory / name, beside / f"old-{name}")
