"""Puts the newest state that can be restored into a checkpoint directory, before the command starts.

Owns the order: a generation that a killed run left on this node, verified; then what the target holds, of which the
described files are verified.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from hpcstage.checkpoint.generations.manifest import DamagedGeneration, GenerationManifest
from hpcstage.checkpoint.generations.reading import GenerationReader, LocalSource
from hpcstage.checkpoint.generations.restoring import NothingToRestore, restore_newest, times_of
from hpcstage.checkpoint.keeping.facts import CannotKeep, CheckpointCharter, CheckpointPlace
from hpcstage.checkpoint.keeping.plain import (
    damaged,
    described,
    is_there,
    names_in,
    place_copies,
    remove_entry,
    size_of,
)
from hpcstage.errors import HpcstageError
from hpcstage.units import format_size


@dataclass(frozen=True)
class BeginningState:
    """What lies in the directory at the start."""

    restored: str = ""
    """Where it comes from, for people; empty: nothing is there."""
    refused: tuple[str, ...] = ()
    """Lines about what was not restored, and why."""


def restore_state(place: CheckpointPlace, charter: CheckpointCharter) -> BeginningState:
    """Restores the newest state. Raises CannotKeep."""
    try:
        charter.check_target()
        local = _from_this_node(place, charter)
        return local if local.restored else _from_target(place, Path(charter.target), local.refused)
    except OSError as error:
        raise CannotKeep(f"{error.filename or charter.target}: {error.strerror}") from None
    except HpcstageError as error:
        raise CannotKeep(error.what) from None


def newest_manifest(base: Path) -> GenerationManifest | None:
    """Returns the manifest of the newest generation below a base whose manifest can be read."""
    with LocalSource(CheckpointPlace(base).store) as source:
        reader = GenerationReader(source)
        for number in reversed(source.numbers()):
            with suppress(DamagedGeneration):
                return reader.manifest(number)
    return None


def known_before(place: CheckpointPlace, charter: CheckpointCharter) -> list[GenerationManifest]:
    """Returns the newest generations of the target, and of killed runs on this node."""
    drained = described(Path(charter.target))
    found = [newest_manifest(Path(base)) for base in (*charter.earlier, place.base)]
    return [one for one in (*found, None if drained is None else drained.manifest) if one is not None]


def _from_this_node(place: CheckpointPlace, charter: CheckpointCharter) -> BeginningState:
    drained = described(Path(charter.target))
    found = [(newest, Path(base)) for base in charter.earlier if (newest := newest_manifest(Path(base))) is not None]
    refused: list[str] = []
    for manifest, base in sorted(found, key=lambda one: one[0].created_ns, reverse=True):
        if drained is not None and drained.manifest.created_ns >= manifest.created_ns:
            break
        try:
            with LocalSource(CheckpointPlace(base).store) as source:
                made = restore_newest(source, place.tree)
        except NothingToRestore as error:
            refused += [one.line() for one in error.refused]
            continue
        refused += [one.line() for one in made.refused]
        text = f"generation {made.number} of a killed run, verified, from this node"
        return BeginningState(text, tuple(refused))
    return BeginningState(refused=tuple(refused))


def _from_target(place: CheckpointPlace, target: Path, refused: tuple[str, ...]) -> BeginningState:
    names = names_in(target)
    size_bytes, room_bytes = sum(size_of(target / name) for name in names), place.room_bytes()
    if size_bytes > room_bytes:
        sizes = f"{format_size(size_bytes)}, and the local disk has room for {format_size(room_bytes)}"
        raise CannotKeep(f"{target} holds {sizes}")
    place_copies(target, {name: name for name in names}, place.tree)
    opened = described(target)
    if opened is None:
        text = f"{len(names)} from {target}, not verified" if names else ""
        return BeginningState(text, refused)
    present = {name for name in times_of(opened.manifest) if is_there(target, opened.manifest, name)}
    bad = {name: why for name, why in damaged(place.tree, opened).items() if name in present}
    for name in bad:
        remove_entry(place.tree, name)
    lines = [f"{name} in {target} was damaged, and is not shown: {why}" for name, why in bad.items()]
    whole = f"{len(present) - len(bad)} of {len(names)} verified"
    return BeginningState(f"generation {opened.manifest.number}, {whole}, from {target}", (*refused, *lines))
