"""Puts a node's samples into cells of a time axis that all nodes share, and says what the source gave over time. Pure.

Cell `i` of level `l` begins at `i * CELL_S * 2**l` seconds of the run, so a coarser cell is the sum of two neighbours.
A sample belongs to the cell in which its middle lies. The number of cells has a bound, however long the run is.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

from hpcstage.jsonform import Count
from hpcstage.record.parts.rows import Sample
from hpcstage.record.schema import Series
from hpcstage.units import NS_PER_S

CELL_S = 0.25
MOST_CELLS = 8192
"""A node's track has at most this many cells: cells of half a second in a run of an hour."""
MOST_POINTS = 240
MOST_NODE_POINTS = 60
POINT_S = 1.0
"""In shorter times, files that end together would look like a peak of the source."""
SHORTEST_S = 0.2
LEAST_INTERVALS = 5
"""Fewer intervals say nothing about the source."""
FEW_SHARE = 0.4
"""With fewer transfers in flight than this share of the typical number, an interval says nothing about the source."""
IDLE_TRANSFERS = 0.01
CACHED_BYTES_PER_S = 1.2e9
"""A reader that is faster than this inside reads gets its bytes from the node's memory, not from the source."""
INSIDE_SHARE = 0.05
"""A program that is inside its opens and reads for less of the time says nothing about the source."""
MeasuredOn = Literal["copies", "reads"]
Measured = list[tuple[Sample, float, int]]
"""Samples, and the bytes per second and the number of files of each."""


@dataclass(frozen=True)
class Track:
    """What the source gave to a node, cell by cell."""

    on: MeasuredOn
    """The transfers that were measured: `copies` of the copiers or `reads` of the program."""
    level: int
    first: int
    """The cell of the first values in the columns."""
    seen_s: array[float]
    """Time in which only the source limited these transfers."""
    size: array[float]
    """Bytes in this time."""
    files: array[float]
    got: array[float]
    """All bytes that the node got from the source."""
    peer: array[float]
    """Bytes that it got from other nodes."""
    local: array[float]
    """Bytes that its program read from copies."""

    @property
    def columns(self) -> tuple[array[float], ...]:
        """Returns what is summed up by cell."""
        return self.seen_s, self.size, self.files, self.got, self.peer, self.local

    @property
    def end(self) -> int:
        """Returns the cell after the last one."""
        return self.first + len(self.seen_s)


