"""Works with the plain files of checkpoints in a directory: names, comparisons, copies, removals.

In DIR each checkpoint gets or loses its name in one step (see `upload.making`). Beside the files there lies a
description, a generation's manifest and table of blocks, by which they are verified on any machine.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from hpcstage.checkpoint.entries import mark_of
from hpcstage.checkpoint.generations.files import OURS, Files, generation_path
from hpcstage.checkpoint.generations.layout import BlockLayout
from hpcstage.checkpoint.generations.manifest import DamagedGeneration, EntryType, GenerationManifest, SavedEntry
from hpcstage.checkpoint.generations.reading import GenerationReader, LocalSource, OpenGeneration
from hpcstage.checkpoint.generations.restoring import times_of
from hpcstage.checkpoint.generations.state import FileTree, StateChanged, link_target
from hpcstage.checkpoint.job.place import HIDDEN
from hpcstage.errors import HpcstageError
from hpcstage.upload.copying import Pace, Source, finish, sync_directory
from hpcstage.upload.making import Making
from hpcstage.writing import replace_text

DESCRIPTION = ".hpcstage-generation"
RUNS = "runs"
"""The name of a file in the description; see `runs_in`."""
BESIDE = ".hpcstage-beside"
"""The directory below DIR whose entries have the names of what no program may take for a checkpoint."""
_GRAINS_NS = (1, 1_000, 1_000_000_000)
"""File systems keep times in ns, us or s."""


def names_in(directory: Path) -> list[str]:
    """Returns the program's entries of a directory. Raises OSError."""
    return sorted(name for name in os.listdir(directory) if not name.startswith(OURS))


def shown_in(directory: Path) -> list[str]:
    """Returns the program's entries of a directory that are not hidden. Raises OSError."""
    return [name for name in names_in(directory) if not name.startswith(HIDDEN)]


def checkpoints_in(target: Path) -> list[str]:
    """Returns the entries of DIR that a program finds at its start: of hidden ones those that an earlier run completed,
    and none that a drain put beside others. Raises OSError."""
    opened = described(target)
    saved = {} if opened is None else times_of(opened.manifest)
    return [
        name
        for name in names_in(target)
        if (not name.startswith(HIDDEN) or name in saved) and not is_beside(target, name)
    ]


def of_others(target: Path, seen: Collection[str] | None, made: Collection[str]) -> list[str]:
    """Returns the entries of DIR that somebody else put there: no run had them, neither at its start (`seen`; None
    where nobody knows) nor in a state that is described or was just restored (`made`). Raises OSError."""
    if seen is None:
        return []
    opened = described(target)
    known = {*seen, *made, *({} if opened is None else times_of(opened.manifest))}
    return [name for name in checkpoints_in(target) if name not in known]


def note_beside(target: Path, name: str) -> None:
    """Notes that an entry of DIR is one that no program may take for a checkpoint. Raises OSError."""
    (target / BESIDE).mkdir(0o700, exist_ok=True)
    (target / BESIDE / name).touch()


def is_beside(target: Path, name: str) -> bool:
    """Tells whether that is noted."""
    return os.path.lexists(target / BESIDE / name)


def forget_beside(target: Path, names: Iterable[str]) -> None:
    """Notes that entries of DIR are checkpoints of the program again. Raises OSError."""
    for name in names:
        (target / BESIDE / name).unlink(missing_ok=True)


def note_torn(target: Path, name: str, of: str) -> None:
    """Notes that an entry beside others is a torn version of a checkpoint, which nobody needs when a newer one of its
    name is there. Raises OSError."""
    replace_text(target / BESIDE / name, json.dumps([of, mark_of(target, name)]), 0o600)


def remove_torn(making: Making, now: GenerationManifest) -> None:
    """Removes torn versions of checkpoints of which the target has newer ones, each if it is as it was left. Raises
    OSError."""
    times, target = times_of(now), Path(making.target.root)
    with suppress(FileNotFoundError):
        for name in os.listdir(target / BESIDE):
            with suppress(ValueError, FileNotFoundError):
                of, mark = json.loads((target / BESIDE / name).read_text())
                if mark == mark_of(target, name) and times.get(of, 0) > newest_ns(target / name):
                    making.remove(name)
                    forget_beside(target, [name])


