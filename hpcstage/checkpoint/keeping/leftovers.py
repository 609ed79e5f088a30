"""Finds what a command left in its checkpoint directory and that is in no generation, and puts it beside the others.

Owns its names in the target, NAME.RUN-ID: nothing is lost, and no resume takes it for a checkpoint.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from hpcstage.checkpoint.generations.manifest import GenerationManifest
from hpcstage.checkpoint.generations.restoring import times_of
from hpcstage.checkpoint.keeping.facts import CheckpointCharter, CheckpointPlace, UndrainedEntry, reason
from hpcstage.checkpoint.keeping.plain import described, is_there, names_in, place_copies


def leftovers(place: CheckpointPlace, newest: GenerationManifest | None, target: Path) -> list[str]:
    """Returns the entries of the directory that neither the newest generation here nor that of the target has as they
    are."""
    drained = described(target)
    known = [one for one in (newest, None if drained is None else drained.manifest) if one is not None]
    with suppress(OSError):
        names = names_in(place.tree)
        return [name for name in names if not any(_has(place.tree, one, name) for one in known)]
    return []


def place_leftovers(
    place: CheckpointPlace, names: Sequence[str], charter: CheckpointCharter
) -> tuple[list[UndrainedEntry], dict[str, str]]:
    """Copies entries to the target, those that it does not hold as they are. Returns what could not be copied, and the
    new names."""
    missing: list[UndrainedEntry] = []
    beside: dict[str, str] = {}
    target = Path(charter.target)
    for name in names:
        other = f"{name}.{charter.run_id}"
        try:
            charter.check_target()
            if not _is_same(place.tree / name, target / name):
                place_copies(place.tree, {name: other}, target)
                beside[name] = other
        except OSError as error:
            missing.append(UndrainedEntry(name, reason(error)))
    return missing, beside


def _has(tree: Path, manifest: GenerationManifest, name: str) -> bool:
    return name in times_of(manifest) and is_there(tree, manifest, name)


def _is_same(one: Path, other: Path) -> bool:
    """Tells whether two entries are files of one size and time: a copy that was made at the start."""
    try:
        ours, theirs = os.lstat(one), os.lstat(other)
    except OSError:
        return False
    is_file = not (one.is_dir() or other.is_dir())
    return is_file and (ours.st_size, ours.st_mtime_ns) == (theirs.st_size, theirs.st_mtime_ns)
