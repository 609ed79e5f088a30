"""The generations of a place that all nodes of its job have, as files beside its store. A run on one node had all of
them by itself."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict

from hpcstage.checkpoint.generations.manifest import GenerationManifest
from hpcstage.checkpoint.generations.reading import LocalSource
from hpcstage.checkpoint.generations.restoring import times_of
from hpcstage.checkpoint.jobwide.families import FoundStore
from hpcstage.checkpoint.jobwide.words import CarriedEntry, JobGeneration
from hpcstage.checkpoint.keeping.facts import CheckpointCharter, CheckpointPlace
from hpcstage.checkpoint.keeping.history import generations_of, whole_versions
from hpcstage.writing import replace_text

ALONE = "alone"
"""The name of the node of a run that had one."""


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
    """Returns the generations of a place that all nodes of its run have, oldest first."""
    if not place.shares.is_dir():
        return _of_one_node(place)
    found = []
    for name in sorted(os.listdir(place.shares)):
        with suppress(OSError, ValueError, KeyError, TypeError):
            found.append(JobGeneration.from_json(json.loads((place.shares / name).read_text())))
    return found


def found_at(key: str, place: CheckpointPlace) -> FoundStore | None:
    """Returns what a place holds for others; None where its charter cannot be read."""
    try:
        charter = CheckpointCharter.load(place)
        generations = tuple(known_generations(place))
        return FoundStore(charter.run_id, charter.node or ALONE, key, generations, place.origins(), place.seen())
    except (OSError, ValueError):
        return None


def _of_one_node(place: CheckpointPlace) -> list[JobGeneration]:
    made = [one for one in generations_of(place) if isinstance(one, GenerationManifest)]
    if not made:
        return []
    with LocalSource(place.store) as source:
        older = whole_versions(source, place.tree, made[-1].number)
    carried = {name: CarriedEntry(number, {ALONE: ""}) for number, names in older.items() for name in names}
    return [
        JobGeneration(
            one.number,
            one.attempt,
            one.created_ns,
            {ALONE: dict.fromkeys(times_of(one), "")},
            carried if one is made[-1] else {},
            needs=one.needs,
            state_bytes=one.state_bytes,
        )
        for one in made
    ]
