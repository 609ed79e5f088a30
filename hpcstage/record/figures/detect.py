"""Finds the periods in which a noisy series of speeds lies well below its own best level. Pure.

The module finds the best level first (the median of the intervals near the upper end of the smoothed series). Then each
interval scores for or against "fallen" by its logarithm, and the runs with the best total, less a price for each
change, are taken (a two-state Viterbi path): change points are exact up to the noise of single intervals.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from hpcstage.record.figures.speeds import Point

FALLEN_SHARE = 0.75
"""A period's mean is below this share of the best level."""
LEAST_S = 1.0
"""Shorter periods are not looked for."""
BORDER_SHARE = 0.86
"""Intervals below this share of the best level speak for a period: half way to `FALLEN_SHARE` in logarithms."""
NEARLY_SHARE = 0.9
"""This share of a length is enough, as sampling intervals are not exactly as long as asked for."""
LEAST_SIGMAS = 6.0
"""A period's drop must be this many times the noise of its mean."""
FLOOR_SHARE = 0.02
"""A stalled source counts as this share of the best level in logarithms."""
BEST_S = 3.0
BEST_SHARE = 0.1
"""The best level was held for at least BEST_S, and for this share of the time."""
NOISY_DEVIATION = 0.2
"""Neighbours are merged while the noise is larger than this."""
UPPER_SHARE = 0.5
"""Noise is taken from the intervals above this share of the upper level: below it single files decide the speed."""
LEAST_STEPS = 4
CLEAR_SHARE = 0.8
"""No period was missed if no mean falls below this share of the best level (a period's ends share intervals)."""
PEAK_S = 0.5
SMOOTH_NEIGHBOURS = 2
ROUNDS = 3
SWITCH_PRICE = 1.5
"""The price of a change of level, in intervals of clear evidence."""
SHARP_SWITCH_PRICE = 1.0
CLEAREST_SCORE = 2.0
REACH_INTERVALS = 3
"""The ends of a period may move outwards by this many intervals."""
GAP_S = 5.0
"""A period does not reach over a longer time without usable intervals."""
EDGE_INTERVALS = 5
"""In periods with at least this many intervals the first and the last, which may lie partly outside of the period, do
not count for the loss."""


@dataclass(frozen=True)
class Period:
    """One period of contention."""

    start_s: float
    end_s: float
    loss: float
    """1 - mean speed / best speed."""


@dataclass(frozen=True)
class Levels:
    """The levels of a series in bytes per second, and its periods of contention."""

    best: float
    typical: float
    periods: list[Period]
    unclear: bool = False
    """Whether no period was found but none can be excluded: somewhere the mean over `LEAST_S` is as low as in one, or
    the best level that was found may itself be that of a period."""


def find(points: Sequence[Point]) -> Levels | None:
    """Finds levels and periods; None if the source was not seen long enough at its best."""
    seen, points = points, _calm(points)
    strong = [p for p in points if not p.weak]
    if sum(p.length_s for p in strong) < BEST_S:
        return None
    best = _first_best(strong)
    if best <= 0:
        return None
    periods: list[Period] = []
    for _ in range(ROUNDS):
        periods = _periods(points, best)
        best = _best_outside(strong, periods, best)
    factor = _plain(strong, periods)
    unclear = not periods and (_dips(seen, best) or _peaks(seen, best))
    return Levels(best * factor, median(p.bytes_per_s for p in strong), periods, unclear)


def _dips(points: Sequence[Point], best: float) -> bool:
    """Returns whether the mean over any `LEAST_S` is below what a period's would be."""
    return any(mean < CLEAR_SHARE * best for mean in _means(points, LEAST_S))


def _peaks(points: Sequence[Point], best: float) -> bool:
    """Returns whether a mean is so far above the best level that this level may itself be that of a period."""
    return any(CLEAR_SHARE * mean > best for mean in _means(points, PEAK_S))


