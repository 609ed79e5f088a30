"""Composes the section `contention`: how far, and for how long, the source fell below its own best in this job. Pure.

The module looks at the bandwidth of each interval in which the copiers kept transfers in flight and nothing of hpcstage
held them back; in mode direct, at the bandwidth that the program saw while it was inside its own reads. It reports a
period whose mean is less than `FALLEN` x the best level, for `LEAST_S`, and far outside the noise that the series shows
from one interval to the next. With one node it knows nothing about the cause: other jobs, a recovering server, or the
node's own link look the same from there. With several nodes, `joint` tells whether the source or one node was slow.

The nodes' samples are brought to one time axis by the clock that each node had when its daemon started. Errors that the
run's own span proves are corrected (`roster.clock_error_s`); smaller errors of clocks are not seen, and blur the ends
of periods by as much.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hpcstage.record.figures import detect
from hpcstage.record.figures.digest import Digest
from hpcstage.record.figures.histogram import merge, percentiles_ms
from hpcstage.record.figures.joint import Joint, Shared, joint_of
from hpcstage.record.figures.speeds import LEAST_POINTS, even_sizes, of_samples
from hpcstage.record.parts.part import NodePart

NAMED = 16
"""At most this many nodes of a period are named."""
LISTED = 64
"""At most this many periods of single nodes are listed, by the product of length and loss."""
PERIODS, NONE, UNKNOWN = "periods", "none", "unknown"
"""The verdicts: periods were found; there were none, as the mean over a second was never as low as in one; or neither
can be said."""
NOTHING = "too few intervals say something about the source"
METHOD = {
    "copies": "bandwidth of the copiers in intervals with transfers in flight and nothing of ours holding them back",
    "reads": "bytes per second inside the program's own reads, times the readers that were reading at once",
}
ALIGNED = "; all nodes together, by the clock of each; a single node against the others at the same moment"

Section = dict[str, Any]


def contention_of(nodes: Sequence[Digest], alone: NodePart | None) -> Section:
    """Returns the section; times are on the run's axis. `alone` is the whole part of the only node that reported."""
    latency = {"latency_ms": latency_of(nodes)}
    if alone is not None:
        return _of_node(alone, nodes[0]) | latency
    tracked = [node for node in nodes if node.track is not None]
    on = _most(tracked)
    tracked = [node for node in tracked if node.track is not None and node.track.on == on]
    if on is None:
        return {**_nothing(), "observed_s": 0.0 if nodes else None} | latency
    found = joint_of([node.track for node in tracked if node.track is not None])
    for node, pace in zip(tracked, found.pace, strict=True):
        node.relative_pace = pace
    return _of_nodes(tracked, on, found) | latency


def latency_of(nodes: Sequence[Digest]) -> Section:
    """Returns percentiles of opens and reads at the source, the copiers' and the program's together.

    The keys beside `open` and `read` are those of the opens.
    """
    opens = percentiles_ms(merge(node.hist_open for node in nodes))
    reads = percentiles_ms(merge(node.hist_read for node in nodes))
    return {**opens, "open": opens, "read": reads}


def _nothing() -> Section:
    return {
        "best_bytes_per_s": None,
        "typical_bytes_per_s": None,
        "periods": [],
        "own_periods": None,
        "own_periods_hidden": 0,
        "verdict": UNKNOWN,
        "observed_s": 0.0,
        "measured_on": None,
        "method": NOTHING,
    }


def _of_node(part: NodePart, node: Digest) -> Section:
    """Returns the section from one node, where `own_periods` stays unknown: the node cannot tell whether others were
    slow at the same time."""
    on, points = of_samples(part.samples)
    points = even_sizes(points)
    result = detect.find(points) if len(points) >= LEAST_POINTS else None
    if result is None:
        return _nothing()
    hosts = {"hosts": [node.name], "nodes": 1, "nodes_observed": 1}
    return _nothing() | {
        "best_bytes_per_s": result.best,
        "typical_bytes_per_s": result.typical,
        "periods": [_period(p, node.shift_s) | hosts for p in result.periods],
        "verdict": _verdict(bool(result.periods), unclear=result.unclear),
        "observed_s": sum(point.length_s for point in points),
        "measured_on": on,
        "method": METHOD[on],
    }


def _of_nodes(nodes: Sequence[Digest], on: str, found: Joint) -> Section:
    own = [_period(period, 0.0) | {"host": nodes[at].name} for at, periods in found.own.items() for period in periods]
    own.sort(key=lambda p: (p["start_s"] - p["end_s"]) * p["loss"])
    return _nothing() | {
        "best_bytes_per_s": found.best,
        "typical_bytes_per_s": found.typical,
        "periods": [_shared(period, nodes) for period in found.shared],
        "own_periods": own[:LISTED] if len(nodes) > 1 else None,
        "verdict": _verdict(bool(found.shared), unclear=found.unclear),
        "own_periods_hidden": max(0, len(own) - LISTED),
        "observed_s": found.observed_s,
        "measured_on": on,
        "method": METHOD[on] + ALIGNED,
    }


def _verdict(found: bool, *, unclear: bool) -> str:
    return PERIODS if found else UNKNOWN if unclear else NONE


def _shared(shared: Shared, nodes: Sequence[Digest]) -> Section:
    hosts = [nodes[at].name for at in shared.fallen[:NAMED]]
    counts = {"nodes": len(shared.fallen), "nodes_observed": shared.observed}
    return {**_period(shared.period, 0.0), "hosts": hosts, **counts}


def _period(period: detect.Period, shift_s: float) -> Section:
    return {"start_s": period.start_s + shift_s, "end_s": period.end_s + shift_s, "loss": period.loss}


def _most(nodes: Sequence[Digest]) -> str | None:
    """Returns what most nodes were measured on, `copies` or `reads`."""
    kinds = [node.track.on for node in nodes if node.track is not None]
    return max(sorted(set(kinds)), key=kinds.count, default=None)
