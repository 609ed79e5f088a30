"""Composes the section `nodes`: a row for each node, and what makes a slow node slower than the others. Pure.

A node is compared with the median of the others, so that trouble that all of them share marks none of them as slow.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from statistics import median
from typing import Any

from hpcstage.record.figures.digest import Digest
from hpcstage.record.notes.rule import percent
from hpcstage.record.parts.part import RunPart
from hpcstage.record.parts.roster import State, unheard_why
from hpcstage.units import format_duration

SLOWER = 0.75
"""A node whose pace at the source is below this share of the others' is slow."""
TIMES = 2.0
"""A local disk is slow if a byte takes more than this many times as long as on the other nodes."""
WAITS = 0.05
"""A node is slow if its program waited longer than the others' by this share of the wall time and LEAST_WAIT_S."""
LEAST_WAIT_S = 2.0
LEAST_WRITE_NS = 10**9
"""A disk is judged if all transfers together wrote to it for longer than this: a few files say nothing about it."""
LOCAL_WAITS = 0.02
"""A slow local disk does no harm if the program waited for it for less than this share of the wall time."""
MOST_COMPARED = 64
"""In a job with more nodes than this the median includes the node itself, as one value hardly changes it."""
Row = dict[str, Any]


def rows_of(run: RunPart, nodes: Sequence[Digest], silent: Sequence[str], record: Row) -> list[Row]:
    """Returns the rows in the order of `nodes`, then those of the nodes that reported nothing (`silent`)."""
    slow = _slow(nodes, record) if len(nodes) > 1 else [[] for _ in nodes]
    behind = _behind([node.waited_s for node in nodes])
    rows = [_row(*found) for found in zip(nodes, slow, behind, strict=True)]
    return [*rows, *(_unheard(run, name) for name in silent)]


def _row(node: Digest, slow: list[str], behind_s: float | None) -> Row:
    part, totals = node.part, node.totals
    ended_s = None if part.ended_s is None else part.ended_s + node.shift_s
    known = node.speaks
    return {
        "host": node.name,
        "index": node.index,
        "state": node.state.value,
        "why": node.why,
        "slow": slow,
        "behind_s": behind_s,
        "complete": part.complete,
        "started_s": node.shift_s,
        "clock_moved_s": node.clock_moved_s,
        "ended_s": ended_s,
        "scan_s": part.scan_s,
        "staged_s": None if part.staged_s is None else part.staged_s + node.shift_s,
        "staged_files": sum(d.staged_files for d in part.datasets) if known else None,
        "staged_bytes": sum(d.staged_bytes for d in part.datasets) if known else None,
        "placement": part.placement,
        "placement_why": part.placement_why,
        "group": _group(part.group),
        **{name: totals[name] if known else None for name in SHOWN},
        "opens": node.coverage["opens"] if known else None,
        "swapped": node.coverage["swapped"] if known else None,
        "wait_source_s": node.split.wait_source_s,
        "wait_local_s": node.split.wait_local_s,
        "relative_pace": node.relative_pace,
        "disk": _disk(node),
        "totals": dict(part.totals),
        "budget": dict(part.budget),
        "pressure": dict(part.pressure),
        "errors": [_error(error) for error in part.errors],
        "processes": node.processes,
    }


def _disk(node: Digest) -> Row:
    """Says how fast the local disk was for transfers and for the program; empty where nothing was measured."""
    write_ns, all_ns = node.disk
    read = node.local_ns_per_byte
    if not all_ns and not read:
        return {}
    return {
        "write_s": write_ns / 1e9,
        "write_share": write_ns / all_ns if all_ns else 0.0,
        "read_bytes_per_s": 1e9 / read if read else None,
    }


SHOWN = ("source_bytes", "peer_bytes", "sent_bytes", "local_bytes", "direct_bytes", "copied_files", "peer_files")


def _group(group: Row) -> Row:
    return {**group, "missing_count": group.get("missing_count", len(group.get("missing") or []))} if group else {}


