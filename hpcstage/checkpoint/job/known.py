"""Reads what the generations of one place tell; owns the files beside them that say which of them all nodes have."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from hpcstage.checkpoint.generations.manifest import DamagedGeneration, GenerationManifest
from hpcstage.checkpoint.generations.reading import GenerationReader, LocalSource
from hpcstage.checkpoint.job.ledger import JobGeneration
from hpcstage.checkpoint.job.place import CheckpointPlace, UndrainedEntry
from hpcstage.writing import replace_text


def note_generations(place: CheckpointPlace, generations: Iterable[JobGeneration]) -> None:
    """Notes the generations that all nodes have; what is known of others goes. Raises OSError."""
    found = {f"{one.number:08}.json": json.dumps(asdict(one), sort_keys=True) for one in generations}
    for name, text in found.items():
        path = place.shares / name
        if not path.exists() or path.read_text() != text:
            replace_text(path, text, 0o600)
    if found:
        for name in set(os.listdir(place.shares)) - found.keys():
            (place.shares / name).unlink(missing_ok=True)


def note_pending(place: CheckpointPlace, generation: JobGeneration) -> None:
    """Notes a generation that this node has; whether all nodes have it, it does not know yet. Raises OSError."""
    replace_text(place.pending, json.dumps(asdict(generation), sort_keys=True), 0o600)


def pending_generation(place: CheckpointPlace, known: JobGeneration | None) -> JobGeneration | None:
    """Returns the generation of which this node does not know whether all nodes have it, if it is newer than the newest
    one that is known."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        found = JobGeneration.from_json(json.loads(place.pending.read_text()))
        if known is None or found.number > known.number:
            return found
    return None


def known_generations(place: CheckpointPlace) -> list[JobGeneration]:
    """Returns the generations of a place that all nodes of its run have, oldest first. What one node saved alone, all
    have."""
    found: list[JobGeneration] = []
    for name in sorted(os.listdir(place.shares)) if place.shares.is_dir() else ():
        with suppress(OSError, ValueError, KeyError, TypeError):
            found.append(JobGeneration.from_json(json.loads((place.shares / name).read_text())))
    pending = pending_generation(place, found[-1] if found else None)
    return [*found, pending] if pending is not None and len(pending.nodes) == 1 else found


def newest_known(place: CheckpointPlace) -> GenerationManifest | None:
    """Returns the manifest of the newest of these that can be read."""
    with LocalSource(place.store) as source:
        for one in reversed(known_generations(place)):
            with suppress(DamagedGeneration, OSError):
                return GenerationReader(source).manifest(one.number)
    return None


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
