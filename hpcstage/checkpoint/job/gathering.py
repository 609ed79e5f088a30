"""Brings the shares of a job's nodes together: in the target, where they get their names at once, and on a local disk.

Owns a directory in the target below which each node puts its share, and the order there: all shares are verified and on
the disk before the first of them gets its name. What a killed run left there, the next one removes.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from hpcstage.checkpoint.generations.files import Files, GenerationId, GenerationPart, generation_path
from hpcstage.checkpoint.generations.manifest import EntryType, GenerationManifest
from hpcstage.checkpoint.generations.reading import BlockSource, GenerationReader, OpenGeneration, read_whole
from hpcstage.checkpoint.generations.restoring import (
    NEWEST_NS,
    making_in,
    place,
    remove_leftovers,
    restore,
    sync_directory,
    times_of,
)
from hpcstage.checkpoint.job.joining import Joined, describe, join, share_of
from hpcstage.checkpoint.job.ledger import JobGeneration
from hpcstage.checkpoint.job.plain import (
    DESCRIPTION,
    HIDDEN,
    OURS,
    PARTS,
    described,
    forget_beside,
    is_beside,
    is_there,
    note_beside,
    note_run,
    parts_in,
    remove_entry,
)

SHARES = f"{OURS}shares-"
"""The names of the directories in the target that hold shares begin so."""
_WHOLE = "whole"
"""The name of a file beside the description of a share that is whole."""
_OF_TARGET = ""
"""Stands for the target among the nodes that have a share."""


@dataclass(frozen=True)
class Share:
    """The entries that one node has of a generation."""

    node: str
    number: int
    source: BlockSource
    names: frozenset[str]


@dataclass
class Whole:
    """All shares of a generation, joined."""

    joined: Joined
    opened: list[OpenGeneration]
    shares: list[Share]


def without(shares: Iterable[Share], gone: Collection[str]) -> list[Share]:
    """Returns shares without some entries."""
    return [Share(one.node, one.number, one.source, left) for one in shares if (left := one.names.difference(gone))]


def opened_whole(shares: Sequence[Share], preferred: str = "") -> Whole:
    """Reads what shares hold, and joins it. Raises DamagedGeneration."""
    opened = [GenerationReader(one.source).generation(one.number) for one in shares]
    listed = [
        share_of(one.node, generation, one.names, index)
        for index, (one, generation) in enumerate(zip(shares, opened, strict=True))
    ]
    return Whole(join(listed, preferred), opened, list(shares))


def with_target(whole: Whole, names: Collection[str], target: Path) -> Whole:
    """Adds what the target has of entries that nobody else has."""
    before, count = described(target), len(whole.opened)
    if before is None:
        return whole
    listed = [[one.source for one in whole.joined.entries if one.source.share == index] for index in range(count)]
    return Whole(join([*listed, share_of(_OF_TARGET, before, names, count)]), [*whole.opened, before], whole.shares)


def bring(share: Share, into: Path, names: Collection[str]) -> None:
    """Restores entries of a share, verified, into a directory of its own. Raises DamagedGeneration and OSError."""
    restore(share.source, share.number, into, {name: name for name in sorted(share.names & frozenset(names))})


def build(joined: Joined, places: Mapping[int, Path], into: Path, names: Collection[str]) -> None:
    """Moves the entries of some names from the directories of their shares to where they are joined."""
    made: list[tuple[Path, int, int]] = []
    for one in joined.entries:
        if one.entry.name.partition("/")[0] not in names:
            continue
        path = into / one.entry.name
        if one.entry.type is EntryType.DIRECTORY:
            path.mkdir(0o700)
            made.append((path, one.entry.mode, one.entry.mtime_ns))
        else:
            source = places[one.source.share] / one.source.entry.name
            _make_writable(source.parent)
            os.rename(source, path)
    for path, mode, mtime_ns in reversed(made):
        sync_directory(path)
        os.chmod(path, mode)
        os.utime(path, ns=(mtime_ns, mtime_ns))
    sync_directory(into)


def _make_writable(directory: Path) -> None:
    """Lets a name be taken out of a directory that the program made unwritable; it goes afterwards."""
    if not os.stat(directory).st_mode & 0o200:
        os.chmod(directory, 0o700)


def tops_of(joined: Joined) -> dict[str, set[str]]:
    """Returns by the name that an entry had in its share the names directly below the directory that it got."""
    found: dict[str, set[str]] = {}
    for one in joined.entries:
        found.setdefault(one.source.entry.name.partition("/")[0], set()).add(one.entry.name.partition("/")[0])
    return found


# ---- on a local disk


def restore_whole(whole: Whole, base: Path, tree: Path) -> None:
    """Puts a whole into a directory on the local disk. Raises DamagedGeneration and OSError; then the directory has no
    part of it."""
    arriving = base / "arriving"
    _clear(arriving)
    arriving.mkdir(0o700)
    try:
        places: dict[int, Path] = {}
        for index, share in enumerate(whole.shares):
            places[index] = arriving / f"{index}"
            bring(share, places[index], share.names)
        made = arriving / "whole"
        made.mkdir(0o700)
        names = {one.entry.name.partition("/")[0] for one in whole.joined.entries}
        build(whole.joined, places, made, names)
        for name in sorted(names):
            os.rename(made / name, tree / name)
        sync_directory(tree)
    finally:
        _clear(arriving)


def _clear(path: Path) -> None:
    for directory, _, _ in os.walk(path):
        with suppress(OSError):
            os.chmod(directory, 0o700)
    shutil.rmtree(path, ignore_errors=True)


# ---- in the target


@dataclass(frozen=True)
class PlacedWhole:
    """The result of giving a whole its names in the target."""

    files: int
    size_bytes: int
    beside: Mapping[str, str]


@dataclass(frozen=True)
class Gathering:
    """The directory in the target below which the shares of one generation come together."""

    target: Path
    name: str
    run_id: str

    @property
    def path(self) -> Path:
        """The directory."""
        return self.target / f"{SHARES}{self.name}"

    def of(self, node: str, number: int) -> Path:
        """Returns the directory of a share."""
        return self.path / f"{number:08}" / node.replace("/", "_")

    def put(self, share: Share, names: Collection[str]) -> None:
        """Puts a share there, as far as its entries are among the names. Raises DamagedGeneration and OSError."""
        directory = self.of(share.node, share.number)
        for one in (self.path, directory.parent):
            one.mkdir(0o700, exist_ok=True)
        _clear(directory)
        self._note(share)
        bring(share, directory, names)
        (self.noted(share.node, share.number) / _WHOLE).touch()
        sync_directory(directory.parent)
        sync_directory(self.path)

    def has(self, node: str, number: int) -> bool:
        """Tells whether all of a share is there, verified."""
        return (self.noted(node, number) / _WHOLE).exists()

    def noted(self, node: str, number: int) -> Path:
        """Returns the directory with the description of a share, for who cannot read its store."""
        return self.of(f"{node}.description", number)

    def _note(self, share: Share) -> None:
        directory = self.noted(share.node, share.number)
        _clear(directory)
        made = generation_path(directory, share.number)
        made.mkdir(0o700, parents=True)
        for part in (GenerationPart.BLOCKS, GenerationPart.MANIFEST):
            Files().write_new(made / part, read_whole(share.source, share.number, part))

    def give_names(
        self, whole: Whole, generation: JobGeneration, names: Collection[str], *, is_behind: bool = False
    ) -> PlacedWhole:
        """Gives the entries of some names, all of whose shares are there, their names in the target, each at once;
        where the target has a later state of another run (`is_behind`), NAME.RUN-ID. Raises OSError; then each entry of
        the target is whole, an old or a new one."""
        before = described(self.target)
        now = describe(
            whole.joined, whole.opened, GenerationId(generation.number, generation.attempt), generation.created_ns
        )
        tops = tops_of(whole.joined)
        wanted = {top for name in names for top in tops.get(name, ())}
        beside: dict[str, str] = {}
        remove_leftovers(self.target)
        with making_in(self.target) as made:
            places = {index: self.of(one.node, one.number) for index, one in enumerate(whole.shares)}
            build(whole.joined, places, made, wanted)
            times = times_of(now.manifest)
            for top in sorted(wanted):
                is_ours = before is not None and is_there(self.target, before.manifest, top)
                if (is_behind or not is_ours) and is_there(self.target, now.manifest, top):
                    continue
                if not is_behind and place(made / top, self.target / top, NEWEST_NS if is_ours else times[top]):
                    forget_beside(self.target, [top])
                else:
                    beside[top] = f"{top}.{self.run_id}"
                    note_beside(self.target, beside[top])
                    place(made / top, self.target / beside[top], NEWEST_NS)
            for own, other in whole.joined.beside.items():
                beside.setdefault(own, other)
                if "/" not in other:
                    note_beside(self.target, other)
            sync_directory(self.target)
        if not is_behind:
            known = {} if before is None else parts_in(self.target, before.manifest.number)
            parts = {name: sorted(generation.marks(name)) for name in sorted(generation.names)}
            self._describe(now, parts | {name: known[name] for name in generation.put if name in known})
        sizes = [e.size_bytes for e in now.manifest.entries if e.name.partition("/")[0] in wanted]
        return PlacedWhole(len(sizes), sum(sizes), beside)

    def remove(self) -> None:
        """Removes the directory."""
        _clear(self.path)

    def _describe(self, opened: OpenGeneration, parts: Mapping[str, list[str]]) -> None:
        """Puts the description of the generation beside its files; that of the one before goes. `parts` are the nodes
        that have a part of each entry."""
        number, directory = opened.manifest.number, self.target / DESCRIPTION
        directory.mkdir(0o700, exist_ok=True)
        old = os.listdir(directory)
        with making_in(directory) as beside:
            made = generation_path(beside, number)
            made.mkdir(0o700)
            files = Files()
            files.write_new(made / GenerationPart.BLOCKS, opened.table.tobytes())
            files.write_new(made / GenerationPart.MANIFEST, opened.manifest.to_bytes())
            files.write_new(made / PARTS, json.dumps(parts).encode())
            for name in old:
                if (directory / name).is_dir() and name.isdecimal():
                    os.rename(directory / name, beside / f"old-{name}")
            os.rename(made, generation_path(directory, number))
            note_run(self.target, self.run_id, opened.manifest.id)
            sync_directory(directory)


def remove_stale(target: Path) -> None:
    """Removes shares that killed runs left in the target, which this run has locked."""
    with suppress(OSError):
        for name in os.listdir(target):
            if name.startswith(SHARES):
                _clear(target / name)


def remove_superseded(target: Path, run_id: str, number: int) -> None:
    """Removes the shares in the target of a generation of a run, and of older ones."""
    above = f"{SHARES}{run_id}-"
    for name in os.listdir(target):
        of = name.removeprefix(above)
        if of != name and of.isdecimal() and int(of) <= number:
            _clear(target / name)


@dataclass
class SupersededRemoval:
    """Removes from the target what the program removed, when a newer checkpoint is there."""

    target: Path
    tree: Path
    """The program's directory; hidden entries that are still there were not removed."""
    waiting: dict[str, GenerationManifest] = field(default_factory=dict)
    """By name: the generation of which the one in the target is; it was the newest."""

    def remove(
        self, before: GenerationManifest, now: GenerationManifest, seen: Collection[str], spared: Collection[str] = ()
    ) -> None:
        """Removes entries that the program had, or of which hpcstage gave a node's contents a name (NAME.NODE), and
        that are in the generation no more; of `spared` ones a node still has a part, which is being written again.
        Raises OSError."""
        new = times_of(now)
        newest_ns = max(new.values(), default=0)
        own = [name for name in times_of(before) if name in seen or is_beside(self.target, name)]
        found = self.waiting | dict.fromkeys(own, before)
        for name, made in found.items():
            self.waiting.pop(name, None)
            if name in new or (name.startswith(HIDDEN) and os.path.lexists(self.tree / name)):
                continue
            if name in spared or times_of(made)[name] >= newest_ns:
                self.waiting[name] = made
            elif is_there(self.target, made, name):
                remove_entry(self.target, name)
                forget_beside(self.target, [name])
