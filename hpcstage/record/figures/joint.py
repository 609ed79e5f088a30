"""Tells periods in which all nodes read slowly (the shared file system) from those of one (its link, its load). Pure.

The source is judged by what all nodes got from it together, as one node's share depends on how many others are
reading: when some have finished, the rest get more. The sum of fewer active nodes than usual is scaled to the usual
number; a fall counts if more than half of the observed nodes took part in it. A single node is judged by its speed
divided by the median of the others' at the same moment, which does not contain what slows all of them.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from math import isnan, nan
from statistics import median

from hpcstage.record.figures import detect
from hpcstage.record.figures.cells import CELLS, Track, coarser
from hpcstage.record.figures.speeds import Point, even_sizes

FEW = 0.25
"""With fewer than this share of the usual number of active nodes, an interval says nothing about the source."""
FEWER = 0.8
"""With fewer than this share of the usual number, an interval says nothing about how fast the source can be."""
USUAL = 0.9
"""The usual number of active nodes is this quantile of their number over time."""
LEAST_POINTS = 5
EXAMINED = 32
"""The own periods of at most this many nodes are looked for: of those that lag behind the others most."""
LAGS = 0.75


@dataclass(frozen=True)
class Shared:
    """A period in which more than half of the observed nodes were slower; `fallen` are their positions in the list of
    tracks."""

    period: detect.Period
    fallen: list[int]
    observed: int


@dataclass(frozen=True)
class Joint:
    """The levels and periods that follow from the tracks of several nodes."""

    best: float | None
    typical: float | None
    shared: list[Shared]
    own: dict[int, list[detect.Period]]
    """The periods of single nodes, by position; of at most EXAMINED nodes."""
    pace: list[float | None]
    """Each node's median speed as a share of the others' at the same moment."""
    observed_s: float
    unclear: bool
    """Whether a shared period can be neither shown nor excluded."""


def joint_of(tracks: Sequence[Track]) -> Joint:
    """Judges the source and each node by all tracks, which have the same `on`."""
    tracks, cells = _aligned(tracks)
    points = _together(tracks, cells)
    found = detect.find(even_sizes(points)) if len(points) >= LEAST_POINTS else None
    shared = _shared(tracks, cells, found.periods) if found else []
    ratios = _ratios(tracks, cells)
    return Joint(
        found.best if found else None,
        found.typical if found else None,
        shared,
        _own(tracks, cells, ratios),
        [_middle(row) for row in ratios],
        sum(point.length_s for point in points),
        found is None or found.unclear or len(shared) < len(found.periods),
    )


def _aligned(tracks: Sequence[Track]) -> tuple[list[Track], range]:
    """Returns all tracks in cells of one length, and the range of these cells."""
    level = max(track.level for track in tracks)
    while True:
        first = min(track.first >> (level - track.level) for track in tracks)
        last = max((track.first + len(track.seen_s) - 1) >> (level - track.level) for track in tracks)
        if last - first < CELLS:
            return [coarser(track, level) for track in tracks], range(first, last + 1)
        level += 1


def _together(tracks: Sequence[Track], cells: range) -> list[Point]:
    """Returns the sum over all nodes for each cell with enough of them, scaled to the usual number of active nodes."""
    sums = [[0.0] * len(cells) for _ in range(4)]
    for track in tracks:
        for total, column in zip(sums, (track.seen_s, track.size, track.work, track.files), strict=True):
            for at, value in enumerate(column, track.first - cells.start):
                total[at] += value
    length_s = float(2 ** tracks[0].level)
    active = sorted(seen_s for seen_s in sums[0] if seen_s > 0)
    usual = active[int(USUAL * (len(active) - 1))] if active else 0.0
    points = []
    for cell, seen_s, size, work, files in zip(cells, *sums, strict=True):
        if seen_s > 0 and seen_s >= FEW * usual:
            raised = max(1.0, usual / seen_s) / length_s
            points.append(
                Point(cell * length_s, length_s, size / length_s, work * raised, files, weak=seen_s < FEWER * usual)
            )
    return points


# ---- all at once ----


def _shared(tracks: Sequence[Track], cells: range, periods: Sequence[detect.Period]) -> list[Shared]:
    length_s = 2 ** tracks[0].level
    inside = [[c for c in cells if p.start_s <= (c + 0.5) * length_s <= p.end_s] for p in periods]
    outside = sorted(set(cells) - {cell for part in inside for cell in part})
    normal = [track.mean(outside) for track in tracks]
    found = []
    for period, part in zip(periods, inside, strict=True):
        levels = [_share(track.mean(part), level) for track, level in zip(tracks, normal, strict=True)]
        known = [at for at, level in enumerate(levels) if level is not None]
        fallen = [at for at in known if (levels[at] or 0.0) < detect.BORDER]
        if 2 * len(fallen) > len(known):
            found.append(Shared(period, fallen, len(known)))
    return found


def _share(value: float | None, of: float | None) -> float | None:
    return None if value is None or not of else value / of


# ---- one node ----


def _ratios(tracks: Sequence[Track], cells: range) -> list[array[float]]:
    """Divides each node's speed by the median of the others', cell by cell; nan where there is nothing to compare."""
    rows = [track.speeds(cells) for track in tracks]
    for at, speeds in enumerate(zip(*rows, strict=True)):
        ordered = sorted(speed for speed in speeds if not isnan(speed))
        for row, speed in zip(rows, speeds, strict=True):
            if not isnan(speed):
                others = _median_without(ordered, speed)
                row[at] = min(speed / others, 1e6) if others > 0 else nan
    return rows


def _median_without(ordered: Sequence[float], value: float) -> float:
    """Returns the median of sorted values without this one; 0 if there is no other."""
    rest, own = len(ordered) - 1, bisect_left(ordered, value)
    if rest < 1:
        return 0.0
    low, high = (rest - 1) // 2, rest // 2
    return (ordered[low + (low >= own)] + ordered[high + (high >= own)]) / 2


def _middle(row: array[float]) -> float | None:
    known = [ratio for ratio in row if not isnan(ratio)]
    return median(known) if len(known) >= LEAST_POINTS else None


def _own(tracks: Sequence[Track], cells: range, ratios: Sequence[array[float]]) -> dict[int, list[detect.Period]]:
    length_s = 2 ** tracks[0].level
    lags = sorted(((_lag(row), at) for at, row in enumerate(ratios)), reverse=True)
    found = {}
    for lag, at in lags[:EXAMINED]:
        if lag * length_s < detect.LEAST_S * (1 - LAGS) / 2:
            break
        result = detect.find(_compared(tracks[at], cells, ratios[at]))
        if result and result.periods:
            found[at] = result.periods
    return found


def _lag(row: array[float]) -> float:
    """Returns by how much the node's ratios lie below `LAGS` of its own upper level, or of the others', in sum."""
    known = sorted(ratio for ratio in row if not isnan(ratio))
    if len(known) < LEAST_POINTS:
        return 0.0
    level = LAGS * min(1.0, known[int(0.8 * (len(known) - 1))])
    return sum(level - ratio for ratio in known if ratio < level)


def _compared(track: Track, cells: range, row: array[float]) -> list[Point]:
    """Returns points whose speed is the ratio, at most 1: being faster than the others is no level to fall from."""
    length_s = float(2**track.level)
    points = []
    for cell, ratio in zip(cells, row, strict=True):
        if not isnan(ratio):
            at = cell - track.first
            rate = track.size[at] / track.seen_s[at]
            points.append(Point(cell * length_s, length_s, rate, ratio, track.files[at], weak=False))
    return [point._replace(speed=min(1.0, point.speed)) for point in even_sizes(points)]