def track_of(samples: Sequence[Sample], shift_s: float) -> Track | None:
    """Puts a node's samples on the run's axis; None if there are none."""
    if not samples:
        return None
    on, measured = _measured(samples)
    span_s = max(sample.start_s + sample.length_s for sample in samples) - min(sample.start_s for sample in samples)
    length_s, level = median(sample.length_s for sample in samples), 0
    while CELL_S * 2**level < max(0.9 * length_s, span_s / (MOST_CELLS - 2)):
        level += 1

    cell_s = CELL_S * 2**level

    def cell(sample: Sample) -> int:
        return int((sample.start_s + sample.length_s / 2 + shift_s) // cell_s)

    cells = list(map(cell, samples))
    first = min(cells)
    track = Track(on, level, first, *_zeros(max(cells) - first + 1))
    for sample, rate, files in measured:
        at = cell(sample) - first
        track.seen_s[at] += sample.length_s
        track.size[at] += rate * sample.length_s
        track.files[at] += files
    for sample, at in zip(samples, cells, strict=True):
        track.peer[at - first] += sample.peer_bytes
        track.local[at - first] += sample.local_bytes
        track.got[at - first] += sample.copied_bytes + (0 if _is_cached(sample) else sample.shim_bytes)
    return track


def _zeros(cells: int) -> list[array[float]]:
    return [array("f", bytes(4 * cells)) for _ in range(6)]


def _measured(samples: Sequence[Sample]) -> tuple[MeasuredOn, Measured]:
    """Returns the copiers' intervals, or the program's where the copiers had little to do."""
    copies, reads = _copies(samples), _reads(samples)
    if len(copies) >= LEAST_INTERVALS and 4 * len(copies) >= len(reads):
        return "copies", copies
    return "reads", reads


def _copies(samples: Sequence[Sample]) -> Measured:
    """Returns the intervals in which only the source limited the copies."""
    usable = [s for s in samples if s.length_s >= SHORTEST_S and s.busy >= IDLE_TRANSFERS and not s.limited]
    usable = usable[1:]  # transfers start and the first bytes come somewhere inside the first one
    least = FEW_SHARE * median(s.busy for s in usable) if usable else 0.0
    return [(s, s.copied_bytes / s.length_s, s.copied_files) for s in usable if s.busy >= least]


def _reads(samples: Sequence[Sample]) -> Measured:
    """Returns the intervals in which the program itself read the source while hpcstage's copiers were idle."""
    usable = [s for s in samples if _is_reading(s)]
    readers = max(1.0, median(_inside_s(s) / s.length_s for s in usable)) if usable else 1.0
    return [(s, s.shim_bytes / _inside_s(s) * readers, s.shim_opens) for s in usable]


def _is_reading(sample: Sample) -> bool:
    if sample.busy > 0.1 or sample.length_s < SHORTEST_S or not sample.shim_bytes or _is_cached(sample):
        return False
    return _inside_s(sample) >= INSIDE_SHARE * sample.length_s


def _is_cached(sample: Sample) -> bool:
    return sample.shim_bytes * NS_PER_S > CACHED_BYTES_PER_S * sample.shim_read_ns


def _inside_s(sample: Sample) -> float:
    return (sample.shim_open_ns + sample.shim_read_ns) / NS_PER_S


# ---- several tracks


def aligned(tracks: Sequence[Track], most: int = MOST_CELLS, least_s: float = 0.0) -> list[Track]:
    """Returns all tracks on one axis: in equal cells of at least `least_s`, from the first of any to the last."""
    level = max(track.level for track in tracks)
    while True:
        steps = [level - track.level for track in tracks]
        first = min(track.first >> step for track, step in zip(tracks, steps, strict=True))
        end = max((track.end - 1 >> step) + 1 for track, step in zip(tracks, steps, strict=True))
        if end - first <= most and CELL_S * 2**level >= least_s:
            return [_moved(track, level, first, end) for track in tracks]
        level += 1


def _moved(track: Track, level: int, first: int, end: int) -> Track:
    columns = _zeros(end - first)
    for old, new in zip(track.columns, columns, strict=True):
        for at, value in enumerate(old, track.first):
            new[(at >> level - track.level) - first] += value
    return Track(track.on, level, first, *columns)


def series_of(tracks: Sequence[Track]) -> Series:
    """Returns the section: what all nodes got together, in at most MOST_POINTS points."""
    if not tracks:
        return Series(interval_s=None, start_s=(), source_bytes_per_s=(), peer_bytes_per_s=(), local_bytes_per_s=())
    tracks = aligned(tracks, MOST_POINTS, POINT_S)
    length_s = CELL_S * 2 ** tracks[0].level

    def rates(columns: Iterable[array[float]]) -> tuple[float, ...]:
        return tuple(sum(values) / length_s for values in zip(*columns, strict=True))

    return Series(
        interval_s=length_s,
        start_s=tuple(cell * length_s for cell in range(tracks[0].first, tracks[0].end)),
        source_bytes_per_s=rates(track.got for track in tracks),
        peer_bytes_per_s=rates(track.peer for track in tracks),
        local_bytes_per_s=rates(track.local for track in tracks),
    )


def rows_over_time(tracks: Sequence[Track | None]) -> list[tuple[Count, ...] | None]:
    """Returns the rate at which the source gave to each node, on one axis, in at most MOST_NODE_POINTS points."""
    known = [track for track in tracks if track is not None]
    found = iter(aligned(known, MOST_NODE_POINTS, POINT_S)) if known else iter(())
    return [None if track is None else _rates(next(found)) for track in tracks]


def _rates(track: Track) -> tuple[Count, ...]:
    return tuple(round(got / (CELL_S * 2**track.level)) for got in track.got)
