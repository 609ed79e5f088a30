"""Puts what the target holds into a checkpoint directory, before the command starts; described files are verified."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hpcstage.checkpoint.generations.restoring import times_of
from hpcstage.checkpoint.job.place import CannotKeep, CheckpointPlace
from hpcstage.checkpoint.job.plain import (
    checkpoints_in,
    copy_entries,
    damaged,
    described,
    is_there,
    note_beside,
    size_of,
)
from hpcstage.units import format_size
from hpcstage.upload.making import remove_tree


@dataclass(frozen=True)
class BeginningState:
    """The state in the directory at the start."""

    restored: str = ""
    """The place that it comes from, for people; empty: nothing is there."""
    refused: tuple[str, ...] = ()
    """Lines that say which states were not restored, and why."""


def add_others(place: CheckpointPlace, target: Path, names: Sequence[str]) -> list[str]:
    """Copies entries of the target to the directory, where a state of a killed run lies; returns what people are told
    of it, if there are any. Raises CannotKeep and OSError."""
    check_room(place, sum(size_of(target / name) for name in names), f"{target}")
    copy_entries(target, names, place.tree)
    return [f"{', '.join(names)} from {target}, not verified"] if names else []


def check_room(place: CheckpointPlace, size_bytes: int, what: str) -> None:
    """Raises CannotKeep if a state is too large for the local disk."""
    room_bytes = place.room_bytes()
    if size_bytes > room_bytes:
        sizes = f"{format_size(size_bytes)}, and the local disk has room for {format_size(room_bytes)}"
        raise CannotKeep(f"{what} holds {sizes}")


def from_target(place: CheckpointPlace, target: Path) -> BeginningState:
    """Copies what the target holds, and verifies what is described. Raises CannotKeep and OSError."""
    opened, names = described(target), checkpoints_in(target)
    check_room(place, sum(size_of(target / name) for name in names), f"{target}")
    copy_entries(target, names, place.tree)
    if opened is None:
        text = f"{len(names)} from {target}, not verified" if names else ""
        return BeginningState(text)
    shown = times_of(opened.manifest).keys() & set(names)  # others lie beside what they are of, and are not copied
    present = {name for name in shown if is_there(target, opened.manifest, name)}
    bad = {name: why for name, why in damaged(place.tree, opened).items() if name in present}
    for name in bad:
        remove_tree(place.tree / name)
        note_beside(target, name)
    lines = [f"{name} in {target} was damaged, and is not shown: {why}" for name, why in bad.items()]
    whole = f"{len(present) - len(bad)} of {len(names)} verified"
    return BeginningState(f"generation {opened.manifest.number}, {whole}, from {target}", tuple(lines))
