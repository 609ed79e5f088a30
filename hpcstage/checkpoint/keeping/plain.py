"""Drains a generation to a directory on the shared file system, as plain files under the program's own names.

A drain is a restore: what is drained was verified block by block, and each checkpoint gets its name in one step, when
all of it is on the disk. Beside the files lies a description, the generation's manifest and table of blocks, by which
they are verified on any machine. A checkpoint that the program has removed is removed here, too, if it is as it was
drained and a newer one has come: the last one is never removed.
"""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from hpcstage.checkpoint.generations.files import (
    RESTORING,
    Files,
    GenerationPart,
    generation_path,
)
from hpcstage.checkpoint.generations.layout import BlockLayout
from hpcstage.checkpoint.generations.manifest import DamagedGeneration, EntryType, GenerationManifest, SavedEntry
from hpcstage.checkpoint.generations.reading import (
    BlockSource,
    GenerationReader,
    LocalSource,
    OpenGeneration,
    read_whole,
)
from hpcstage.checkpoint.generations.restoring import (
    making_in,
    newest_ns,
    place,
    remove_leftovers,
    restore,
    sync_directory,
    times_of,
)
from hpcstage.checkpoint.generations.state import FileTree
from hpcstage.checkpoint.generations.terms import CommitMeter, CommitPhase, CommitTerms
from hpcstage.errors import HpcstageError

DESCRIPTION = ".hpcstage-generation"
OURS = ".hpcstage-"
"""Names of DIR that begin so are not the program's."""
_GRAINS_NS = (1, 1_000, 1_000_000_000)
"""File systems keep times in ns, us or s."""


@dataclass(frozen=True)
class DrainedGeneration:
    """What a drain did."""

    number: int
    files: int = 0
    size_bytes: int = 0
    beside: Mapping[str, str] = field(default_factory=dict)
    """By name: the name under which a checkpoint lies, since somebody else's newer one has its own."""


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


def described(target: Path) -> OpenGeneration | None:
    """Returns the generation of which the files in a directory are; None where no description can be read."""
    with LocalSource(target / DESCRIPTION) as source, suppress(DamagedGeneration, OSError):
        if numbers := source.numbers():
            return GenerationReader(source).generation(max(numbers))
    return None


def drain_generation(source: BlockSource, number: int, target: Path, run_id: str, tree: Path) -> DrainedGeneration:
    """Brings a directory up to a generation; `tree` is where the program writes. Raises DamagedGeneration, or OSError
    where a file system fails; then each checkpoint there is whole, an old or a new one."""
    opened = GenerationReader(source).generation(number)
    before = described(target)
    if before is not None and before.manifest.created_ns > opened.manifest.created_ns:
        return DrainedGeneration(number)
    manifest = opened.manifest
    missing = {name: name for name in times_of(manifest) if not is_there(target, manifest, name)}
    done = DrainedGeneration(number)
    if missing:
        kept = restore(source, number, target, missing).kept
        ours = [name for name in kept if before is not None and is_there(target, before.manifest, name)]
        for name in ours:  # the program gave it an older time than that of what was drained before
            remove_entry(target, name)
        done = replace(done, beside={name: f"{name}.{run_id}" for name in kept if name not in ours})
        if kept:
            restore(source, number, target, {name: done.beside.get(name, name) for name in kept})
        sizes = [one.size_bytes for one in manifest.entries if _top(one) in missing and one.type is EntryType.FILE]
        done = replace(done, files=len(sizes), size_bytes=sum(sizes))
    if before is None or before.manifest != manifest:
        _describe(source, number, target)
    if before is not None:
        _remove_superseded(target, before.manifest, manifest, tree)
    return done


def names_in(directory: Path) -> list[str]:
    """Returns the checkpoints of a directory: entries whose names do not begin with a dot. Raises OSError."""
    return sorted(name for name in os.listdir(directory) if not name.startswith("."))


def is_there(directory: Path, manifest: GenerationManifest, name: str) -> bool:
    """Tells whether a directory has a checkpoint as a generation has it, as far as names, sizes and times tell."""
    wanted = [entry for entry in manifest.entries if _top(entry) == name]
    try:
        return all(_is_as(directory / one.name, one) for one in wanted) and len(wanted) == _count(directory / name)
    except OSError:
        return False


def damaged(directory: Path, opened: OpenGeneration) -> dict[str, str]:
    """Reads the plain files of a generation; returns those of its checkpoints that are not as they were saved."""
    bad = {}
    for name in times_of(opened.manifest):
        try:
            bad[name] = _difference(directory, opened, name)
        except OSError as error:
            bad[name] = f"{error.filename or name}: {error.strerror}"
        except HpcstageError as error:  # it is gone, or changes
            bad[name] = error.what
    return {name: why for name, why in bad.items() if why}


