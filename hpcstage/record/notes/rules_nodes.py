"""Rules about several nodes: slow ones, and datasets that were read more often than once. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hpcstage.record.notes.rule import Note, Severity, number, stages
from hpcstage.record.parts.roster import few
from hpcstage.units import format_duration

TWICE = 1.05
"""The datasets count as read more often than once if they were read more than this many times."""
MUCH = 0.05
"""A slow node deserves a warning if its program waited longer than the others' by this share of the wall time."""


def slow_nodes(record: dict[str, Any]) -> Iterator[Note]:
    """Notes the nodes that are slower than the others."""
    slow = sorted((n for n in record["nodes"] if n.get("slow")), key=lambda n: -(n["behind_s"] or 0.0))
    if not slow or not record["group"]:
        return
    worst, wall_s = slow[0], record["time_split"]["wall_s"] or 0.0
    costs = (worst["behind_s"] or 0.0) > MUCH * wall_s
    who = f"{worst['host']} is slow"
    if len(slow) > 1:
        names = few([node["host"] for node in slow])
        who = f"{len(slow)} of {record['group']['nodes']} nodes are slow ({names}); {worst['host']}"
    yield Note(
        "slow-nodes",
        Severity.WARNING if costs else Severity.INFO,
        f"{who}: {'; '.join(worst['slow'])}",
        "its link, its disk or its load, not the shared file system: leave it out of the next job, or tell the site",
    )


def read_more_than_once(record: dict[str, Any]) -> Iterator[Note]:
    """Notes that datasets were read from the source more than once: each byte should leave it once."""
    group = record["group"]
    if not group or not stages(record) or (group["source_times"] or 0.0) <= TWICE:
        return
    text = (
        f"the datasets were read {group['source_times']:.3g} times from the source by {number(group['nodes'], 'node')}"
    )
    if group["placement"] == "private":
        why = f" ({group['placement_why']})" if group["placement_why"] else ""
        remedy = "--placement auto reads each file once and passes it on; it needs mpi4py (pip install mpi4py mpich)"
        yield Note("read-by-each-node", Severity.INFO, f"{text}: each for itself{why}", remedy)
        return
    lost = group["alone_count"] + group["died_count"] + group["missing_count"]
    if lost:
        remedy = "nodes outside of the group read for themselves: see why above"
    else:
        remedy = "files that were read before they were staged, or found no room: see the opens that were not swapped"
    yield Note("read-again", Severity.INFO, text, remedy)


def idle_nodes(record: dict[str, Any]) -> Iterator[Note]:
    """Notes nodes on which the program opened no file of the datasets, while it did on others."""
    well = [node for node in record["nodes"] if node["opens"] is not None]
    idle = [node["host"] for node in well if not node["opens"]]
    if not record["group"] or not idle or len(idle) == len(well):
        return
    yield Note(
        "idle-nodes",
        Severity.WARNING,
        f"on {len(idle)} of {number(record['group']['nodes'], 'node')} the program opened no file of the datasets "
        f"({few(idle)})",
        "check that processes start there, that PYTHONPATH reaches them, and that they get a part of the data",
    )


def restarted(record: dict[str, Any]) -> Iterator[Note]:
    """Notes that the group was started anew."""
    group = record["group"]
    if group and group["generations"] > 1:
        yield Note(
            "group-restarted",
            Severity.INFO,
            f"the group of nodes was started {group['generations']} times"
            + (f": {group['why']}" if group["why"] else ""),
            "training went on; nodes read from the source meanwhile",
        )


def clocks(record: dict[str, Any]) -> Iterator[Note]:
    """Notes nodes whose clocks cannot be right."""
    moved = {n["host"]: n["clock_moved_s"] for n in record["nodes"] if n.get("clock_moved_s")}
    if moved:
        worst_s = max(abs(value) for value in moved.values())
        yield Note(
            "clocks",
            Severity.INFO,
            f"the clocks of {few(moved)} are off by {format_duration(worst_s)} or more: their times were moved",
            "set the nodes' clocks (NTP); until then periods of slow reads are known less exactly",
        )


NODE_RULES = [slow_nodes, idle_nodes, read_more_than_once, restarted, clocks]
