"""Prints the part of `hpcstage plan` about several nodes: what each fetches, keeps and gets from others, and "what if".

This module owns the wording and layout. It computes nothing: all numbers are the plan's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median

from hpcstage.plan.budget import NO_LIMIT
from hpcstage.plan.forecast.nodes import NodesPlan, Part, Scaled, Size
from hpcstage.units import format_duration, format_size

_PLACEMENTS = ("private", "replicate", "partition")


def text(plan: NodesPlan, rows: int) -> list[list[str]]:
    """Returns two paragraphs: the nodes, of which at most `rows` are listed, and the forecasts over their number."""
    return [list(_nodes(plan, rows)), list(_sizes(plan))]


def _nodes(plan: NodesPlan, rows: int) -> Iterator[str]:
    yield f"nodes    {plan.nodes:,}; placement {plan.kind}: {plan.why}"
    yield f"         {_room(plan)}"
    if plan.unplaced_files:
        left = f"{plan.unplaced_files:,} files, {format_size(plan.unplaced_bytes)}"
        yield f"         {left} have room on no node and are read from the source every time"
    if plan.kind == "private":
        yield "         each node fetches what its own processes read, and then the rest: up to all files"
        return
    yield f"{'node':>8} {'fetches':>20} {'keeps':>20} {_others(plan):>26}"
    for part in plan.parts[:rows]:
        yield _part(f"{part.node:,}", part)
    if len(plan.parts) > rows:
        yield from _extremes(plan.parts)


def _room(plan: NodesPlan) -> str:
    if plan.room_bytes is None or plan.room_inodes is None:
        return "what a node has room for is unknown here: taken as enough"
    inodes = f" and {plan.room_inodes:,} files" if plan.room_inodes < NO_LIMIT // 2 else ""
    return f"assuming that every node has the room that was found here: {format_size(plan.room_bytes)}{inodes}"


def _others(plan: NodesPlan) -> str:
    return "from others, per epoch" if plan.kind == "partition" else "from others, once"


def _part(name: str, part: Part) -> str:
    fetched = _amount(part.fetched_files, part.fetched_bytes)
    kept = _amount(part.kept_files, part.kept_bytes)
    return f"{name:>8} {fetched:>20} {kept:>20} {_amount(part.others_files, part.others_bytes):>26}"


def _amount(files: float, size_bytes: float) -> str:
    return f"{files:,.0f}, {format_size(size_bytes)}"


def _extremes(parts: Sequence[Part]) -> Iterator[str]:
    for name, pick in (("least", min), ("median", median), ("most", max)):
        columns = [[getattr(part, field) for part in parts] for field in Part.__dataclass_fields__]
        yield _part(name, Part(*(int(pick(column)) for column in columns)))


def _sizes(plan: NodesPlan) -> Iterator[str]:
    yield (
        f"{'nodes':>8} {'direct':>9} " + " ".join(f"{name:>9}" for name in _PLACEMENTS)
        + f"  {'takes':<9} {'1st epoch':>9} {'later':>9} {'source':>9} {'peers':>9}  later reads"
    )  # fmt: skip
    for size in plan.sizes:
        yield _size(size)
    yield _knee(plan)


def _size(size: Size) -> str:
    totals = {item.placement: format_duration(item.total_s) for item in size.placements}
    chosen = size.chosen()
    times = f"{format_duration(chosen.first_epoch_s):>9} {format_duration(chosen.later_epoch_s):>9}"
    moved = f"{format_size(chosen.source_bytes):>9} {format_size(chosen.peer_bytes):>9}"
    row = f"{size.nodes:>8,} {format_duration(size.direct_s):>9} "
    row += " ".join(f"{totals.get(name, '-'):>9}" for name in _PLACEMENTS)
    return f"{row}  {size.choice:<9} {times} {moved}  {_hits(chosen)}"


def _hits(chosen: Scaled) -> str:
    shares = (("local", chosen.later.local), ("peers", chosen.later.peers), ("source", chosen.later.source))
    return ", ".join(f"{share:.3g} {name}" for name, share in shares if share > 0.0005)


def _knee(plan: NodesPlan) -> str:
    if plan.knee is None:
        return "knee     unknown: set how long an epoch computes with --epoch-compute"
    found = f"{plan.knee:,.0f} nodes (R / V)" if plan.knee >= 10 else f"{plan.knee:.2g} nodes (R / V)"
    if plan.knee < 1:
        return f"knee     {found}: one node already reads faster than the source gives; more only help with staging"
    return f"knee     {found}: with more, an epoch that reads the source directly does not get shorter"
