"""Copies to the target what is in no generation: complete entries under their names, all else as NAME.RUN-ID.

Nothing is lost, and no resume takes what may be half-written for a checkpoint.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from hpcstage.checkpoint.job.place import CheckpointCharter, CheckpointPlace, UndrainedEntry, reason
from hpcstage.checkpoint.job.plain import (
    described,
    forget_beside,
    is_carried,
    is_same,
    is_there,
    note_beside,
    note_torn,
    place_copies,
    size_of,
)
from hpcstage.errors import HpcstageError


def place_completed(
    place: CheckpointPlace, names: Sequence[str], charter: CheckpointCharter
) -> tuple[list[UndrainedEntry], dict[str, str]]:
    """Copies complete entries under their names, of which the target has no newer ones of somebody else. Returns what
    could not be copied, and the names of what lies beside."""
    missing: list[UndrainedEntry] = []
    beside: dict[str, str] = {}
    target = Path(charter.target)
    before = described(target)
    for name in names:
        try:
            charter.check_target()
            if is_same(place.tree, target, name):
                continue
            is_ours = before is not None and is_there(target, before.manifest, name)
            if place_copies(place.tree, {name: name}, target, (name,) if is_ours else ()):
                beside[name] = _aside(target, f"{name}.{charter.suffix}")
                place_copies(place.tree, {name: beside[name]}, target, (name,))
            else:
                forget_beside(target, [name])
        except (OSError, HpcstageError) as error:
            missing.append(UndrainedEntry(name, reason(error)))
    return missing, beside


def place_leftovers(
    place: CheckpointPlace, names: Sequence[str], charter: CheckpointCharter
) -> tuple[list[UndrainedEntry], dict[str, str]]:
    """Copies entries that may be half-written, those that the target does not hold as they are. Returns what could not
    be copied, and the new names."""
    missing: list[UndrainedEntry] = []
    beside: dict[str, str] = {}
    target = Path(charter.target)
    for name in names:
        try:
            charter.check_target()
            if is_carried(place.tree, name) and not is_same(place.tree, target, name):
                beside[name] = _placed(place.tree, target, name, charter.suffix)
        except (OSError, HpcstageError) as error:
            missing.append(UndrainedEntry(name, reason(error)))
    return missing, beside


def _placed(tree: Path, target: Path, name: str, suffix: str) -> str:
    """Copies an entry; returns its name in the target. Another one that stands there under such a name stays."""
    other = _aside(target, f"{name}.{suffix}")
    while not is_same(tree, target, name, other):
        if not place_copies(tree, {name: other}, target, only_new=True):
            break
        other = _aside(target, f"{other}~")
    if os.path.lexists(target / name) and size_of(tree / name) <= size_of(target / name):
        note_torn(target, other, name)  # a log that has grown is larger, and stays
    return other


def _aside(target: Path, name: str) -> str:
    note_beside(target, name)
    return name


def bytes_of(place: CheckpointPlace, names: Iterable[str]) -> int:
    """Returns the bytes of entries of the directory, as far as they are there."""
    found = 0
    for name in names:
        with suppress(OSError):
            found += size_of(place.tree / name)
    return found
