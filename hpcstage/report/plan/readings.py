"""Prints what a named sampler reads, epoch by epoch, for people and for programs, as a part of `page`.

This module owns wording and layout. Epochs are computed one after the other and only as far as they are shown.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from itertools import islice
from typing import Any

from hpcstage.plan.dataset.roots import printable
from hpcstage.plan.order.readings import Reading, Readings
from hpcstage.preview.planfile import Plan, path_json
from hpcstage.units import format_size

DEFAULT_EPOCHS = 3


def text(plan: Plan, readings: Readings, limit: int, epochs: int) -> Iterator[list[str]]:
    """Yields the lines of the first `epochs`, with `limit` rows each, and a line about those that are left out."""
    if limit <= 0:
        return
    for reading in islice(readings, epochs):
        yield list(_epoch(plan, readings, reading, limit))
    rest = readings.asked.epochs - epochs
    if rest > 0:
        yield [f"... and {rest:,} more epoch{'s' * (rest > 1)} (--limit N shows N rows of each)"]


def to_json(plan: Plan, readings: Readings, limit: int | None) -> dict[str, Any]:
    """Returns the sampler and, with a limit, the first `limit` reads of each epoch as `entries`."""
    data: dict[str, Any] = {
        "sampler": asdict(readings.asked),
        "about": readings.about,
        "samples_per_epoch": readings.samples,
    }
    if limit:
        data["epochs"] = [
            {"epoch": reading.epoch, "entries": [_entry(plan, *row) for row in _rows(readings, reading, limit)]}
            for reading in readings
        ]
    return data


def _epoch(plan: Plan, readings: Readings, reading: Reading, limit: int) -> Iterator[str]:
    count = len(reading.indices)
    on = f" on {len(readings.asked.ranks):,} ranks" if len(readings.asked.ranks) > 1 else ""
    yield f"epoch {reading.epoch} reads {count:,} sample{'s' * (count != 1)}{on}"
    yield f"{'position':>9} {'rank':>5} {'index':>9} {'size':>9}  path"
    for position, rank, index, file_id in _rows(readings, reading, limit):
        size, path = format_size(plan.manifest.size(file_id)), printable(_path(plan, file_id))
        yield f"{position:>9,} {rank:>5,} {index:>9,} {size:>9}  {path}"
    if count > limit:
        yield f"{'':9} ... and {count - limit:,} more (--limit N shows more)"


def _rows(readings: Readings, reading: Reading, limit: int) -> Iterator[tuple[int, int, int, int]]:
    """Yields position from 1, rank, index of the program's dataset, and id of the file."""
    for position, index in enumerate(reading.indices[:limit]):
        yield position + 1, readings.rank_at(position), index, readings.dataset[index]


def _entry(plan: Plan, position: int, rank: int, index: int, file_id: int) -> dict[str, Any]:
    where = path_json(plan.manifest.source_path(file_id))
    return {"position": position, "rank": rank, "index": index, **where, "size_bytes": plan.manifest.size(file_id)}


def _path(plan: Plan, file_id: int) -> bytes:
    one = len(plan.manifest.datasets) == 1
    return plan.manifest.path(file_id) if one else plan.manifest.source_path(file_id)