def place_copies(
    source: Path, names: Mapping[str, str], target: Path, pace: Callable[[int], object] | None = None
) -> tuple[str, ...]:
    """Copies checkpoints from directory to directory, each under the name that it has there; a newer one of the name
    stays. Returns those that were not placed. Raises OSError."""
    remove_leftovers(target)
    kept = []
    with making_in(target) as beside:
        for name, other in names.items():
            _copy(source / name, beside / name, pace or (lambda _: None))
            sync_directory(beside)
            if not place(beside / name, target / other, newest_ns(source / name)):
                kept.append(name)
        sync_directory(target)
    return tuple(kept)


def size_of(path: Path) -> int:
    """Returns the bytes of all files of a checkpoint. Raises OSError."""
    return sum(os.lstat(one).st_size for one in _below(path) if os.path.isfile(one) and not os.path.islink(one))


def remove_entry(target: Path, name: str) -> None:
    """Removes a checkpoint: it loses its name in one step. Raises OSError."""
    with making_in(target) as beside:
        os.rename(target / name, beside / name)
        sync_directory(target)


def _difference(directory: Path, opened: OpenGeneration, name: str) -> str:
    """Says in which way a checkpoint differs from what was saved; empty if it does not."""
    manifest, layout = opened.manifest, opened.layout
    wanted = [(index, one) for index, one in enumerate(manifest.entries) if _top(one) == name]
    found = FileTree(directory, (name,)).scan(Files())
    if [(one.name, one.type, one.target) for _, one in wanted] != [(e.name, e.type, e.target) for e in found.entries]:
        return "it has other files than were saved"
    for place_, (index, one) in enumerate(wanted):
        if found.entries[place_].size_bytes != one.size_bytes:
            return f"{one.name} has another size than was saved"
        if not one.size_bytes:
            continue
        lone = replace(found, entries=(found.entries[place_],), fingerprints=(found.fingerprints[place_],))
        blocks = layout.blocks(index)
        own = BlockLayout(layout.block_bytes, (layout.parts[index],))
        hashes = lone.hashed(own, CommitMeter(CommitTerms(), CommitPhase.READING, one.size_bytes))
        if (hashes != opened.table["hash"][blocks.start : blocks.stop]).any():
            return f"{one.name} has other bytes than were saved"
    return ""


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


def _remove_superseded(target: Path, before: GenerationManifest, now: GenerationManifest, tree: Path) -> None:
    """Removes checkpoints that the program removed, if a newer one has come. One that is being written again is in no
    generation, and stays."""
    old, new = times_of(before), times_of(now)
    gone = [name for name in old if name not in new and not os.path.lexists(tree / name)]
    if gone and max(new.values(), default=0) > max(old.values()):
        for name in gone:
            if is_there(target, before, name):
                remove_entry(target, name)


def _is_as(path: Path, entry: SavedEntry) -> bool:
    found = os.lstat(path)
    if entry.type is EntryType.DIRECTORY:
        return stat.S_ISDIR(found.st_mode)
    if entry.type is EntryType.LINK:
        return stat.S_ISLNK(found.st_mode) and os.readlink(path) == entry.target
    is_time = any(found.st_mtime_ns == entry.mtime_ns // grain * grain for grain in _GRAINS_NS)
    return stat.S_ISREG(found.st_mode) and found.st_size == entry.size_bytes and is_time


def _count(path: Path) -> int:
    return sum(1 for _ in _below(path))


def _below(path: Path) -> Iterator[Path]:
    yield path
    if path.is_dir() and not path.is_symlink():
        for name in sorted(os.listdir(path)):
            yield from _below(path / name)


def _copy(source: Path, target: Path, pace: Callable[[int], object]) -> None:
    """Copies a checkpoint with modes and times, and has it on the disk."""

    def copy_file(one: str, to: str) -> str:
        pace(os.lstat(one).st_size)
        shutil.copy2(one, to, follow_symlinks=False)
        if not os.path.islink(to):
            with Files().opened(to) as fd:
                os.fsync(fd)
        return to

    if source.is_dir() and not source.is_symlink():
        shutil.copytree(source, target, symlinks=True, copy_function=copy_file)
        for directory, _, _ in os.walk(target):
            sync_directory(Path(directory))
    else:
        copy_file(os.fspath(source), os.fspath(target))


def _top(entry: SavedEntry) -> str:
    return entry.name.partition("/")[0]