def described(target: Path) -> OpenGeneration | None:
    """Returns the generation of which the files in a directory are; None where no description can be read."""
    with LocalSource(target / DESCRIPTION) as source, suppress(DamagedGeneration, OSError):
        if numbers := source.numbers():
            return GenerationReader(source).generation(max(numbers))
    return None


def runs_in(target: Path) -> dict[str, int]:
    """Returns the run that made the generation which is described, then those from which it went on, each with the time
    up to which that has what they made; none where that is not known."""
    with LocalSource(target / DESCRIPTION) as source, suppress(OSError, ValueError, TypeError, AttributeError):
        text = (generation_path(target / DESCRIPTION, max(source.numbers())) / RUNS).read_bytes()
        return {str(run_id): int(time_ns) for run_id, time_ns in json.loads(text).items()}
    return {}


def described_run(target: Path) -> str:
    """Returns the run whose generation is described; empty where that is not known."""
    return next(iter(runs_in(target)), "")


def is_there(directory: Path, manifest: GenerationManifest, name: str) -> bool:
    """Tells whether a directory has a checkpoint as a generation has it, as far as names, sizes and times tell."""
    return are_there(directory, name, [entry for entry in manifest.entries if top_of(entry) == name])


def are_there(directory: Path, name: str, wanted: Sequence[SavedEntry]) -> bool:
    """Tells whether these are the entries of a checkpoint in a directory, as far as names, sizes and times tell."""
    try:
        return all(_is_as(directory, one) for one in wanted) and len(wanted) == _count(directory / name)
    except OSError:
        return False


def is_carried(directory: Path, name: str) -> bool:
    """Tells whether an entry is there and is none of those that are left out: a socket, a pipe, a device. Raises
    OSError."""
    return bool(FileTree(directory, (name,)).scan(Files()).entries)


def is_same(one: Path, other: Path, name: str, there: str | None = None, known_as: str = "") -> bool:
    """Tells whether two directories have the same checkpoint, in the other one as `there` if that is given, as far as
    names, sizes and times tell. `known_as` is what the program knew the first one as, if that was moved."""
    try:
        found = FileTree(one, (name,), known_as).scan(Files()).entries
    except (OSError, HpcstageError):
        return False
    other_name = there or name
    return are_there(other, other_name, [replace(e, name=other_name + e.name[len(name) :]) for e in found])


def damaged(directory: Path, opened: OpenGeneration) -> dict[str, str]:
    """Reads the plain files of a generation; returns those of its checkpoints that are there and are not as they were
    saved."""
    bad = {}
    for name in filter(lambda name: os.path.lexists(directory / name), times_of(opened.manifest)):
        try:
            bad[name] = _difference(directory, opened, name)
        except OSError as error:
            bad[name] = f"{error.filename or name}: {error.strerror}"
        except StateChanged:
            bad[name] = "it changed while it was read"
    return {name: why for name, why in bad.items() if why}


def copy_entries(
    source: Path, names: Iterable[str], to: Path, pace: Pace = lambda _: None, known_as: str = ""
) -> list[str]:
    """Copies checkpoints to a directory in which nothing has their names. Returns those that are there, and has them on
    the disk. `known_as` is what the program knew the source as, if that was moved. Raises OSError, and StateChanged if
    one changes meanwhile."""
    copied = []
    for name in names:
        found = FileTree(source, (name,)).scan(Files())
        if found.entries:
            _copy(source, name, to, pace, known_as)
            found.check_unchanged()
            copied.append(name)
    sync_directory(to)
    return copied


