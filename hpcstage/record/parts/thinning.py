"""Fewer and longer samples, where there are so many nodes that a second of one of them matters little. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hpcstage.record.parts.part import Sample

NODES = 64
"""Of jobs with more nodes, parts are thinned."""
SAMPLES = 900
"""So many are left of each: four seconds each of an hour."""
LEVELS = ("queued_files", "store_bytes")
"""Not added up: as they stood at the end."""


def thinned(samples: Sequence[Sample], most: int = SAMPLES) -> list[Sample]:
    """Neighbours are joined, two by two, until at most so many are left. Sums stay what they are."""
    found = list(samples)
    while len(found) > most:
        pairs = [_both(one, other) for one, other in zip(found[::2], found[1::2], strict=False)]
        found = [*pairs, *found[2 * len(pairs) :]]
    return found


def _both(one: Sample, other: Sample) -> Sample:
    end_s = other.start_s + other.length_s
    values = {
        name: getattr(other, name) if name in LEVELS else getattr(one, name) + getattr(other, name)
        for name in one.__dataclass_fields__
    }
    values["start_s"], values["length_s"] = one.start_s, round(end_s - one.start_s, 4)
    seen_s = one.length_s + other.length_s
    values["busy"] = round((one.busy * one.length_s + other.busy * other.length_s) / seen_s, 3) if seen_s else 0.0
    values["limited"] = one.limited or other.limited
    return type(one)(**values)
