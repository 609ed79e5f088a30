"""Brings the share of one node to the target without the other nodes: they are not connected, or the run is over.

All shares of a generation gather in one directory of the target, whoever brings them and when; who brings the last one
gives the whole its names. Until then no program finds a part of it.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from hpcstage.checkpoint.entries import mark_of
from hpcstage.checkpoint.generations.files import GenerationId
from hpcstage.checkpoint.generations.manifest import DamagedGeneration
from hpcstage.checkpoint.generations.reading import BlockSource, GenerationReader, LocalSource
from hpcstage.checkpoint.generations.restoring import making_in, newest_ns
from hpcstage.checkpoint.generations.restoring import place as place_entry
from hpcstage.checkpoint.jobwide.gathering import Gathering, opened_whole, restore_whole
from hpcstage.checkpoint.jobwide.holdings import RunStores
from hpcstage.checkpoint.jobwide.known import known_generations
from hpcstage.checkpoint.jobwide.words import JobGeneration
from hpcstage.checkpoint.keeping.draining import EntryDrain
from hpcstage.checkpoint.keeping.facts import (
    CheckpointCharter,
    CheckpointPlace,
    KeepingReport,
    UndrainedEntry,
    reason,
)
from hpcstage.checkpoint.keeping.leftovers import place_leftovers
from hpcstage.checkpoint.keeping.plain import described, is_there, shown_in
from hpcstage.errors import HpcstageError


def end_alone(
    place: CheckpointPlace,
    charter: CheckpointCharter,
    generation: JobGeneration | None,
    others: Mapping[str, Path] | None = None,
) -> list[UndrainedEntry]:
    """Brings a node's share of a generation to the target, and all of it if it can be put together; returns what is not
    in the target under its name. `others` are stores of other nodes that can be read here."""
    if generation is None:
        return []
    try:
        charter.check_target()
        return _gathered(place, charter, generation, others or {})
    except (OSError, HpcstageError) as error:
        names = generation.shares.get(charter.node, {})
        return [UndrainedEntry(name, reason(error)) for name in names]


def _gathered(
    place: CheckpointPlace, charter: CheckpointCharter, generation: JobGeneration, others: Mapping[str, Path]
) -> list[UndrainedEntry]:
    target = Path(charter.target)
    before = described(target)
    is_behind = before is not None and before.manifest.created_ns >= generation.created_ns
    if before is not None and before.manifest.id == GenerationId(generation.number, generation.attempt):
        return []  # it is there
    gathering = Gathering(target, f"{charter.run_id}-{generation.number}", charter.run_id)
    stores = {charter.node: place.store, **others}
    with _sources(stores) as sources, _locked(gathering):
        holdings = RunStores(sources)
        shares = holdings.shares(generation)
        missing: dict[str, set[str]] = {}
        for share in shares:
            if not gathering.has(share.node, share.number):
                try:
                    gathering.put(share, share.names)
                except DamagedGeneration:
                    missing.setdefault(share.node, set()).update(share.names)
        if not missing:
            noted = [replace(one, source=LocalSource(gathering.noted(one.node, one.number))) for one in shares]
            whole = opened_whole(noted)
            gathering.give_names(whole, generation, generation.names, is_behind=is_behind)
            gathering.remove()
            return []
    names = ", ".join(sorted(missing))
    why = f"the share of this node is in {gathering.path}, and those of {names} are not there yet"
    own = generation.shares.get(charter.node, {})
    return [UndrainedEntry(name, why) for name in own] or [UndrainedEntry("", why)]


def drain_share_late(place: CheckpointPlace, charter: CheckpointCharter) -> KeepingReport:
    """Drains what one node of a job left that nobody keeps any more, with what other nodes of it left on this machine.
    Raises OSError."""
    charter.check_target()
    known = known_generations(place)
    last = known[-1] if known else None
    missing: list[UndrainedEntry] = []
    if last is not None and not place.is_continued(last.number):
        missing = end_alone(place, charter, last, _siblings(place, charter))
    shares = {} if last is None else last.shares.get(charter.node, {})
    drain = EntryDrain(place.tree, Path(charter.target), f"{charter.run_id}.{charter.node}")
    left, beside = place_leftovers(drain, _unsaved(place, shares), charter)
    number = last.number if last is not None and not missing else None
    undrained = (*missing, *left)
    return KeepingReport(drained_number=number, undrained=undrained, unclosed=tuple(beside.values()))


def restore_here(place: CheckpointPlace, charter: CheckpointCharter, to: Path) -> int | None:
    """Restores the newest state of a job from what its nodes left on this machine, verified, into a directory that is
    there; entries that are not older stay. Returns its number; None if parts are missing. Raises OSError."""
    for generation in reversed(known_generations(place)):
        stores = {charter.node: place.store, **_siblings(place, charter)}
        with _sources(stores) as sources, suppress(DamagedGeneration), making_in(to) as made:
            whole = opened_whole(RunStores(sources).shares(generation))
            tree = made / "tree"
            tree.mkdir()
            restore_whole(whole, made, tree)
            for name in os.listdir(tree):
                place_entry(tree / name, to / name, newest_ns(tree / name))
            return generation.number
    return None


def _unsaved(place: CheckpointPlace, shares: Mapping[str, str]) -> list[str]:
    """Returns the entries of the directory that are in no generation as they are, and were not put there."""
    with LocalSource(place.store) as source, suppress(OSError, HpcstageError):
        numbers = source.numbers()
        opened = [GenerationReader(source).manifest(number) for number in numbers]
        put = set(json.loads(place.put.read_text())) if place.put.exists() else set()
        return [
            name
            for name in shown_in(place.tree)
            if mark_of(place.tree, name) not in (shares.get(name), *put)
            and not any(is_there(place.tree, one, name) for one in opened)
        ]
    return []


def _siblings(place: CheckpointPlace, charter: CheckpointCharter) -> dict[str, Path]:
    """Returns the stores of other nodes of the run that are on this machine."""
    found = {}
    for base in sorted(place.base.parent.parent.glob(f"*/{place.base.name}")):
        with suppress(OSError, ValueError):
            other = CheckpointCharter.load(CheckpointPlace(base))
            if other.run_id == charter.run_id and other.node and other.node != charter.node:
                found[other.node] = CheckpointPlace(base).store
    return found


@contextmanager
def _sources(stores: Mapping[str, Path]) -> Iterator[dict[str, BlockSource]]:
    with ExitStack() as stack:
        yield {name: stack.enter_context(LocalSource(path)) for name, path in stores.items()}


@contextmanager
def _locked(gathering: Gathering) -> Iterator[None]:
    """Lets one process at a time work on the shares of a generation."""
    gathering.path.mkdir(0o700, exist_ok=True)
    fd = os.open(gathering.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)
