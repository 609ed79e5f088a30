"""Composes the section `contention`: how far, and for how long, the source fell below its own best in this job. Pure.

It looks at the bandwidth of each interval in which the copiers kept transfers in flight and nothing of hpcstage held
them back; in mode direct, at the bandwidth that the program saw while it was inside its own reads. Nothing is known
about the cause: other jobs, a recovering server, or a node's own link look the same from one node.

With several nodes, periods in which all nodes read slowly (the shared file system) are told from those of one (its
link, its load). The source is judged by what the nodes that were reading got on average, times their usual number, as
one node's share depends on how many others are reading; a fall counts if more than half of them took part in it. A
single node is judged by its speed divided by the median of the others' at the same moment, which does not contain what
slows all of them.

The nodes' samples are brought to one time axis by the clock that each node had when its daemon started. Errors that the
run's own span proves are corrected (`roster.clock_error_s`); smaller ones blur the ends of periods by as much.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import isnan, nan
from statistics import mean, median
from typing import TypeAlias

from hpcstage.protocol.shim import bucket_upper_ns
from hpcstage.record.figures import detect
from hpcstage.record.figures.counts import joined
from hpcstage.record.figures.detect import Point
from hpcstage.record.figures.digest import Digest
from hpcstage.record.figures.track import CELL_S, LEAST_INTERVALS, Track, aligned
from hpcstage.record.schema import Contention, Percentiles, Period

MOST_LISTED = 64
"""At most this many periods of single nodes are listed, by the product of length and loss."""
MOST_EXAMINED = 32
"""The own periods of at most this many nodes are looked for: of those that lag behind the others most."""
FEW_SHARE = 0.25
"""With fewer than this share of the usual number of active nodes, an interval says nothing about the source."""
FEWER_SHARE = 0.8
"""With fewer than this share of the usual number, an interval says nothing about how fast the source can be."""
USUAL_QUANTILE = 0.9
"""The usual number of active nodes is this quantile of their number over time."""
LEAST_FILES = 20
"""A mean size needs at least this many files."""
SIZES_DIFFER_FACTOR = 1.5
"""Speeds are evened out for file sizes if the large ones exceed the small ones by this factor."""
Row: TypeAlias = "array[float]"
"""A value for each cell; nan where nothing is known."""


def contention_of(nodes: Sequence[Digest]) -> tuple[Contention, list[float | None]]:
    """Returns the section, whose times are on the run's axis, and each node's pace: its median speed as a share of the
    others' at the same moment."""
    section = Contention(
        best_bytes_per_s=None,
        typical_bytes_per_s=None,
        periods=(),
        verdict="unknown",
        latency_ms=_latency([node for node in nodes if node.speaks] or nodes),
    )
    seen = {at: node.track for at, node in enumerate(nodes) if node.track is not None and any(node.track.seen_s)}
    if not seen:
        return section, [None] * len(nodes)
    kinds = [track.on for track in seen.values()]
    most = max(sorted(set(kinds)), key=kinds.count)
    tracks = {at: track for at, track in seen.items() if track.on == most}
    section, paces = _judged(section, [nodes[at].row.host for at in tracks], aligned(list(tracks.values())))
    found = dict(zip(tracks, paces, strict=True))
    return section, [found.get(at) for at in range(len(nodes))]


