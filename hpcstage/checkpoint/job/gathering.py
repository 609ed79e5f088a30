"""Brings the shares of a job's nodes together: in the target, where they get their names at once, and on a local disk.

Owns a directory in the target below which each node puts its share, and the order there: all shares are verified and on
the disk before the first of them gets its name. What a killed run left there, the next one removes.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from hpcstage.checkpoint.generations.files import OURS, Files, GenerationId, GenerationPart, generation_path
from hpcstage.checkpoint.generations.manifest import DamagedGeneration, EntryType, GenerationManifest
from hpcstage.checkpoint.generations.reading import (
    BlockSource,
    GenerationReader,
    LocalSource,
    OpenGeneration,
    read_whole,
)
from hpcstage.checkpoint.generations.restoring import restore, times_of
from hpcstage.checkpoint.job.joining import Joined, ShareEntry, describe, join, share_of
from hpcstage.checkpoint.job.ledger import JobGeneration
from hpcstage.checkpoint.job.place import HIDDEN
from hpcstage.checkpoint.job.plain import (
    DESCRIPTION,
    RUNS,
    described,
    described_run,
    forget_beside,
    give_name,
    is_beside,
    is_there,
    note_beside,
    remove_torn,
)
from hpcstage.checkpoint.protection.rebuilding import NodeIsGone
from hpcstage.upload.copying import Pace, sync_directory
from hpcstage.upload.making import Making, remove_tree
from hpcstage.upload.target import Target

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
    return Whole(join(_listed(shares, opened), preferred), opened, list(shares))


def _listed(shares: Sequence[Share], opened: Sequence[OpenGeneration]) -> list[list[ShareEntry]]:
    pairs = enumerate(zip(shares, opened, strict=True))
    return [share_of(share.node, generation, share.names, index) for index, (share, generation) in pairs]


def _with_target(whole: Whole, names: Collection[str], before: OpenGeneration) -> Whole:
    """Adds entries of the target, of which the generation before is."""
    listed = [*_listed(whole.shares, whole.opened), share_of(_OF_TARGET, before, names, len(whole.opened))]
    return Whole(join(listed), [*whole.opened, before], whole.shares)


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


def restore_whole(whole: Whole, tree: Path) -> list[str]:
    """Puts a whole into a directory on the local disk, and returns its names. Raises DamagedGeneration, after which the
    directory has no part of it, and OSError."""
    arriving = tree / f"{OURS}arriving"
    remove_tree(arriving)
    arriving.mkdir(0o700)
    try:
        places = {index: arriving / f"{index}" for index, _ in enumerate(whole.shares)}
        for share, place in zip(whole.shares, places.values(), strict=True):
            restore(share.source, share.number, place, sorted(share.names))
        names = sorted({one.entry.name.partition("/")[0] for one in whole.joined.entries})
        build(whole.joined, places, tree, names)
        return names
    finally:
        remove_tree(arriving)


# ---- in the target


@dataclass(frozen=True)
class Superseded:
    """What goes from the target when a newer checkpoint is there: the program removed it."""

    tree: Path
    """The program's directory; hidden entries that are still there were not removed."""
    seen: Collection[str] = ()
    """The entries that the program had."""
    spared: Collection[str] = ()
    """Entries of which a node still has a part, which is being written again, or whose parts went with lost nodes."""
    origins: Mapping[str, int] = field(default_factory=dict)
    """See `runs_in`: the runs from which this one went on."""

    def of(self, target: Target, before: GenerationManifest, now: GenerationManifest) -> tuple[list[str], list[str]]:
        """Returns the entries of the target that are in the generation no more, are as they were left, and are of the
        run or its start, or a node's contents (NAME.NODE): those that go, and those that are still the newest, or not
        removed. The description keeps these."""
        new, root = times_of(now), Path(target.root)
        newest_ns = max(new.values(), default=0)
        is_ours = described_run(root) == target.run.run_id
        goes, stays = list[str](), list[str]()
        for name, time_ns in times_of(before).items():
            is_known = is_ours or name in self.seen or is_beside(root, name)
            if name in new or not is_known or not is_there(root, before, name):
                continue
            is_hidden = name.startswith(HIDDEN) and os.path.lexists(self.tree / name)
            (stays if is_hidden or name in self.spared or time_ns >= newest_ns else goes).append(name)
        return goes, stays

    def runs(self, run_id: str, generation: JobGeneration) -> dict[str, int]:
        """Returns what `runs_in` is to return. While an entry of the start is being written again and nothing else has
        it, the runs before have it alone."""
        origins = {} if set(self.seen).intersection(generation.lacking) else self.origins
        return {run_id: generation.created_ns, **{one: origins[one] for one in origins if one != run_id}}


@dataclass(frozen=True)
class PlacedWhole:
    """The result of giving a whole its names in the target."""

    size_bytes: int
    beside: Mapping[str, str]