def _means(points: Sequence[Point], least_s: float) -> Iterator[float]:
    """Yields the mean speeds of all runs of neighbours that are just as long as `least_s`."""
    for run in _without_gaps(points):
        length_s = work = 0.0
        first = 0
        for point in run:
            length_s += point.length_s
            work += point.speed * point.length_s
            while length_s - run[first].length_s >= least_s * NEARLY_SHARE:
                length_s -= run[first].length_s
                work -= run[first].speed * run[first].length_s
                first += 1
            if length_s >= least_s * NEARLY_SHARE:
                yield work / length_s


def _plain(points: Sequence[Point], periods: Sequence[Period]) -> float:
    """Returns the factor from compared speeds back to bytes per second as seen, in intervals outside of periods."""
    outside = [p for p in points if not _inside(p, periods) and p.speed > 0] or list(points)
    return median(p.bytes_per_s / p.speed for p in outside if p.speed > 0)


def _calm(points: Sequence[Point]) -> list[Point]:
    """Merges neighbours until the noise between them is small enough to tell levels apart."""
    current = list(points)
    while len(current) >= 16 and _noise(current) > NOISY_DEVIATION:
        current = _halved(current)
    return current


def _halved(points: Sequence[Point]) -> list[Point]:
    merged = [_both(a, b) for a, b in zip(points[::2], points[1::2], strict=False)]
    return merged + list(points[len(merged) * 2 :])


def _both(one: Point, other: Point) -> Point:
    length_s = one.length_s + other.length_s

    def mean(of: Callable[[Point], float]) -> float:
        return (of(one) * one.length_s + of(other) * other.length_s) / length_s

    return Point(
        one.start_s,
        other.end_s - one.start_s,
        mean(lambda p: p.bytes_per_s),
        mean(lambda p: p.speed),
        one.files + other.files,
        weak=one.weak or other.weak,
    )


def _noise(points: Sequence[Point]) -> float:
    """Returns the standard deviation of an interval's logarithm, from the median difference of neighbours, which
    single steps of the level hardly change."""
    ordered = sorted(p.speed for p in points)
    top = ordered[int(0.9 * (len(ordered) - 1))] if ordered else 0.0
    if top <= 0 or len(points) < 3:
        return 0.0
    logs = [math.log(max(p.speed / top, FLOOR_SHARE)) for p in points]
    steps = [abs(b - a) for a, b in pairwise(logs) if min(a, b) > math.log(UPPER_SHARE)]
    if len(steps) < LEAST_STEPS:
        steps = [abs(b - a) for a, b in pairwise(logs)]
    return 1.4826 * median(steps) / math.sqrt(2)


def _first_best(points: Sequence[Point]) -> float:
    """Returns the highest speed of the smoothed series that was held for long enough."""
    smooth = _smoothed(points)
    total_s = sum(p.length_s for p in points)
    wanted_s = min(max(BEST_S, BEST_SHARE * total_s), total_s / 2)
    held_s = 0.0
    for speed, length_s in sorted(smooth, reverse=True):
        held_s += length_s
        if held_s >= wanted_s:
            return speed
    return 0.0


def _smoothed(points: Sequence[Point]) -> list[tuple[float, float]]:
    """Returns for each interval the median speed over its neighbours, and its length."""
    speeds = [p.speed for p in points]
    return [
        (median(speeds[max(0, i - SMOOTH_NEIGHBOURS) : i + SMOOTH_NEIGHBOURS + 1]), point.length_s)
        for i, point in enumerate(points)
    ]


def _best_outside(points: Sequence[Point], periods: Sequence[Period], best: float) -> float:
    """Returns the median speed of the intervals near the best level and outside of periods."""
    near = [
        p.speed for p, (smooth, _) in zip(points, _smoothed(points), strict=True)
        if not _inside(p, periods) and smooth > BORDER_SHARE * best
    ]  # fmt: skip
    return max(median(near), BORDER_SHARE * best) if len(near) >= 2 else best


