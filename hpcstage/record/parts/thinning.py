"""Joins samples into fewer and longer ones in jobs of so many nodes that a second of one matters little. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hpcstage.record.parts.part import Sample

NODES = 64
"""The parts of jobs with more nodes than this are thinned."""
SAMPLES = 900
"""A thinned part has at most this many samples: four seconds each in a run of an hour."""
LEVELS = ("queued_files", "store_bytes")
"""These fields are not added up: the value of the later sample is used."""


def thinned(samples: Sequence[Sample], most: int = SAMPLES) -> list[Sample]:
    """Joins neighbours two by two until at most `most` samples are left. Their sums do not change."""
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
