"""Computes speeds of the source from samples: chooses the intervals that say something about it. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

from hpcstage.record.parts.rows import Sample
from hpcstage.record.schema import MeasuredOn
from hpcstage.units import NS_PER_S

SHORTEST_S = 0.2
LEAST_POINTS = 5
"""Fewer intervals say nothing about the source."""
FEW_SHARE = 0.5
"""The speed of an interval with fewer transfers in flight than this share of the typical number is scaled to it, as far
as the source is faster with more of them."""
IDLE_TRANSFERS = 0.01
"""An interval with a smaller mean number of transfers in flight was almost idle, and says nothing about the source."""
CACHED_BYTES_PER_S = 1.2e9
"""A reader that is faster than this inside reads gets its bytes from the node's memory, not from the source."""
PIECES, AHEAD_BYTES = 3, 256 * 1024
"""A file is read piece by piece with this many reads or more; the kernel reads ahead less than so many bytes of it."""
SIZES_DIFFER_FACTOR = 1.5
"""Speeds are evened out for file sizes if these spread (90th by 10th percentile of the intervals' means) by more."""
SMOOTH_NEIGHBOURS = 2
CLASS_POINTS = 4
GRID_STEPS = 40
EVENER_FACTOR = 0.8
LEAST_FILES = 20
"""A mean size needs at least this many files."""


class Point(NamedTuple):
    """One interval's speed of the source."""

    start_s: float
    length_s: float
    bytes_per_s: float
    """The measured rate."""
    speed: float
    """The rate made comparable, for equal numbers in flight and equal file sizes; in the unit of `bytes_per_s`."""
    files: float
    """The number of files in the interval, from which their mean size follows."""
    weak: bool
    """Whether few transfers were in flight: the interval says whether the source was slow, not how fast it can be."""

    @property
    def end_s(self) -> float:
        """Returns when the interval ends."""
        return self.start_s + self.length_s


def of_samples(samples: Sequence[Sample]) -> tuple[MeasuredOn, list[Point]]:
    """Returns `copies` and the copiers' intervals, or `reads` and the program's where the copiers had little to do."""
    copies = of_copies(samples)
    reads = of_reads(samples)
    if len(copies) >= LEAST_POINTS and 4 * len(copies) >= len(reads):
        return "copies", copies
    return "reads", reads


def of_copies(samples: Sequence[Sample]) -> list[Point]:
    """Returns the intervals in which only the source limited the copies."""
    usable = [s for s in samples if s.length_s >= SHORTEST_S and s.busy >= IDLE_TRANSFERS and not s.limited]
    usable = usable[1:]  # transfers start and the first bytes come somewhere inside the first one
    if not usable:
        return []
    busy = median(s.busy for s in usable)
    points = [_copy_point(s, weak=s.busy < FEW_SHARE * busy) for s in usable]
    gain = _gain(points)
    return [
        p._replace(speed=p.speed * min(gain, busy / s.busy)) if p.weak else p
        for p, s in zip(points, usable, strict=True)
    ]


def _copy_point(sample: Sample, *, weak: bool) -> Point:
    rate = sample.copied_bytes / sample.length_s
    return Point(sample.start_s, sample.length_s, rate, rate, sample.copied_files, weak)


def _gain(points: Sequence[Point]) -> float:
    """Returns how many times as fast the source is, at most, with the typical number of transfers as with few.

    The copiers begin with few transfers and make no more than the source rewards: its best speed with few may be its
    best.
    """
    few, others = ([p.speed for p in points if p.weak is weak] for weak in (True, False))
    if not any(few):
        return math.inf
    return max(1.0, _upper(others) / max(1.0, _upper(few)))


