"""Puts the newest state that can be restored into a checkpoint directory, before the command starts.

Owns the order: a generation that a killed run left on this node, verified, with what it had completed since; then what
the target holds, of which the described files are verified. A checkpoint that the killed run was writing again is taken
from where it is whole.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from hpcstage.checkpoint.generations.manifest import DamagedGeneration, GenerationManifest
from hpcstage.checkpoint.generations.reading import LocalSource
from hpcstage.checkpoint.generations.restoring import (
    NothingToRestore,
    remove_leftovers,
    restore,
    restore_newest,
    times_of,
)
from hpcstage.checkpoint.keeping.completed import began_with, completed_since, is_behind
from hpcstage.checkpoint.keeping.facts import CannotKeep, CheckpointCharter, CheckpointPlace, reason
from hpcstage.checkpoint.keeping.history import names_of, newest_manifest, whole_versions
from hpcstage.checkpoint.keeping.plain import (
    checkpoints_in,
    damaged,
    described,
    is_there,
    names_in,
    note_beside,
    of_others,
    place_copies,
    remove_entry,
    shown_in,
    size_of,
)
from hpcstage.errors import HpcstageError
from hpcstage.units import format_size


@dataclass(frozen=True)
class BeginningState:
    """The state in the directory at the start."""

    restored: str = ""
    """The place that it comes from, for people; empty: nothing is there."""
    refused: tuple[str, ...] = ()
    """Lines that say which states were not restored, and why."""


def restore_state(place: CheckpointPlace, charter: CheckpointCharter) -> BeginningState:
    """Restores the newest state. Raises CannotKeep."""
    try:
        charter.check_target()
        began = _restored(place, charter)
        place.note_seen(seen_before(charter).union(names_in(place.tree)))
        return began
    except (OSError, HpcstageError) as error:
        raise CannotKeep(reason(error)) from None


def seen_before(charter: CheckpointCharter) -> set[str]:
    """Returns the entries that the programs of killed runs had, as far as these runs tell."""
    earlier = [CheckpointPlace(Path(base)) for base in charter.earlier]
    return set().union(*(names_of(one) for one in earlier), *(one.seen() or () for one in earlier))


def _restored(place: CheckpointPlace, charter: CheckpointCharter) -> BeginningState:
    local = _from_this_node(place, charter)
    if local.restored:
        return local
    began = from_target(place, Path(charter.target), local.refused)
    if began.refused == local.refused:
        _note_same(place, charter)
    return began


def _from_this_node(place: CheckpointPlace, charter: CheckpointCharter) -> BeginningState:
    target = Path(charter.target)
    refused: list[str] = []
    for earlier in sorted(map(CheckpointPlace, map(Path, charter.earlier)), key=_age_ns, reverse=True):
        newest, completed = newest_manifest(earlier.base), completed_since(earlier)
        if is_behind(earlier, target) or (not completed and (newest is None or _has_state(target, newest))):
            break
        text, number = "", 0
        try:
            if newest is not None:
                with LocalSource(earlier.store) as source:
                    check_room(place, newest.state_bytes, "what a killed run left")
                    made = restore_newest(source, place.tree)
                    number = made.number
                    _fill_gaps(earlier, source, number, place, target)
                refused += [one.line() for one in made.refused]
                text = f"generation {number} of a killed run, verified, from this node"
        except NothingToRestore as error:
            refused += [one.line() for one in error.refused]
            if not completed:
                continue
        text = ", with ".join(filter(None, [text, _add_completed(place, earlier, completed, is_alone=not number)]))
        place.note_origin(earlier.base, number)
        text += add_others(place, target, of_others(target, earlier.seen(), names_in(place.tree)))
        return BeginningState(text, tuple(refused))
    return BeginningState(refused=tuple(refused))


def _age_ns(earlier: CheckpointPlace) -> int:
    """Returns when the newest of what a killed run left was made."""
    newest = newest_manifest(earlier.base)
    times = [os.lstat(earlier.tree / name).st_ctime_ns for name in completed_since(earlier)]
    return max(0 if newest is None else newest.created_ns, *times, 0)


def _has_state(target: Path, newest: GenerationManifest) -> bool:
    drained = described(target)
    return drained is not None and drained.manifest.created_ns >= newest.created_ns


def _add_completed(place: CheckpointPlace, earlier: CheckpointPlace, completed: list[str], *, is_alone: bool) -> str:
    """Copies what a killed run had completed and not saved, without a generation (`is_alone`) also what it began with;
    returns what people are told of it. Raises CannotKeep and OSError."""
    names = [*completed, *(began_with(earlier) if is_alone else ())]
    check_room(place, sum(size_of(earlier.tree / name) for name in names), "what a killed run left")
    place_copies(earlier.tree, {name: name for name in names}, place.tree, names)
    return f"{', '.join(sorted(completed))} of a killed run, from this node, not verified" if completed else ""


def _note_same(place: CheckpointPlace, charter: CheckpointCharter) -> None:
    """Notes the killed run whose newest generation the target has, all of it: this run goes on from that."""
    drained = described(Path(charter.target))
    for base in map(Path, charter.earlier):
        newest = newest_manifest(base)
        if drained is not None and newest is not None and newest.id == drained.manifest.id:
            place.note_origin(base, newest.number)


def _fill_gaps(
    earlier: CheckpointPlace, source: LocalSource, number: int, place: CheckpointPlace, target: Path
) -> None:
    """Restores the checkpoints that the killed run was writing again, and that the generation lacks for that."""
    for older, names in whole_versions(source, earlier.tree, number).items():
        with suppress(DamagedGeneration):
            restore(source, older, place.tree, {name: name for name in names})
    drained = checkpoints_in(target)
    lacking = [name for name in shown_in(earlier.tree) if not os.path.lexists(place.tree / name)]
    place_copies(target, {name: name for name in lacking if name in drained}, place.tree)


def add_others(place: CheckpointPlace, target: Path, names: Sequence[str]) -> str:
    """Copies entries of the target to the directory, where a state of a killed run lies; returns what people are told
    of it. Raises CannotKeep and OSError."""
    check_room(place, sum(size_of(target / name) for name in names), f"{target}")
    place_copies(target, {name: name for name in names}, place.tree)
    return f", with {', '.join(names)} from {target}, not verified" if names else ""


def check_room(place: CheckpointPlace, size_bytes: int, what: str) -> None:
    """Raises CannotKeep if a state is too large for the local disk."""
    room_bytes = place.room_bytes()
    if size_bytes > room_bytes:
        sizes = f"{format_size(size_bytes)}, and the local disk has room for {format_size(room_bytes)}"
        raise CannotKeep(f"{what} holds {sizes}")


def from_target(place: CheckpointPlace, target: Path, refused: tuple[str, ...]) -> BeginningState:
    """Copies what the target holds, and verifies what is described. Raises CannotKeep and OSError."""
    remove_leftovers(target)  # a killed drain may have left a name there without its entry
    opened, names = described(target), checkpoints_in(target)
    check_room(place, sum(size_of(target / name) for name in names), f"{target}")
    place_copies(target, {name: name for name in names}, place.tree)
    if opened is None:
        text = f"{len(names)} from {target}, not verified" if names else ""
        return BeginningState(text, refused)
    shown = times_of(opened.manifest).keys() & set(names)  # others lie beside what they are of, and are not copied
    present = {name for name in shown if is_there(target, opened.manifest, name)}
    bad = {name: why for name, why in damaged(place.tree, opened).items() if name in present}
    for name in bad:
        remove_entry(place.tree, name)
        note_beside(target, name)
    lines = [f"{name} in {target} was damaged, and is not shown: {why}" for name, why in bad.items()]
    whole = f"{len(present) - len(bad)} of {len(names)} verified"
    return BeginningState(f"generation {opened.manifest.number}, {whole}, from {target}", (*refused, *lines))
