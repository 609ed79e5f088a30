"""Drains the checkpoints of a run that was killed: its newest generation, and what is in none beside it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from hpcstage.checkpoint.generations.manifest import DamagedGeneration, GenerationManifest
from hpcstage.checkpoint.generations.reading import GenerationReader, LocalSource
from hpcstage.checkpoint.keeping.facts import CheckpointCharter, CheckpointPlace, KeepingReport, UndrainedEntry
from hpcstage.checkpoint.keeping.leftovers import leftovers, place_leftovers
from hpcstage.checkpoint.keeping.plain import drain_generation


def drain_late(place: CheckpointPlace, charter: CheckpointCharter) -> KeepingReport:
    """Drains checkpoints that nobody keeps any more. Raises OSError where a file system fails."""
    charter.check_target()
    target, report = Path(charter.target), KeepingReport()
    newest: GenerationManifest | None = None
    refused: list[str] = []
    with LocalSource(place.store) as source:
        for number in reversed(source.numbers()):
            try:
                done = drain_generation(source, number, target, charter.run_id, place.tree)
                newest = GenerationReader(source).manifest(number)
            except DamagedGeneration as error:
                refused.append(f"generation {number} of run {charter.run_id}: {error.what}")
                continue
            report = KeepingReport(
                drained_number=number,
                findings={"beside": dict(done.beside)},
                files=done.files,
                bytes_carried=done.size_bytes,
            )
            break
    missing, beside = place_leftovers(place, leftovers(place, newest, target), charter)
    return replace(report, refused=tuple(refused), undrained=tuple(missing), unclosed=tuple(beside.values()))


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