def _upper(speeds: Sequence[float]) -> float:
    """Returns the median of the best third."""
    return median(sorted(speeds, reverse=True)[: max(2, len(speeds) // 3)])


def of_reads(samples: Sequence[Sample]) -> list[Point]:
    """Returns the intervals in which the program itself read the source while hpcstage's copiers were idle."""
    usable = [s for s in samples if _reads_source(s)]
    if not usable:
        return []
    inside = median(_inside_ns(s) / NS_PER_S / s.length_s for s in usable)
    readers = inside if reads_pieces(usable) else max(1.0, inside)
    return [_read_point(s, readers) for s in usable]


def reads_pieces(samples: Sequence[Sample]) -> bool:
    """Returns whether the program reads large files piece by piece.

    The kernel reads ahead while the program computes on a piece: the time inside reads is then not all the time that
    the source was busy, and only the rate over time is known.
    """
    opens = sum(s.shim_opens for s in samples)
    in_pieces = sum(s.shim_reads for s in samples) >= PIECES * opens
    return in_pieces and sum(s.shim_bytes for s in samples) >= AHEAD_BYTES * opens


def _reads_source(sample: Sample) -> bool:
    if sample.busy > 0.1 or sample.length_s < SHORTEST_S or not sample.shim_bytes or not sample.shim_read_ns:
        return False
    if sample.shim_bytes * NS_PER_S / sample.shim_read_ns > CACHED_BYTES_PER_S:
        return False
    return _inside_ns(sample) >= 0.05 * sample.length_s * NS_PER_S


def _inside_ns(sample: Sample) -> int:
    return sample.shim_open_ns + sample.shim_read_ns


def _read_point(sample: Sample, readers: float) -> Point:
    rate = sample.shim_bytes * NS_PER_S / _inside_ns(sample) * readers
    return Point(sample.start_s, sample.length_s, rate, rate, sample.shim_opens, weak=False)


def even_sizes(points: Sequence[Point]) -> list[Point]:
    """Scales the speeds as if all files had one size: small files cost their latency, large ones their bytes.

    A transfer of s bytes takes a + s / C, so intervals of small files are slower by 1 + a C / s under any load. The
    product a C (the size at which both parts are equal) is chosen so that the best speeds of all sizes agree best.
    """
    sizes = _smooth_sizes(points)
    if not sizes or _spread(sizes) < SIZES_DIFFER_FACTOR:
        return list(points)
    half = _half_size(_best_by_size([p.speed for p in points], sizes))
    middle = 1 + half / median(sizes)
    return [p._replace(speed=p.speed * (1 + half / size) / middle) for p, size in zip(points, sizes, strict=True)]


def _smooth_sizes(points: Sequence[Point]) -> list[float] | None:
    """Returns the mean file size around each interval; None where there are too few files for a mean."""
    result = []
    for index in range(len(points)):
        near = points[max(0, index - SMOOTH_NEIGHBOURS) : index + SMOOTH_NEIGHBOURS + 1]
        files = sum(p.files for p in near)
        if files < LEAST_FILES:
            return None
        result.append(max(1.0, sum(p.bytes_per_s * p.length_s for p in near) / files))
    return result


def _spread(sizes: Sequence[float]) -> float:
    ordered = sorted(sizes)
    return ordered[int(0.9 * (len(ordered) - 1))] / ordered[int(0.1 * (len(ordered) - 1))]


def _best_by_size(speeds: Sequence[float], sizes: Sequence[float]) -> list[tuple[float, float]]:
    """Returns (size, upper speed) for each class of sizes (a factor of two) that occurs often enough."""
    classes: dict[int, list[tuple[float, float]]] = {}
    for speed, size in zip(speeds, sizes, strict=True):
        classes.setdefault(round(math.log2(size)), []).append((speed, size))
    found = []
    for members in classes.values():
        if len(members) >= CLASS_POINTS:
            upper = sorted(members, reverse=True)[: max(2, len(members) // 3)]
            found.append((median(size for _, size in upper), max(1.0, median(speed for speed, _ in upper))))
    return found


def _half_size(best: Sequence[tuple[float, float]]) -> float:
    """Returns the size at which latency and bytes cost the same; 0 where size makes no difference."""
    if len(best) < 2:
        return 0.0
    low, high = min(size for size, _ in best) / 30, max(size for size, _ in best) * 30
    grid = [0.0, *(low * (high / low) ** (k / GRID_STEPS) for k in range(GRID_STEPS + 1))]
    unevenness = {half: _uneven(best, half) for half in grid}
    half = min(grid, key=lambda h: unevenness[h])
    return half if unevenness[half] < EVENER_FACTOR * unevenness[0.0] else 0.0


def _uneven(best: Sequence[tuple[float, float]], half: float) -> float:
    """Returns the mean distance of the evened speeds' logarithms from their mean."""
    logs = [math.log(speed * (1 + half / size)) for size, speed in best]
    middle = sum(logs) / len(logs)
    return sum(abs(value - middle) for value in logs) / len(logs)
