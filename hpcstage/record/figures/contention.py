"""Composes the section `contention`: how far, and for how long, the source fell below its own best in this job. Pure.

The module looks at the bandwidth of each interval in which the copiers kept transfers in flight and nothing of hpcstage
held them back; in mode direct, at the bandwidth that the program saw while it was inside its own reads. It reports a
period whose mean is less than `detect.FALLEN_SHARE` x the best level, for `detect.LEAST_S`, and far outside the noise
that the series shows from one interval to the next. With one node it knows nothing about the cause: other jobs, a
recovering server, or the node's own link look the same from there.

With several nodes, periods in which all nodes read slowly (the shared file system) are told from those of one (its
link, its load). The source is judged by what all nodes got from it together, as one node's share depends on how many
others are reading: when some have finished, the rest get more. The sum of fewer active nodes than usual is scaled to
the usual number; a fall counts if more than half of the observed nodes took part in it. A single node is judged by its
speed divided by the median of the others' at the same moment, which does not contain what slows all of them.

The nodes' samples are brought to one time axis by the clock that each node had when its daemon started. Errors that the
run's own span proves are corrected (`roster.clock_error_s`); smaller errors of clocks are not seen, and blur the ends
of periods by as much.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import isnan, nan
from statistics import median
from typing import Literal

from hpcstage.protocol.shim import bucket_upper_ns
from hpcstage.record.figures import detect
from hpcstage.record.figures.cells import MOST_CELLS, Track, coarser
from hpcstage.record.figures.counts import merge, ratio
from hpcstage.record.figures.digest import Digest
from hpcstage.record.figures.speeds import LEAST_POINTS, Point, even_sizes, of_samples
from hpcstage.record.parts.part import NAMED_NODES, NodePart
from hpcstage.record.schema import Contention, Latency, MeasuredOn, OwnPeriod, Percentiles, SharedPeriod

MOST_LISTED = 64
"""At most this many periods of single nodes are listed, by the product of length and loss."""
NOTHING = "too few intervals say something about the source"
METHOD = {
    "copies": "bandwidth of the copiers in intervals with transfers in flight and nothing of ours holding them back",
    "reads": "bytes per second inside the program's own reads, times the readers that were reading at once",
}
ALIGNED = "; all nodes together, by the clock of each; a single node against the others at the same moment"


def contention_of(nodes: Sequence[Digest], alone: NodePart | None) -> tuple[Contention, list[float | None]]:
    """Returns the section, whose times are on the run's axis, and each node's pace: its median speed as a share of the
    others' at the same moment. `alone` is the whole part of the only node that reported."""
    latency = latency_of([node for node in nodes if node.speaks] or nodes)
    unknown: list[float | None] = [None] * len(nodes)
    if alone is not None:
        node = next(node for node in nodes if node.speaks)
        return _of_node(alone, node, latency), unknown
    on = _most(nodes)
    if on is None:
        return _nothing(latency), unknown
    tracked = [(at, node.track) for at, node in enumerate(nodes) if node.track is not None and node.track.on == on]
    names = [nodes[at].name for at, _ in tracked]
    section, paces = _of_nodes(names, [track for _, track in tracked], on, latency)
    found = dict(zip((at for at, _ in tracked), paces, strict=True))
    return section, [found.get(at) for at in range(len(nodes))]


def latency_of(nodes: Sequence[Digest]) -> Latency:
    """Returns percentiles of opens and reads at the source, the copiers' and the program's together."""
    opens = percentiles_ms(merge(node.hist_open for node in nodes))
    reads = percentiles_ms(merge(node.hist_read for node in nodes))
    return Latency(p50=opens.p50, p95=opens.p95, p99=opens.p99, open=opens, read=reads)