def _inside(point: Point, periods: Sequence[Period]) -> bool:
    middle_s = point.start_s + point.length_s / 2
    return any(period.start_s <= middle_s <= period.end_s for period in periods)


def _periods(points: Sequence[Point], best: float) -> list[Period]:
    noise = _noise(points)
    return [
        _period(found, best)
        for run in _without_gaps(points)
        for found in _sharpened(run, two_levels([_score(p, best) for p in run]), best)
        if _counts(found, noise, best)
    ]


def _sharpened(run: Sequence[Point], rough: Sequence[tuple[int, int]], best: float) -> list[Sequence[Point]]:
    """Finds each rough period again with its own level in place of the general border: its ends may move, and a gap
    splits it."""
    found: list[Sequence[Point]] = []
    ends = [0, *(end for _, end in rough)]
    starts = [*(start for start, _ in rough), len(run)]
    for index, (start, end) in enumerate(rough):
        first, last = max(ends[index], start - REACH_INTERVALS), min(starts[index + 1], end + REACH_INTERVALS)
        level = median(_log(p, best) for p in _inner(run[start:end]))
        if level >= 0:
            continue
        near = run[first:last]
        scores = [min(max(2 * _log(p, best) / level - 1, -1.0), 1.0) for p in near]
        found += [near[a:b] for a, b in two_levels(scores, SHARP_SWITCH_PRICE)]
    return found


def _without_gaps(points: Sequence[Point]) -> list[list[Point]]:
    runs: list[list[Point]] = []
    for point in points:
        if runs and point.start_s - runs[-1][-1].end_s <= GAP_S:
            runs[-1].append(point)
        else:
            runs.append([point])
    return runs


def _log(point: Point, best: float) -> float:
    return math.log(max(point.speed / best, FLOOR_SHARE))


def _score(point: Point, best: float) -> float:
    """Scores -1 at the best level and 1 twice as far down as the border; the score is limited, so that one interval
    never outweighs several."""
    score = _log(point, best) / math.log(BORDER_SHARE) - 1
    return min(max(score, -1.0), CLEAREST_SCORE)


def _counts(points: Sequence[Point], noise: float, best: float) -> bool:
    if points[-1].end_s - points[0].start_s < LEAST_S * NEARLY_SHARE:
        return False
    if _mean_speed(_inner(points)) >= FALLEN_SHARE * best:
        return False
    drop = -sum(_log(p, best) for p in points) / len(points)
    return drop * math.sqrt(len(points)) >= LEAST_SIGMAS * noise


def _inner(points: Sequence[Point]) -> Sequence[Point]:
    return points[1:-1] if len(points) >= EDGE_INTERVALS else points


def _mean_speed(points: Sequence[Point]) -> float:
    return sum(p.speed * p.length_s for p in points) / sum(p.length_s for p in points)


def _period(points: Sequence[Point], best: float) -> Period:
    return Period(points[0].start_s, points[-1].end_s, min(1.0, max(0.0, 1 - _mean_speed(_inner(points)) / best)))


def two_levels(scores: Sequence[float], switch: float = SWITCH_PRICE) -> list[tuple[int, int]]:
    """Returns the runs (first, last + 1) with the largest sum of scores, less `switch` for each of their ends."""
    out, inside = 0.0, -switch
    came: list[tuple[bool, bool]] = []
    for score in scores:
        leave, enter = inside - switch > out, out - switch > inside
        came.append((leave, enter))
        out, inside = max(out, inside - switch), max(inside, out - switch) + score
    return _backwards(came, inside - switch > out)


def _backwards(came: Sequence[tuple[bool, bool]], inside: bool) -> list[tuple[int, int]]:
    runs: list[tuple[int, int]] = []
    end = len(came)
    for index in range(len(came) - 1, -1, -1):
        leave, enter = came[index]
        if inside and enter:
            runs.append((index, end))
            inside = False
        elif not inside and leave:
            end, inside = index, True
    if inside:
        runs.append((0, end))
    return runs[::-1]
