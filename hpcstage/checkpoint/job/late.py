"""Brings the share of one node to the target without the other nodes: they are not connected, or the run is over.

All shares of a generation gather in one directory of the target, whoever brings them and when; who brings the last one
gives the whole its names. Until then no program finds a part of it.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from hpcstage.checkpoint.entries import mark_of
from hpcstage.checkpoint.generations.files import LOCK, GenerationId, lock_file
from hpcstage.checkpoint.generations.manifest import DamagedGeneration
from hpcstage.checkpoint.generations.reading import BlockSource, GenerationReader, LocalSource
from hpcstage.checkpoint.job.completed import began_with, completed_since, is_behind
from hpcstage.checkpoint.job.gathering import (
    Gathering,
    Share,
    Superseded,
    opened_whole,
    remove_superseded,
    restore_whole,
)
from hpcstage.checkpoint.job.holdings import RunStores
from hpcstage.checkpoint.job.known import known_generations, pending_generation
from hpcstage.checkpoint.job.ledger import JobGeneration
from hpcstage.checkpoint.job.leftovers import bytes_of, place_completed, place_leftovers
from hpcstage.checkpoint.job.place import (
    CheckpointCharter,
    CheckpointPlace,
    CheckpointReport,
    UndrainedEntry,
    reason,
)
from hpcstage.checkpoint.job.plain import described, described_run, give_newer, is_there, names_in, runs_in, shown_in
from hpcstage.errors import HpcstageError
from hpcstage.upload.making import Making
from hpcstage.upload.target import Target


@dataclass(frozen=True)
class LonelyEnd:
    """The result of an end without the other nodes."""

    missing: Sequence[UndrainedEntry] = ()
    """The entries that are not in the target under their names."""
    brought: Mapping[str, str] = field(default_factory=dict)
    """The entries of this node that are there, or wait there for the parts of other nodes, with their marks."""
    number: int | None = None
    """The generation that is in the target."""
    beside: Mapping[str, str] = field(default_factory=dict)
    """By name: the names of what lies beside."""
    is_damaged: bool = False
    """Whether what this node has is not whole."""
    size_bytes: int = 0
    """The bytes that were given their names there."""


def end_alone(
    place: CheckpointPlace,
    charter: CheckpointCharter,
    known: JobGeneration | None,
    others: Mapping[str, Path] | None = None,
) -> LonelyEnd:
    """Brings a node's share of the newest generation to the target, and all of it if it can be put together. `known` is
    the newest one that all nodes have, as far as this one knows; another node may know that all have the one after it,
    of which this node brings its share, too. `others` are stores of other nodes that can be read here."""
    node, newer = charter.node, pending_generation(place, known)
    if newer is not None and not (end := _brought(place, charter, newer, others or {})).missing:
        return replace(end, brought=newer.share(node), number=newer.number)
    if known is None:
        return LonelyEnd()
    own, end = known.share(node), _brought(place, charter, known, others or {})
    if end.missing:
        return replace(end, brought={**own, **(newer.share(node) if newer is not None else {})})
    return replace(end, brought=own, number=known.number)  # all brought this one: none knows of a newer one


def _brought(
    place: CheckpointPlace, charter: CheckpointCharter, generation: JobGeneration, others: Mapping[str, Path]
) -> LonelyEnd:
    """Brings a share to the target; returns what is not in the target under its name then, or what was given names."""
    try:
        Target(charter.run, charter.owner).check()
        return _gathered(place, charter, generation, others)
    except (OSError, HpcstageError) as error:
        names = generation.share(charter.node)
        return LonelyEnd([UndrainedEntry(name, reason(error)) for name in names] or [UndrainedEntry("", reason(error))])


def _gathered(
    place: CheckpointPlace, charter: CheckpointCharter, generation: JobGeneration, others: Mapping[str, Path]
) -> LonelyEnd:
    target = Path(charter.target)
    if _has(target, charter, generation):
        return LonelyEnd()
    gathering = Gathering(Target(charter.run, charter.owner), f"{charter.run_id}-{generation.number}")
    with _sources({charter.node: place.store, **others}) as sources, _locked(gathering):
        if _has(target, charter, generation):  # another node was first
            gathering.remove()
            return LonelyEnd()
        shares, failed = gathering.complete(RunStores(sources).shares(generation), generation.names)
        if not failed:
            return _named(place, charter, generation, gathering, shares)
        missing = {one.node: why.what if isinstance(why, DamagedGeneration) else str(why) for one, why in failed}
        if charter.is_alone:
            gathering.remove()
    names = ", ".join(sorted(missing))
    why = f"the share of this node is in {gathering.path}, and those of {names} are not there yet"
    why, own = missing.get(charter.node, why), generation.share(charter.node)
    return LonelyEnd(
        [UndrainedEntry(name, why) for name in own] or [UndrainedEntry("", why)], is_damaged=charter.node in missing
    )


def _named(
    place: CheckpointPlace,
    charter: CheckpointCharter,
    generation: JobGeneration,
    gathering: Gathering,
    shares: Sequence[Share],
) -> LonelyEnd:
    """Gives what all nodes brought its names, and removes what the program had removed."""
    target = gathering.root
    before = described(target)
    is_behind = before is not None and before.manifest.created_ns >= generation.created_ns
    trees = [place.tree, *(one.tree for one in _siblings(place, charter).values())]
    there = {name for tree in trees for name in (names_in(tree) if tree.is_dir() else ())}
    spared = there.union(generation.lacking) - generation.names - generation.dropped.keys()
    superseded = Superseded(place.tree, place.seen() or (), spared, place.origins())
    placed = gathering.give_names(opened_whole(shares), generation, generation.names, superseded, is_behind=is_behind)
    remove_superseded(target, charter.run_id, generation.number)
    return LonelyEnd(beside=placed.beside, size_bytes=placed.size_bytes)


def _has(target: Path, charter: CheckpointCharter, generation: JobGeneration) -> bool:
    """Tells whether the target has a generation, or a later one: other nodes, or a later run, went on with it."""
    opened = described(target)
    is_it = opened is not None and opened.manifest.id == GenerationId(generation.number, generation.attempt)
    return is_it or runs_in(target).get(charter.run_id, 0) >= generation.created_ns


def is_continued(
    place: CheckpointPlace, charter: CheckpointCharter, known: Iterable[JobGeneration] | None = None
) -> bool:
    """Tells whether the target has what another run made that went on from the newest that a run left; `known` are its
    generations, those that this node knows where nothing is said. Raises OSError."""
    known = known_generations(place) if known is None else known
    runs = runs_in(Path(charter.target))
    times = [os.lstat(place.tree / name).st_ctime_ns for name in (completed_since(place) if charter.is_alone else ())]
    newest_ns = max((*times, *(one.created_ns for one in known)), default=0)
    return described_run(Path(charter.target)) != charter.run_id and runs.get(charter.run_id, -1) >= newest_ns


def drain_late(place: CheckpointPlace, charter: CheckpointCharter, *, is_orderly: bool = False) -> CheckpointReport:
    """Brings to the target what one node of a job left that nobody keeps any more, with what other nodes of it left on
    this machine; after an orderly end of the command all that lies in the directory of a run on one node is complete.
    Raises OSError."""
    target = Target(charter.run, charter.owner)
    target.check()
    siblings = _siblings(place, charter)
    known = [one for each in (place, *siblings.values()) for one in known_generations(each)]
    newest = max((one.number for one in known), default=0)
    went_on = is_continued(place, charter, known)
    completed: list[str] = []
    if charter.is_alone:
        completed = names_in(place.tree) if is_orderly else completed_since(place)
    is_shown = is_orderly or not (went_on or is_behind(place, Path(charter.target)))
    end, damaged = LonelyEnd(), dict[str, str]()
    if not went_on:
        end, damaged = _newest_whole(place, charter, known, {node: one.store for node, one in siblings.items()})
    whole = (end.number or 0) if damaged else max(newest, end.number or 0)
    last = next((one for one in reversed(known_generations(place)) if one.number <= whole), None)
    left = [name for name in unsaved(place, charter.node, last, end.brought.items()) if name not in completed]
    missing, beside = place_completed(place, completed if is_shown else (), target)
    torn, unclosed = place_leftovers(place, left if is_shown or went_on else [*left, *completed], target)
    copied = {*(completed if is_shown else ()), *unclosed}
    size_bytes = end.size_bytes + bytes_of(place, copied)
    return CheckpointReport(
        drained_number=end.number,
        findings={"beside": {**end.beside, **beside}, "skipped": damaged},
        undrained=(*end.missing, *missing, *torn),
        unclosed=tuple(unclosed.values()),
        bytes_carried=size_bytes,
        own_bytes=size_bytes,
    )


def _newest_whole(
    place: CheckpointPlace, charter: CheckpointCharter, known: Iterable[JobGeneration], others: Mapping[str, Path]
) -> tuple[LonelyEnd, dict[str, str]]:
    """Brings the newest generation to the target; of a run on one node the newest that is not damaged. Returns the
    damaged ones, too."""
    damaged: dict[str, str] = {}
    newest_first: list[JobGeneration | None] = [*sorted(known, key=lambda one: one.number, reverse=True)]
    for last in newest_first or [None]:
        end = end_alone(place, charter, last, others)
        if last is None or not (charter.is_alone and end.is_damaged):
            return end, damaged
        damaged[f"generation {last.number}"] = end.missing[0].why
    return LonelyEnd(), damaged


def restore_here(place: CheckpointPlace, charter: CheckpointCharter, making: Making) -> int | None:
    """Restores the newest state of a job from what its nodes left on this machine, verified, into a directory that is
    there; entries that are not older stay. Returns its number; None if parts are missing. Raises OSError."""
    for generation in reversed(known_generations(place)):
        stores = {charter.node: place.store, **{node: one.store for node, one in _siblings(place, charter).items()}}
        with _sources(stores) as sources, suppress(DamagedGeneration):
            whole = opened_whole(RunStores(sources).shares(generation))
            give_newer(making, restore_whole(whole, making.path))
            return generation.number
    return None


def unsaved(
    place: CheckpointPlace, node: str, last: JobGeneration | None, known: Collection[tuple[str, str]] = ()
) -> list[str]:
    """Returns the entries of the directory that the newest generation of all nodes has not as they are, and that were
    not put there; `known` are others that are elsewhere, with their marks."""
    saved, began = {*known, *(() if last is None else last.parts_of(node))}, began_with(place)
    with LocalSource(place.store) as source, suppress(OSError):
        reader = GenerationReader(source)

        def is_saved(name: str) -> bool:
            if (name, mark_of(place.tree, name)) in saved:
                return True
            with suppress(DamagedGeneration):  # marks are others where the directory was moved
                if last is not None and node in last.marks(name):
                    return is_there(place.tree, reader.manifest(last.entries[name].number), name)
            return False

        return [name for name in shown_in(place.tree) if name not in began and not is_saved(name)]
    return []


def _siblings(place: CheckpointPlace, charter: CheckpointCharter) -> dict[str, CheckpointPlace]:
    """Returns the places of other nodes of the run that are on this machine."""
    found = {}
    for base in sorted(place.base.parent.parent.glob(f"*/{place.base.name}")):
        with suppress(OSError, ValueError):
            other = CheckpointCharter.load(CheckpointPlace(base))
            if other.run_id == charter.run_id and other.node != charter.node:
                found[other.node] = CheckpointPlace(base)
    return found


@contextmanager
def _sources(stores: Mapping[str, Path]) -> Iterator[dict[str, BlockSource]]:
    with ExitStack() as stack:
        yield {name: stack.enter_context(LocalSource(path)) for name, path in stores.items()}


@contextmanager
def _locked(gathering: Gathering) -> Iterator[None]:
    """Lets one process at a time work on the shares of a generation. Who brings the last one removes the directory."""
    fd = _lock_of(gathering.path)
    try:
        yield
    finally:
        os.close(fd)
        with suppress(OSError):  # NFS removes no directory of which a file is open
            gathering.path.rmdir()


def _lock_of(path: Path) -> int:
    while True:
        path.mkdir(0o700, exist_ok=True)
        with suppress(FileNotFoundError):
            fd = os.open(path / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            is_there = False
            try:
                lock_file(fd, fcntl.LOCK_EX)
                is_there = os.stat(path / LOCK).st_ino == os.fstat(fd).st_ino
            finally:
                if not is_there:
                    os.close(fd)
            if is_there:
                return fd