def percentile_ns(histogram: Mapping[int, int], percent: float) -> float | None:
    """Returns a percentile, interpolated inside its bucket; None for an empty histogram. The edges of the buckets are
    in `protocol.shim`."""
    total = sum(histogram.values())
    if total <= 0:
        return None
    wanted, seen = total * percent / 100, 0
    for bucket in sorted(histogram):
        count = histogram[bucket]
        if count and seen + count >= wanted:
            lower = bucket_upper_ns(bucket - 1) if bucket else 0
            return lower + (bucket_upper_ns(bucket) - lower) * max(0.0, wanted - seen) / count
        seen += count
    return float(bucket_upper_ns(max(histogram)))


def percentiles_ms(histogram: Mapping[int, int]) -> Percentiles:
    """Returns percentiles in milliseconds."""
    found_ns = (percentile_ns(histogram, percent) for percent in (50, 95, 99))
    p50, p95, p99 = (None if value_ns is None else value_ns / 1e6 for value_ns in found_ns)
    return Percentiles(p50=p50, p95=p95, p99=p99)


def _nothing(latency: Latency) -> Contention:
    return Contention(
        best_bytes_per_s=None,
        typical_bytes_per_s=None,
        periods=(),
        verdict="unknown",
        measured_on=None,
        method=NOTHING,
        latency_ms=latency,
    )


def _of_node(part: NodePart, node: Digest, latency: Latency) -> Contention:
    """Returns the section from one node, where `own_periods` stays unknown: the node cannot tell whether others were
    slow at the same time."""
    on, points = of_samples(part.samples)
    points = even_sizes(points)
    found = detect.find(points) if len(points) >= LEAST_POINTS else None
    if found is None:
        return _nothing(latency)
    shift_s = node.shift_s
    return replace(
        _nothing(latency),
        best_bytes_per_s=found.best,
        typical_bytes_per_s=found.typical,
        periods=tuple(
            SharedPeriod(start_s=p.start_s + shift_s, end_s=p.end_s + shift_s, loss=p.loss, hosts=(node.name,))
            for p in found.periods
        ),
        verdict=_verdict(bool(found.periods), unclear=found.unclear),
        measured_on=on,
        method=METHOD[on],
    )


def _verdict(found: bool, *, unclear: bool) -> Literal["periods", "none", "unknown"]:
    """Says that periods were found; that there were none, as the mean over a second was never as low as in one; or that
    neither can be said."""
    return "periods" if found else "unknown" if unclear else "none"


def _most(nodes: Sequence[Digest]) -> MeasuredOn | None:
    """Returns what most nodes were measured on."""
    kinds = [node.track.on for node in nodes if node.track is not None]
    return max(sorted(set(kinds)), key=kinds.count, default=None)


# ---- several nodes ----

FEW_SHARE = 0.25
"""With fewer than this share of the usual number of active nodes, an interval says nothing about the source."""
FEWER_SHARE = 0.8
"""With fewer than this share of the usual number, an interval says nothing about how fast the source can be."""
USUAL_QUANTILE = 0.9
"""The usual number of active nodes is this quantile of their number over time."""
MOST_EXAMINED = 32
"""The own periods of at most this many nodes are looked for: of those that lag behind the others most."""
LAGS_SHARE = 0.75


def _of_nodes(
    names: Sequence[str], tracks: Sequence[Track], on: MeasuredOn, latency: Latency
) -> tuple[Contention, list[float | None]]:
    """Judges the source and each node by all tracks, which have the same `on`."""
    tracks, cells = _aligned(tracks)
    points = _together(tracks, cells)
    found = detect.find(even_sizes(points)) if len(points) >= LEAST_POINTS else None
    shared = _shared(names, tracks, cells, found.periods) if found else []
    ratios = _ratios(tracks, cells)
    own = sorted(_own(names, tracks, cells, ratios), key=lambda p: (p.start_s - p.end_s) * p.loss)
    unclear = found is None or found.unclear or len(shared) < len(found.periods)
    section = replace(
        _nothing(latency),
        best_bytes_per_s=found.best if found else None,
        typical_bytes_per_s=found.typical if found else None,
        periods=tuple(shared),
        own_periods=tuple(own[:MOST_LISTED]) if len(names) > 1 else None,
        verdict=_verdict(bool(shared), unclear=unclear),
        measured_on=on,
        method=METHOD[on] + ALIGNED,
    )
    return section, [_middle(row) for row in ratios]


