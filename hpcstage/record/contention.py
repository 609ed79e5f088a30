"""Contention: how far, and for how long, the source fell below its own best in this job. Pure.

What is looked at: the bandwidth of each interval in which the copiers kept transfers in flight and nothing of ours held
them back; in mode direct, the bandwidth that the program saw while it was inside its own reads. What is asked of a
period before it is reported: a mean of less than `FALLEN` x the best level, for `LEAST_S`, and far outside the noise
that the series shows from one interval to the next. Nothing is known about the cause: other jobs, other nodes of this
one, or a recovering server look the same from here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hpcstage.record import detect
from hpcstage.record.histogram import merge, percentiles_ms
from hpcstage.record.part import NodePart, RunPart, Sample
from hpcstage.record.speeds import Point, even_sizes, of_copies, of_reads
from hpcstage.record.tally import processes_of
from hpcstage.record.window import shift_of

LEAST_POINTS = 5
NOTHING = "too few intervals say something about the source"
METHOD = {
    "copies": "bandwidth of the copiers in intervals with transfers in flight and nothing of ours holding them back",
    "reads": "bytes per second inside the program's own reads, times the readers that were reading at once",
}


def contention_of(run: RunPart, nodes: Sequence[NodePart]) -> dict[str, Any]:
    """The contention section; times on the run's axis."""
    found = [_of_node(node, shift_of(run, node)) for node in nodes]
    known = [f for f in found if f is not None]
    return {
        "best_bytes_per_s": _sum([f["best"] for f in known]),
        "typical_bytes_per_s": _sum([f["typical"] for f in known]),
        "periods": _joined([period for f in known for period in f["periods"]]),
        "observed_s": max((f["observed_s"] for f in known), default=0.0) if nodes else None,
        "measured_on": known[0]["on"] if known else None,
        "method": METHOD[known[0]["on"]] if known else NOTHING,
        "latency_ms": latency_of(nodes),
    }


def latency_of(nodes: Sequence[NodePart]) -> dict[str, Any]:
    """Percentiles of opens and reads at the source, copiers' and program's together; the plain keys are the opens'."""
    processes = processes_of(nodes)
    opens = percentiles_ms(merge([n.hist_open for n in nodes] + [p.hist_open for p in processes]))
    reads = percentiles_ms(merge([n.hist_read for n in nodes] + [p.hist_read for p in processes]))
    return {**opens, "open": opens, "read": reads}


def _of_node(node: NodePart, shift_s: float) -> dict[str, Any] | None:
    on, points = _points(node.samples)
    if len(points) < LEAST_POINTS:
        return None
    points = even_sizes(points)
    result = detect.find(points)
    if result is None:
        return None
    periods = [
        {"start_s": p.start_s + shift_s, "end_s": p.end_s + shift_s, "loss": p.loss, "host": node.host}
        for p in result.periods
    ]
    observed_s = sum(point.length_s for point in points)
    return {"on": on, "best": result.best, "typical": result.typical, "periods": periods, "observed_s": observed_s}


def _points(samples: Sequence[Sample]) -> tuple[str, list[Point]]:
    """The copiers' intervals, or the program's where the copiers had little to do."""
    copies = of_copies(samples)
    reads = of_reads(samples)
    if len(copies) >= LEAST_POINTS and 4 * len(copies) >= len(reads):
        return "copies", copies
    return "reads", reads


def _sum(values: Sequence[float]) -> float | None:
    return sum(values) if values else None


def _joined(periods: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """In order; periods of several nodes that overlap become one, their losses averaged over time."""
    result: list[dict[str, Any]] = []
    for period in sorted(periods, key=lambda p: float(p["start_s"])):
        if result and period["start_s"] < result[-1]["end_s"] and period["host"] not in result[-1]["hosts"]:
            result[-1] = _union(result[-1], period)
        else:
            result.append({**{k: v for k, v in period.items() if k != "host"}, "hosts": [period["host"]]})
    return result


def _union(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    lengths = [p["end_s"] - p["start_s"] for p in (one, other)]
    loss = (one["loss"] * lengths[0] + other["loss"] * lengths[1]) / max(sum(lengths), 1e-9)
    return {
        "start_s": min(one["start_s"], other["start_s"]),
        "end_s": max(one["end_s"], other["end_s"]),
        "loss": loss,
        "hosts": [*one["hosts"], other["host"]],
    }
