"""Reads what the generations of one place tell."""

from __future__ import annotations

from pathlib import Path

from hpcstage.checkpoint.generations.manifest import DamagedGeneration, GenerationManifest
from hpcstage.checkpoint.generations.reading import GenerationReader, LocalSource
from hpcstage.checkpoint.job.place import CheckpointPlace, UndrainedEntry


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
