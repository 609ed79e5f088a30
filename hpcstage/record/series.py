"""The run over time in at most 240 points: columns of equal length, times on the run's axis. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hpcstage.record.part import NodePart, RunPart, Sample
from hpcstage.record.window import timeline

POINTS = 240
LATENCY_POINTS = 20
NS_PER_MS = 1e6

Placed = tuple[float, Sample]


def series_of(run: RunPart, nodes: Sequence[NodePart]) -> dict[str, Any]:
    """The series section."""
    placed = timeline(run, nodes)
    groups = _grouped(placed, POINTS)
    return {
        "interval_s": _width(placed, POINTS),
        "start_s": [start_s for start_s, _ in groups],
        "source_bytes_per_s": [_rate(g, ("copied_bytes", "shim_bytes")) for g in groups],
        "copied_bytes_per_s": [_rate(g, ("copied_bytes",)) for g in groups],
        "direct_bytes_per_s": [_rate(g, ("shim_bytes",)) for g in groups],
        "hit_opens_per_s": [_rate(g, ("hit_opens",)) for g in groups],
        "wants_per_s": [_rate(g, ("wants",)) for g in groups],
        "queued_files": [_last(g, "queued_files") for g in groups],
        "store_bytes": [_last(g, "store_bytes") for g in groups],
        "busy": [_mean_busy(g) for g in groups],
        "latency": _latency(placed),
    }


def _width(placed: Sequence[Placed], points: int) -> float | None:
    if not placed:
        return None
    return max((placed[-1][0] + placed[-1][1].length_s - placed[0][0]) / points, _nodes_width(placed))


def _nodes_width(placed: Sequence[Placed]) -> float:
    return max(sample.length_s for _, sample in placed)


def _grouped(placed: Sequence[Placed], points: int) -> list[tuple[float, list[Placed]]]:
    """Samples by intervals of equal width; empty intervals are left out."""
    width_s = _width(placed, points)
    if not width_s:
        return []
    first_s = placed[0][0]
    groups: dict[int, list[Placed]] = {}
    for start_s, sample in placed:
        middle_s = start_s + sample.length_s / 2 - first_s
        groups.setdefault(min(int(middle_s / width_s), points - 1), []).append((start_s, sample))
    return [(groups[index][0][0], groups[index]) for index in sorted(groups)]


Group = tuple[float, list[Placed]]


def _span_s(group: Group) -> float:
    """Time that the group's samples cover; several nodes' overlap."""
    starts = [start_s for start_s, _ in group[1]]
    ends = [start_s + sample.length_s for start_s, sample in group[1]]
    return max(max(ends) - min(starts), 1e-9)


def _rate(group: Group, names: Sequence[str]) -> float:
    return _sum(group, names) / _span_s(group)


def _last(group: Group, name: str) -> int:
    return int(getattr(group[1][-1][1], name))


def _mean_busy(group: Group) -> float:
    return sum(sample.busy * sample.length_s for _, sample in group[1]) / _span_s(group)


def _latency(placed: Sequence[Placed]) -> dict[str, list[float | None]]:
    """Means over about a twentieth of the run each: ms per open at the source, ms of reading per file copied."""
    groups = _grouped(placed, LATENCY_POINTS)
    return {
        "start_s": [start_s for start_s, _ in groups],
        "open_ms": [_mean_ms(g, ("copy_open_ns", "shim_open_ns"), ("copied_files", "shim_opens")) for g in groups],
        "copy_read_ms": [_mean_ms(g, ("copy_read_ns",), ("copied_files",)) for g in groups],
        "direct_read_ms": [_mean_ms(g, ("shim_read_ns",), ("shim_reads",)) for g in groups],
    }


def _mean_ms(group: Group, times: Sequence[str], counts: Sequence[str]) -> float | None:
    number = _sum(group, counts)
    return _sum(group, times) / number / NS_PER_MS if number else None


def _sum(group: Group, names: Sequence[str]) -> float:
    return float(sum(getattr(sample, name) for _, sample in group[1] for name in names))