def _judged(
    section: Contention, names: Sequence[str], tracks: Sequence[Track]
) -> tuple[Contention, list[float | None]]:
    """Judges the source by all tracks together, and each node against the others."""
    seen_s, evened = _summed(track.seen_s for track in tracks), _evened(tracks)
    rows = [_rates(work, track.seen_s) for track, work in zip(tracks, evened, strict=True)]
    active = [sum(not isnan(rate) for rate in rates) for rates in zip(*rows, strict=True)]
    known = sorted(number for number in active if number)
    usual = known[int(USUAL_QUANTILE * (len(known) - 1))]
    full = [number >= FEWER_SHARE * usual for number in active]
    rates = _rates(_summed(evened), seen_s)
    points = [
        _point(tracks[0], at, rates[at] * usual, is_full=full[at])
        for at, number in enumerate(active)
        if number and number >= FEW_SHARE * usual
    ]
    found = detect.find(points) if len(points) >= LEAST_INTERVALS else None
    ratios = _ratios(rows)
    own = tuple(sorted(_own(names, tracks[0], ratios), key=lambda one: -one.cost_s)[:MOST_LISTED])
    section = replace(section, periods=own)
    if found is not None:
        shared = tuple(_shared(rows, tracks[0], found.periods))
        unclear = found.unclear or len(shared) < len(found.periods)
        measured = _rates(_summed(track.size for track in tracks), seen_s)
        section = replace(
            section,
            best_bytes_per_s=found.best,
            typical_bytes_per_s=usual * median(rate for rate, is_full in zip(measured, full, strict=True) if is_full),
            periods=shared + own,
            verdict="periods" if shared else "unknown" if unclear else "none",
        )
    return section, [_middle(row) for row in ratios]


def _summed(columns: Iterable[Sequence[float]]) -> list[float]:
    return [sum(values) for values in zip(*columns, strict=True)]


def _rates(sums: Sequence[float], seen_s: Sequence[float]) -> Row:
    return array("f", [value / time_s if time_s > 0 else nan for value, time_s in zip(sums, seen_s, strict=True)])


def _point(track: Track, at: int, speed: float, *, is_full: bool = True) -> Point:
    length_s = CELL_S * 2**track.level
    return Point((track.first + at) * length_s, length_s, speed, is_full)


def _evened(tracks: Sequence[Track]) -> list[list[float]]:
    """Returns each track's bytes as if all files had one size: a file costs its latency, which counts as more bytes.

    A transfer of s bytes takes a + s / C, as if it had s + a C bytes. The product a C is chosen so that the best speeds
    with small files equal those with large ones.
    """
    size, files = _summed(track.size for track in tracks), _summed(track.files for track in tracks)
    extra = _extra_bytes(size, files, _summed(track.seen_s for track in tracks))
    scale = 1 + extra * sum(files) / sum(size) if extra else 1.0
    return [[(s + extra * f) / scale for s, f in zip(track.size, track.files, strict=True)] for track in tracks]


