"""Prints the part of `hpcstage plan` about several nodes: what each fetches, keeps and gets from others.

This module owns the wording and layout. It computes nothing: all numbers are the plan's.
"""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median

from rich.table import Table

from hpcstage.plan.budget import NO_LIMIT
from hpcstage.plan.placement.nodesplan import NodesPlan, Part
from hpcstage.report.canvas import WIDE, Canvas, Fact, facts, grid
from hpcstage.units import format_number, format_size


def text(plan: NodesPlan, rows: int, canvas: Canvas) -> list[str]:
    """Returns the lines about the nodes, of which at most `rows` are listed."""
    said = canvas.lines(facts(_nodes(plan)))
    return said if plan.kind == "private" else [*said, *Canvas(WIDE).lines(_parts(plan, rows))]


def _nodes(plan: NodesPlan) -> Iterator[Fact]:
    yield "nodes", f"{plan.nodes:,}; placement {plan.kind}: {plan.why}"
    yield "", _room(plan)
    if plan.unplaced_files:
        left, size = format_number(plan.unplaced_files, "file"), format_size(plan.unplaced_bytes)
        yield "", f"without room on any node: {left} ({size}), read from the source every time"
    if plan.kind == "private":
        yield "", "each node fetches what its own processes read, and then the rest: up to all files"


def _room(plan: NodesPlan) -> str:
    if plan.room_bytes is None or plan.room_inodes is None:
        return "what a node has room for is unknown here: taken as enough"
    inodes = f" and {plan.room_inodes:,} files" if plan.room_inodes < NO_LIMIT // 2 else ""
    return f"assuming that every node has the room that was found here: {format_size(plan.room_bytes)}{inodes}"


def _parts(plan: NodesPlan, rows: int) -> Table:
    shown = [(f"{part.node:,}", part) for part in plan.parts[:rows]]
    if len(plan.parts) > rows:
        for name, pick in (("least", min), ("median", median), ("most", max)):
            columns = [[getattr(part, field) for part in plan.parts] for field in Part.__dataclass_fields__]
            shown.append((name, Part(*(int(pick(column)) for column in columns))))
    cells = (
        (
            name,
            _amount(part.fetched_files, part.fetched_bytes),
            _amount(part.kept_files, part.kept_bytes),
            _amount(part.others_files, part.others_bytes),
        )
        for name, part in shown
    )
    others = "from others, per epoch" if plan.kind == "partition" else "from others, once"
    return grid("rrrr", cells, ("node", "fetches", "keeps", others))


def _amount(files: float, size_bytes: float) -> str:
    return f"{files:,.0f}, {format_size(size_bytes)}"
