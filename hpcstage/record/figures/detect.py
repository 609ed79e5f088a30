"""Finds the periods in which a noisy series of speeds lies well below its own best level. Pure.

The best level is the median of the intervals near the upper end of the smoothed series. A period is a run of intervals
whose smoothed speed is below BORDER_SHARE of it, if its median is below FALLEN_SHARE and far outside of the noise.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import NamedTuple

from hpcstage.record.schema import Period

FALLEN_SHARE = 0.75
"""A period's median is below this share of the best level."""
BORDER_SHARE = 0.86
"""Intervals below this share of the best level are in a period: half way to `FALLEN_SHARE` in logarithms."""
CLEAR_SHARE = 0.8
"""No period was missed if no mean falls below this share of the best level (a period's ends share intervals)."""
LEAST_S = 1.0
"""Shorter periods are not looked for."""
NEARLY_SHARE = 0.9
"""This share of a length is enough, as intervals are not exactly as long as asked for."""
LEAST_SIGMAS = 6.0
"""A period's drop must be this many times the noise of its mean."""
FLOOR_SHARE = 0.02
"""A stalled source counts as this share of the best level in logarithms."""
BEST_S = 3.0
BEST_SHARE = 0.1
"""The best level was held for at least BEST_S, and for this share of the time."""
NOISY_DEVIATION = 0.2
"""Neighbours are merged while the noise is larger than this."""
NEIGHBOURS = 2
"""The smoothed speed is the median over so many neighbours on each side."""
PEAK_S = 0.5
GAP_S = 5.0
"""A period does not reach over a longer time without intervals."""


class Point(NamedTuple):
    """The speed in one interval."""

    start_s: float
    length_s: float
    speed: float
    is_full: bool = True
    """False: few nodes were reading; the interval says whether the source was slow, not how fast it can be."""

    @property
    def end_s(self) -> float:
        """Returns when the interval ends."""
        return self.start_s + self.length_s


@dataclass(frozen=True)
class Levels:
    """The best level of a series, and its periods of contention."""

    best: float
    periods: list[Period]
    unclear: bool = False
    """Whether no period was found but none can be excluded: somewhere the mean over `LEAST_S` is as low as in one, or
    the best level that was found may itself be that of a period."""


def find(points: Sequence[Point], most: float = math.inf) -> Levels | None:
    """Finds the best level, which is taken to be `most` at most, and the periods; None if the source was not seen long
    enough at its best."""
    seen, points = points, _calm(points)
    full = [p for p in points if p.is_full]
    total_s = sum(p.length_s for p in full)
    best = min(_best(full, total_s), most) if total_s >= BEST_S else 0.0
    if best <= 0:
        return None
    noise = _noise(points)
    runs = [run for part in _without_gaps(points) for run in _low(part, best)]
    periods = [_period(run, best) for run in runs if _counts(run, noise, best)]
    dips = any(mean < CLEAR_SHARE * best for mean in _means(seen, LEAST_S))
    peaks = any(CLEAR_SHARE * mean > best for mean in _means(seen, PEAK_S))
    return Levels(best, periods, unclear=not periods and (dips or peaks))


def _calm(points: Sequence[Point]) -> Sequence[Point]:
    """Merges neighbours until the noise between them is small enough to tell levels apart."""
    while len(points) >= 16 and _noise(points) > NOISY_DEVIATION:
        points = [_merged(points[at : at + 2]) for at in range(0, len(points), 2)]
    return points


def _merged(points: Sequence[Point]) -> Point:
    start_s, end_s = points[0].start_s, points[-1].end_s
    return Point(start_s, end_s - start_s, _mean(points), all(p.is_full for p in points))


def _noise(points: Sequence[Point]) -> float:
    """Returns the standard deviation of an interval's logarithm, from the median difference of neighbours, which
    single steps of the level hardly change."""
    top = max((p.speed for p in points), default=0.0)
    if top <= 0 or len(points) < 3:
        return 0.0
    logs = [_log(p, top) for p in points]
    return 1.4826 * median(abs(b - a) for a, b in pairwise(logs)) / math.sqrt(2)


def _best(points: Sequence[Point], total_s: float) -> float:
    """Returns the median speed near the highest smoothed speed that was held for long enough."""
    smooth = _smoothed(points)
    wanted_s, upper = min(max(BEST_S, BEST_SHARE * total_s), total_s / 2), 0.0
    for speed, point in sorted(zip(smooth, points, strict=True), reverse=True):
        upper, wanted_s = speed, wanted_s - point.length_s
        if wanted_s <= 0:
            break
    return median(p.speed for p, speed in zip(points, smooth, strict=True) if speed >= BORDER_SHARE * upper)


def _smoothed(points: Sequence[Point]) -> list[float]:
    speeds = [p.speed for p in points]
    return [median(speeds[max(0, at - NEIGHBOURS) : at + NEIGHBOURS + 1]) for at in range(len(speeds))]


def _low(points: Sequence[Point], best: float) -> Iterator[Sequence[Point]]:
    """Yields the runs of neighbours whose smoothed speed is low."""
    begin = None
    for at, speed in enumerate([*_smoothed(points), math.inf]):
        if speed < BORDER_SHARE * best:
            begin = at if begin is None else begin
        elif begin is not None:
            yield _trimmed(points[begin:at], best)
            begin = None


def _trimmed(run: Sequence[Point], best: float) -> Sequence[Point]:
    """Cuts off the ends that are nearer to the best level than to that of the run."""
    border = (median(p.speed for p in run) + best) / 2
    low = [at for at, p in enumerate(run) if p.speed < border]
    return run[low[0] : low[-1] + 1] if low else run


def _without_gaps(points: Sequence[Point]) -> list[list[Point]]:
    runs: list[list[Point]] = []
    for point in points:
        if runs and point.start_s - runs[-1][-1].end_s <= GAP_S:
            runs[-1].append(point)
        else:
            runs.append([point])
    return runs


def _counts(run: Sequence[Point], noise: float, best: float) -> bool:
    if len(run) <= NEIGHBOURS or run[-1].end_s - run[0].start_s < LEAST_S * NEARLY_SHARE:
        return False
    drop = -sum(_log(p, best) for p in run) / math.sqrt(len(run))
    return median(p.speed for p in run) < FALLEN_SHARE * best and drop >= LEAST_SIGMAS * noise


def _period(run: Sequence[Point], best: float) -> Period:
    inner = run[1:-1] if len(run) > 2 * NEIGHBOURS else run  # its ends may lie partly outside
    loss = max(0.0, 1 - _mean(inner) / best)
    return Period(start_s=run[0].start_s, end_s=run[-1].end_s, loss=loss)


def _log(point: Point, best: float) -> float:
    return math.log(max(point.speed / best, FLOOR_SHARE))


def _mean(points: Sequence[Point]) -> float:
    return sum(p.speed * p.length_s for p in points) / sum(p.length_s for p in points)


def _means(points: Sequence[Point], length_s: float) -> Iterator[float]:
    """Yields the mean speeds of all runs of neighbours that are just as long as this."""
    least_s = length_s * NEARLY_SHARE
    for run in _without_gaps(points):
        first = 0
        for last, point in enumerate(run):
            while first < last and point.end_s - run[first + 1].start_s >= least_s:
                first += 1
            if point.end_s - run[first].start_s >= least_s:
                yield _mean(run[first : last + 1])