def _extra_bytes(size: Sequence[float], files: Sequence[float], seen_s: Sequence[float]) -> float:
    """Returns what a file costs besides its own bytes; 0 where size makes no difference, or files are few."""
    cells = [at for at, time_s in enumerate(seen_s) if time_s > 0]
    found = []
    for at, cell in enumerate(cells):
        near = cells[max(0, at - 2) : at + 3]
        number = sum(files[other] for other in near)
        if number < LEAST_FILES:
            return 0.0
        found.append((max(1.0, sum(size[other] for other in near) / number), size[cell] / seen_s[cell]))
    sizes = sorted(near for near, _ in found)
    border = math.sqrt(sizes[len(sizes) // 10] * sizes[-1 - len(sizes) // 10])
    small, slow = _upper([pair for pair in found if pair[0] < border])
    large, fast = _upper([pair for pair in found if pair[0] >= border])
    if large < SIZES_DIFFER_FACTOR * small or slow <= 0 or fast <= slow or slow / small <= fast / large:
        return 0.0
    return (fast - slow) / (slow / small - fast / large)


def _upper(found: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Returns the median size and speed of the fastest third."""
    best = sorted(found, key=lambda pair: pair[1], reverse=True)[: max(2, len(found) // 3)]
    return (median(size for size, _ in best), median(speed for _, speed in best)) if best else (1.0, 0.0)


# ---- the source, and single nodes


def _shared(rows: Sequence[Row], track: Track, periods: Sequence[Period]) -> Iterator[Period]:
    """Yields the periods in which more than half of the observed nodes were slower."""

    def inside(period: Period, at: int) -> bool:
        point = _point(track, at, 0.0)
        return period.start_s <= point.start_s + point.length_s / 2 <= period.end_s

    within = [[at for at in range(len(rows[0])) if inside(period, at)] for period in periods]
    outside = sorted(set(range(len(rows[0]))).difference(*within))
    normal = [_mean(row, outside) for row in rows]
    for period, cells in zip(periods, within, strict=True):
        pairs = [(_mean(row, cells), level) for row, level in zip(rows, normal, strict=True)]
        shares = [speed / level for speed, level in pairs if speed is not None and level]
        fallen = sum(share < detect.BORDER_SHARE for share in shares)
        if 2 * fallen > len(shares):
            yield replace(period, nodes=fallen, nodes_observed=len(shares))


def _mean(row: Row, cells: Sequence[int]) -> float | None:
    known = [row[at] for at in cells if not isnan(row[at])]
    return mean(known) if known else None


def _ratios(rows: Sequence[Row]) -> list[Row]:
    """Divides each node's speed by the median of the others', cell by cell; nan where there is nothing to compare."""
    found = [array("f", [nan]) * len(row) for row in rows]
    for at, speeds in enumerate(zip(*rows, strict=True)):
        ordered = sorted(speed for speed in speeds if not isnan(speed))
        for row, speed in zip(found, speeds, strict=True):
            others = 0.0 if isnan(speed) else median_without(ordered, speed)
            row[at] = min(speed / others, 1e6) if others > 0 else nan
    return found


def median_without(ordered: Sequence[float], value: float) -> float:
    """Returns the median of sorted values without this one; 0 if there is no other."""
    rest, own = len(ordered) - 1, bisect_left(ordered, value)
    if rest < 1:
        return 0.0
    low, high = (rest - 1) // 2, rest // 2
    return (ordered[low + (low >= own)] + ordered[high + (high >= own)]) / 2


def _middle(row: Row) -> float | None:
    known = [share for share in row if not isnan(share)]
    return median(known) if len(known) >= LEAST_INTERVALS else None


def _own(names: Sequence[str], track: Track, ratios: Sequence[Row]) -> Iterator[Period]:
    """Yields the periods of the nodes that lag behind the others most; being faster than them is no level to fall
    from."""
    lags = [sum(max(0.0, detect.FALLEN_SHARE - share) for share in row if not isnan(share)) for row in ratios]
    for at in sorted((at for at, lag in enumerate(lags) if lag), key=lambda at: -lags[at])[:MOST_EXAMINED]:
        points = [_point(track, cell, share) for cell, share in enumerate(ratios[at]) if not isnan(share)]
        found = detect.find(points, 1.0) if len(points) >= LEAST_INTERVALS else None
        for period in found.periods if found else ():
            yield replace(period, host=names[at])


# ---- latencies


def _latency(nodes: Sequence[Digest]) -> dict[str, Percentiles]:
    """Returns percentiles of opens and reads at the source, the copiers' and the program's together."""
    opens, reads = joined(node.hist_open for node in nodes), joined(node.hist_read for node in nodes)
    return {"open": percentiles_ms(opens), "read": percentiles_ms(reads)}


def percentile_ns(histogram: Mapping[int, int], percent: float) -> float | None:
    """Returns a percentile, interpolated inside its bucket; None for an empty histogram. The edges of the buckets are
    in `protocol.shim`."""
    wanted, seen = sum(histogram.values()) * percent / 100, 0
    for bucket in sorted(histogram):
        count = histogram[bucket]
        if count and seen + count >= wanted:
            lower = bucket_upper_ns(bucket - 1) if bucket else 0
            return lower + (bucket_upper_ns(bucket) - lower) * max(0.0, wanted - seen) / count
        seen += count
    return None


def percentiles_ms(histogram: Mapping[int, int]) -> Percentiles:
    """Returns percentiles in milliseconds."""
    found_ns = (percentile_ns(histogram, percent) for percent in (5, 50, 95, 99))
    p05, p50, p95, p99 = (None if value_ns is None else value_ns / 1e6 for value_ns in found_ns)
    return Percentiles(p05=p05, p50=p50, p95=p95, p99=p99)