def _unheard(run: RunPart, name: str) -> Row:
    empty: Row = {
        "totals": {},
        "budget": {},
        "pressure": {},
        "errors": [],
        "processes": [],
        "slow": [],
        "group": {},
        "disk": {},
    }
    unknown = (
        "index", "behind_s", "started_s", "ended_s", "scan_s", "staged_s", "staged_files", "staged_bytes",
        *SHOWN, "opens", "swapped", "wait_source_s", "wait_local_s", "relative_pace", "placement",
    )  # fmt: skip
    told = {"host": name, "state": State.MISSING.value, "why": unheard_why(run, name), "complete": False}
    return {**told, **dict.fromkeys(unknown), "clock_moved_s": 0.0, "placement_why": "", **empty}


def _error(error: dict[str, Any]) -> dict[str, Any]:
    path = error.get("path")
    return {**error, "path": os.fsdecode(path) if isinstance(path, bytes) else path}


# ---- slow nodes ----


def _slow(nodes: Sequence[Digest], record: Row) -> list[list[str]]:
    wall_s = record["time_split"]["wall_s"] or 0.0
    alone: dict[str, list[Row]] = {}
    for period in record["contention"]["own_periods"] or []:
        alone.setdefault(period["host"], []).append(period)
    waits = _behind([node.waited_s for node in nodes])
    writes = _times_others([_write_ns_per_byte(node) for node in nodes])
    reads = _times_others([node.local_ns_per_byte for node in nodes])
    return [
        [
            *_waits(behind_s, wall_s),
            *_paces(node, alone.get(node.name, [])),
            *_disks(node, written, read, wall_s),
        ]
        for node, behind_s, written, read in zip(nodes, waits, writes, reads, strict=True)
    ]


def _waits(behind_s: float | None, wall_s: float) -> list[str]:
    if behind_s is None or behind_s < max(LEAST_WAIT_S, WAITS * wall_s):
        return []
    return [f"waited {format_duration(behind_s)} longer for files than the others"]


def _paces(node: Digest, periods: Sequence[Row]) -> list[str]:
    said = []
    if node.relative_pace is not None and node.relative_pace < SLOWER:
        said.append(f"reads the source at {percent(node.relative_pace)} of the others' rate")
    if periods:
        length_s = sum(p["end_s"] - p["start_s"] for p in periods)
        loss = sum((p["end_s"] - p["start_s"]) * p["loss"] for p in periods) / length_s
        said.append(f"fell behind the others for {format_duration(length_s)}, by {percent(loss)}")
    return said


def _disks(node: Digest, written: float | None, read: float | None, wall_s: float) -> list[str]:
    said = []
    write_ns, all_ns = node.disk
    if written is not None and written > TIMES and 2 * write_ns > all_ns and write_ns > LEAST_WRITE_NS:
        said.append(f"its local disk takes {written:.1f} times as long to write as the others'")
    waits = (node.split.wait_local_s or 0.0) > LOCAL_WAITS * wall_s
    if read is not None and read > TIMES and waits:
        said.append(f"its local disk takes {read:.1f} times as long to read as the others'")
    return said


def _write_ns_per_byte(node: Digest) -> float | None:
    size = (node.totals["copied_bytes"] or 0) + (node.totals["peer_bytes"] or 0)
    return node.disk[0] / size if size and node.disk[0] else None


def _behind(values: Sequence[float | None]) -> list[float | None]:
    """Returns by how much each value exceeds the median of the others; None where there is nothing to compare."""
    others = _others(values)
    return [
        None if value is None or other is None else value - other for value, other in zip(values, others, strict=True)
    ]


def _times_others(values: Sequence[float | None]) -> list[float | None]:
    others = _others(values)
    return [value / other if value is not None and other else None for value, other in zip(values, others, strict=True)]


def _others(values: Sequence[float | None]) -> list[float | None]:
    """Returns for each value the median of the other known values."""
    known = [value for value in values if value is not None]
    if len(known) < 2:
        return [None] * len(values)
    if len(known) > MOST_COMPARED:
        return [median(known)] * len(values)
    rest = ([v for other, v in enumerate(values) if other != at and v is not None] for at in range(len(values)))
    return [_median(row) for row in rest]


def _median(values: Sequence[float]) -> float | None:
    return median(values) if values else None