@dataclass(frozen=True)
class Gathering:
    """The directory in the target below which the shares of one generation come together."""

    target: Target
    name: str

    @property
    def root(self) -> Path:
        """The target's directory."""
        return Path(self.target.root)

    @property
    def path(self) -> Path:
        """The directory."""
        return self.root / f"{SHARES}{self.name}"

    def of(self, node: str, number: int) -> Path:
        """Returns the directory of a share."""
        return self.path / f"{number:08}" / node.replace("/", "_")

    def put(self, share: Share, names: Collection[str], pace: Pace = lambda _: None) -> None:
        """Puts a share there, as far as its entries are among the names. Raises DamagedGeneration and OSError."""
        directory = self.begin(share.node, share.number)
        self._note(share)
        restore(share.source, share.number, directory, sorted(share.names & frozenset(names)), pace)
        (self._noted(share.node, share.number) / _WHOLE).touch()
        sync_directory(directory.parent)
        sync_directory(self.path)

    def begin(self, node: str, number: int) -> Path:
        """Makes the directory of a share, which is empty then. Raises OSError."""
        directory = self.of(node, number)
        remove_tree(directory)
        for one in (self.path, directory.parent, directory):
            one.mkdir(0o700, exist_ok=True)
        return directory

    def complete(
        self, shares: Iterable[Share], names: Collection[str], pace: Pace = lambda _: None
    ) -> tuple[list[Share], list[tuple[Share, DamagedGeneration | NodeIsGone]]]:
        """Puts those shares there that are not. Returns all that are, with their descriptions as sources, and of the
        others why they cannot be. Raises OSError."""
        there, missing = list[Share](), list[tuple[Share, DamagedGeneration | NodeIsGone]]()
        for share in shares:
            try:
                if not self.has(share.node, share.number):
                    self.put(share, names, pace)
                noted = replace(share, source=LocalSource(self._noted(share.node, share.number)))
                opened_whole([noted])
                there.append(noted)
            except (DamagedGeneration, NodeIsGone) as error:
                missing.append((share, error))
        return there, missing

    def has(self, node: str, number: int) -> bool:
        """Tells whether all of a share is there, verified."""
        return (self._noted(node, number) / _WHOLE).exists()

    def _noted(self, node: str, number: int) -> Path:
        """Returns the directory with the description of a share, for who cannot read its store."""
        return self.of(f"{node}.description", number)

    def _note(self, share: Share) -> None:
        directory = self._noted(share.node, share.number)
        remove_tree(directory)
        made = generation_path(directory, share.number)
        made.mkdir(0o700, parents=True)
        for part in (GenerationPart.BLOCKS, GenerationPart.MANIFEST):
            Files().write_new(made / part, read_whole(share.source, share.number, part))

    def give_names(
        self,
        whole: Whole,
        generation: JobGeneration,
        names: Collection[str],
        superseded: Superseded,
        *,
        is_behind: bool = False,
    ) -> PlacedWhole:
        """Gives the entries of some names, all of whose shares are there, their names in the target, each at once;
        where the target has a later state of another run (`is_behind`), NAME.RUN-ID. Removes what is superseded. Raises
        OSError; then each entry of the target is whole, an old or a new one."""
        root, before = self.root, described(self.root)
        identity, made_ns = GenerationId(generation.number, generation.attempt), generation.created_ns
        now = describe(whole.joined, whole.opened, identity, made_ns)
        goes, stays = list[str](), list[str]()
        if before is not None and not is_behind:
            goes, stays = superseded.of(self.target, before.manifest, now.manifest)
            whole = _with_target(whole, stays, before)
            now = describe(whole.joined, whole.opened, identity, made_ns)
        tops = tops_of(whole.joined)
        wanted = {top for name in names for top in tops.get(name, ())}
        beside: dict[str, str] = {}
        with Making(self.target) as making:
            places = {index: self.of(one.node, one.number) for index, one in enumerate(whole.shares)}
            build(whole.joined, places, making.path, wanted)
            times = times_of(now.manifest)
            for top in sorted(wanted):
                is_ours = before is not None and is_there(root, before.manifest, top)
                if (is_behind or not is_ours) and is_there(root, now.manifest, top):
                    continue
                place = give_name(
                    making, top, self.target.run.run_id, None if is_behind else math.inf if is_ours else times[top]
                )
                if place != top:
                    beside[top] = place
            for own, other in whole.joined.beside.items():
                beside.setdefault(own, other)
                if "/" not in other:
                    note_beside(root, other)
        if not is_behind:
            with Making(self.target) as making:
                self._describe(making, now, superseded.runs(self.target.run.run_id, generation))
                for name in goes:
                    making.remove(name)
                    forget_beside(root, [name])
                remove_torn(making, now.manifest)
        placed = [entry for entry in now.manifest.entries if entry.name.partition("/")[0] in wanted]
        return PlacedWhole(sum(entry.size_bytes for entry in placed), beside)

    def remove(self) -> None:
        """Removes the directory."""
        remove_tree(self.path)

    def _describe(self, making: Making, opened: OpenGeneration, runs: Mapping[str, int]) -> None:
        """Puts the description of the generation beside its files; that of the one before goes."""
        number, directory = opened.manifest.number, self.root / DESCRIPTION
        directory.mkdir(0o700, exist_ok=True)
        made, files = generation_path(making.path, number), Files()
        made.mkdir(0o700)
        files.write_new(made / GenerationPart.BLOCKS, opened.table.tobytes())
        files.write_new(made / GenerationPart.MANIFEST, opened.manifest.to_bytes())
        files.write_new(made / RUNS, json.dumps(runs).encode())
        sync_directory(made)
        others = [name for name in os.listdir(directory) if name.isdecimal()]
        for name in (one for one in others if one >= made.name):
            making.remove(f"{DESCRIPTION}/{name}")
        making.give(made.name, [f"{DESCRIPTION}/{made.name}"])
        for name in (one for one in others if one < made.name):
            making.remove(f"{DESCRIPTION}/{name}")
        sync_directory(directory)


def remove_stale(target: Target) -> None:
    """Removes what killed runs left in the target, which this run owns."""
    with suppress(OSError):
        for name in os.listdir(target.root):
            if name.startswith(SHARES):
                remove_tree(target.path(name))


def remove_superseded(target: Path, run_id: str, number: int) -> None:
    """Removes the shares in the target of a generation of a run, and of older ones."""
    above = f"{SHARES}{run_id}-"
    for name in os.listdir(target):
        of = name.removeprefix(above)
        if of != name and of.isdecimal() and int(of) <= number:
            remove_tree(target / name)