def _aligned(tracks: Sequence[Track]) -> tuple[list[Track], range]:
    """Returns all tracks in cells of one length, and the range of these cells."""
    level = max(track.level for track in tracks)
    while True:
        first = min(track.first >> (level - track.level) for track in tracks)
        last = max((track.first + len(track.seen_s) - 1) >> (level - track.level) for track in tracks)
        if last - first < MOST_CELLS:
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
    usual = active[int(USUAL_QUANTILE * (len(active) - 1))] if active else 0.0
    points = []
    for cell, seen_s, size, work, files in zip(cells, *sums, strict=True):
        if seen_s > 0 and seen_s >= FEW_SHARE * usual:
            raised = max(1.0, usual / seen_s) / length_s
            points.append(
                Point(
                    cell * length_s, length_s, size / length_s, work * raised, files, weak=seen_s < FEWER_SHARE * usual
                )
            )
    return points


def _shared(
    names: Sequence[str], tracks: Sequence[Track], cells: range, periods: Sequence[detect.Period]
) -> list[SharedPeriod]:
    """Returns the periods in which more than half of the observed nodes were slower."""
    length_s = 2 ** tracks[0].level
    inside = [[c for c in cells if p.start_s <= (c + 0.5) * length_s <= p.end_s] for p in periods]
    outside = sorted(set(cells) - {cell for part in inside for cell in part})
    normal = [track.mean(outside) for track in tracks]
    found = []
    for period, part in zip(periods, inside, strict=True):
        levels = [ratio(track.mean(part), level) for track, level in zip(tracks, normal, strict=True)]
        known = [at for at, level in enumerate(levels) if level is not None]
        fallen = [at for at in known if (levels[at] or 0.0) < detect.BORDER_SHARE]
        if 2 * len(fallen) > len(known):
            hosts = tuple(names[at] for at in fallen[:NAMED_NODES])
            found.append(SharedPeriod(**vars(period), hosts=hosts, nodes=len(fallen), nodes_observed=len(known)))
    return found


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
    known = [share for share in row if not isnan(share)]
    return median(known) if len(known) >= LEAST_POINTS else None


def _own(
    names: Sequence[str], tracks: Sequence[Track], cells: range, ratios: Sequence[array[float]]
) -> Iterator[OwnPeriod]:
    length_s = 2 ** tracks[0].level
    lags = sorted(((_lag(row), at) for at, row in enumerate(ratios)), reverse=True)
    for lag, at in lags[:MOST_EXAMINED]:
        if lag * length_s < detect.LEAST_S * (1 - LAGS_SHARE) / 2:
            break
        found = detect.find(_compared(tracks[at], cells, ratios[at]))
        for p in found.periods if found else ():
            yield OwnPeriod(**vars(p), host=names[at])


def _lag(row: array[float]) -> float:
    """Returns by how much the node's shares lie below `LAGS_SHARE` of its own upper level, or the others', in sum."""
    known = sorted(share for share in row if not isnan(share))
    if len(known) < LEAST_POINTS:
        return 0.0
    level = LAGS_SHARE * min(1.0, known[int(0.8 * (len(known) - 1))])
    return sum(level - share for share in known if share < level)


def _compared(track: Track, cells: range, row: array[float]) -> list[Point]:
    """Returns points whose speed is the ratio, at most 1: being faster than the others is no level to fall from."""
    length_s = float(2**track.level)
    points = []
    for cell, share in zip(cells, row, strict=True):
        if not isnan(share):
            at = cell - track.first
            rate = track.size[at] / track.seen_s[at]
            points.append(Point(cell * length_s, length_s, rate, share, track.files[at], weak=False))
    return [point._replace(speed=min(1.0, point.speed)) for point in even_sizes(points)]
