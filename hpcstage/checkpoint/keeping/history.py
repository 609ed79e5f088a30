"""Reads what the generations of one place tell: the newest, all of them, and where each checkpoint is whole.

A checkpoint that the program was writing again when a generation was saved is not in that one; an older generation has
it whole. Such a checkpoint counts as long as its name is in the program's directory: the program has not removed it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from hpcstage.checkpoint.generations.manifest import DamagedGeneration, GenerationManifest
from hpcstage.checkpoint.generations.reading import BlockSource, GenerationReader, LocalSource
from hpcstage.checkpoint.generations.restoring import times_of
from hpcstage.checkpoint.keeping.facts import CheckpointCharter, CheckpointPlace, UndrainedEntry
from hpcstage.checkpoint.keeping.plain import described


def newest_manifest(base: Path) -> GenerationManifest | None:
    """Returns the manifest of the newest generation below a base whose manifest can be read."""
    found = (one for one in reversed(generations_of(CheckpointPlace(base))) if isinstance(one, GenerationManifest))
    return next(found, None)


def generations_of(place: CheckpointPlace) -> list[GenerationManifest | UndrainedEntry]:
    """Returns the manifests of all generations on the local disk, oldest first; of one that cannot be read its name and
    the reason."""
    found: list[GenerationManifest | UndrainedEntry] = []
    with LocalSource(place.store) as source:
        reader = GenerationReader(source)
        for number in source.numbers():
            try:
                found.append(reader.manifest(number))
            except DamagedGeneration as error:
                found.append(UndrainedEntry(str(number), error.what))
    return found


def known_before(place: CheckpointPlace, charter: CheckpointCharter) -> list[GenerationManifest]:
    """Returns the newest generations of the target, and of killed runs on this node."""
    drained = described(Path(charter.target))
    found = [newest_manifest(base) for base in (*map(Path, charter.earlier), place.base)]
    return [one for one in (*found, None if drained is None else drained.manifest) if one is not None]


def names_of(place: CheckpointPlace) -> frozenset[str]:
    """Returns all checkpoints that the generations of a place have."""
    made = [one for one in generations_of(place) if isinstance(one, GenerationManifest)]
    return frozenset(name for one in made for name in times_of(one))


def whole_versions(source: BlockSource, tree: Path, newest: int) -> Mapping[int, list[str]]:
    """Returns, by generations before the newest one, the checkpoints that the program still has and that no newer
    generation has; the newest first."""
    reader = GenerationReader(source)
    known = set(times_of(reader.manifest(newest)))
    found: dict[int, list[str]] = {}
    for number in sorted((one for one in source.numbers() if one < newest), reverse=True):
        with suppress(DamagedGeneration):
            names = times_of(reader.manifest(number)).keys() - known
            if there := sorted(name for name in names if os.path.lexists(tree / name)):
                found[number] = there
                known.update(there)
    return found