def give_name(making: Making, name: str, suffix: str, time_ns: float | None) -> str:
    """Gives an entry that was made its name, unless something that is not older than `time_ns` has it, or it must not
    have it (None): then NAME.SUFFIX, which nobody else has. Returns the name. Raises OSError."""
    root, other = Path(making.target.root), f"{name}.{suffix}"

    def places() -> Iterator[str]:
        if time_ns is not None:
            yield name
        note_beside(root, other)
        yield other

    place = making.give(name, places(), lambda place: place == other or newest_ns(root / place) < (time_ns or 0))
    if place is None:
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), os.fspath(root / other))
    if place == name:
        forget_beside(root, [name])
    return place


def give_newer(making: Making, names: Iterable[str]) -> list[str]:
    """Gives entries that were made their names where nothing has them that is not older. Returns these. Raises
    OSError."""
    root, made = Path(making.target.root), making.path

    def is_given(name: str) -> bool:
        made_ns = newest_ns(made / name)
        return making.give(name, [name], lambda place: newest_ns(root / place) < made_ns) is not None

    return [name for name in names if is_given(name)]


def size_of(path: Path) -> int:
    """Returns the bytes of all files of a checkpoint. Raises OSError."""
    return sum(os.lstat(one).st_size for one in _below(path) if os.path.isfile(one) and not os.path.islink(one))


def newest_ns(path: Path) -> int:
    """Returns the latest time at which a checkpoint, or anything below it, was modified. Raises OSError."""
    return max((os.lstat(one).st_mtime_ns for one in _below(path)), default=0)


def top_of(entry: SavedEntry) -> str:
    """Returns the checkpoint to which an entry belongs."""
    return entry.name.partition("/")[0]


def _difference(directory: Path, opened: OpenGeneration, name: str) -> str:
    """Says in which way a checkpoint differs from what was saved; empty if it does not."""
    manifest, layout = opened.manifest, opened.layout
    wanted = [(index, one) for index, one in enumerate(manifest.entries) if top_of(one) == name]
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
        own = BlockLayout(layout.block_bytes, (layout.sizes[index],))
        if (lone.hashed(own) != opened.table["hash"][blocks.start : blocks.stop]).any():
            return f"{one.name} has other bytes than were saved"
    return ""


def _is_as(directory: Path, entry: SavedEntry) -> bool:
    path = directory / entry.name
    found = os.lstat(path)
    if entry.type is EntryType.DIRECTORY:
        return stat.S_ISDIR(found.st_mode)
    if entry.type is EntryType.LINK:
        return stat.S_ISLNK(found.st_mode) and link_target(directory, entry.name, os.readlink(path)) == entry.target
    is_time = any(found.st_mtime_ns == entry.mtime_ns // grain * grain for grain in _GRAINS_NS)
    return stat.S_ISREG(found.st_mode) and found.st_size == entry.size_bytes and is_time


def _count(path: Path) -> int:
    return sum(1 for _ in _below(path))


def _below(path: Path) -> Iterator[Path]:
    """Yields a file, link or directory with all below it that is one of these. Raises OSError."""
    mode = os.lstat(path).st_mode
    if stat.S_ISREG(mode) or stat.S_ISLNK(mode) or stat.S_ISDIR(mode):
        yield path
    if stat.S_ISDIR(mode):
        for name in sorted(os.listdir(path)):
            yield from _below(path / name)


def _copy(directory: Path, name: str, to: Path, pace: Pace, known_as: str) -> None:
    """Copies a checkpoint with modes and times, and has it on the disk. Sockets, pipes and devices are left out."""
    path, made = directory / name, to / name
    status = os.lstat(path)
    if stat.S_ISLNK(status.st_mode):
        made.symlink_to(link_target(directory, name, os.readlink(path), known_as))
        os.utime(made, ns=(status.st_atime_ns, status.st_mtime_ns), follow_symlinks=False)
    elif stat.S_ISDIR(status.st_mode):
        made.mkdir(0o700)
        for below in sorted(os.listdir(path)):
            _copy(directory, f"{name}/{below}", to, pace, known_as)
        with Files().opened(made) as fd:
            finish(fd, status)
    elif stat.S_ISREG(status.st_mode):
        with Source(os.fspath(path), can_seal=False) as source, Files().created(made) as fd:
            source.copy(fd, pace, with_sums=False)
            finish(fd, source.status)
