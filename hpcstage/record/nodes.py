"""Composes the sections `nodes`, a row for each node, and `group`, which describes them together. Pure.

A node is compared with the median of the others, so that trouble that all of them share marks none of them as slow.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace

from hpcstage.record.figures.contention import median_without
from hpcstage.record.figures.digest import Digest
from hpcstage.record.figures.track import rows_over_time
from hpcstage.record.parts.roster import Presence, unheard_why
from hpcstage.record.parts.run import RunPart
from hpcstage.record.schema import Contention, GroupSection, NodeRow, Period
from hpcstage.units import format_duration, format_share

SLOWER_SHARE = 0.75
"""A node whose pace at the source is below this share of the others' is slow."""
SLOWER_DISK_FACTOR = 2.0
"""A local disk is slow if a byte takes more than this many times as long as on the other nodes."""
WAITS_SHARE = 0.05
"""A node is slow if its program waited longer than the others' by this share of the wall time and LEAST_WAIT_S."""
LEAST_WAIT_S = 2.0
LOCAL_WAITS_SHARE = 0.02
"""A slow local disk does no harm if the program waited for it for less than this share of the wall time."""
Values = Sequence[float | None]


def rows_of(
    run: RunPart, nodes: Sequence[Digest], silent: Sequence[str], wall_s: float, contention: Contention
) -> list[NodeRow]:
    """Returns the rows in the order of `nodes`, then those of the nodes that reported nothing (`silent`)."""
    slow = _slow(nodes, wall_s, contention.periods)
    over_time = rows_over_time([node.track for node in nodes])
    rows = [
        replace(node.row, slow=tuple(said), waited_s=node.split.waited_s, over_time=rates)
        for node, said, rates in zip(nodes, slow, over_time, strict=True)
    ]
    return [*rows, *(NodeRow(host=name, state=Presence.MISSING, why=unheard_why(run, name)) for name in silent)]


# ---- slow nodes ----


def _slow(nodes: Sequence[Digest], wall_s: float, periods: Sequence[Period]) -> list[list[str]]:
    """Returns for each node the figures in which it is slower than the others, in words."""
    alone: dict[str | None, list[Period]] = defaultdict(list)
    for period in periods:
        alone[period.host].append(period)
    behind = _behind([node.split.waited_s for node in nodes])
    writes = _times_others([_write_s_per_byte(node) for node in nodes])
    rates = [node.row.disk_read_bytes_per_s for node in nodes]
    reads = _times_others([None if rate is None else 1 / rate for rate in rates])
    return [
        [*_waits(behind_s, wall_s), *_paces(node, alone[node.row.host]), *_disks(node, written, read, wall_s)]
        for node, behind_s, written, read in zip(nodes, behind, writes, reads, strict=True)
    ]


def _waits(behind_s: float | None, wall_s: float) -> list[str]:
    if behind_s is None or behind_s < max(LEAST_WAIT_S, WAITS_SHARE * wall_s):
        return []
    return [f"waited {format_duration(behind_s)} longer for files than the others"]


def _paces(node: Digest, periods: Sequence[Period]) -> list[str]:
    said = []
    if node.relative_pace is not None and node.relative_pace < SLOWER_SHARE:
        said.append(f"reads the source at {format_share(node.relative_pace)} of the others' rate")
    if periods:
        length_s = sum(one.length_s for one in periods)
        loss = sum(one.cost_s for one in periods) / length_s
        said.append(f"fell behind the others for {format_duration(length_s)}, by {format_share(loss)}")
    return said


def _disks(node: Digest, written: float | None, read: float | None, wall_s: float) -> list[str]:
    said = []
    if (node.row.disk_write_share or 0.0) > 0.5 and written is not None and written > SLOWER_DISK_FACTOR:
        said.append(f"its local disk takes {written:.1f} times as long to write as the others'")
    waits = (node.split.wait_local_s or 0.0) > LOCAL_WAITS_SHARE * wall_s
    if read is not None and read > SLOWER_DISK_FACTOR and waits:
        said.append(f"its local disk takes {read:.1f} times as long to read as the others'")
    return said


def _write_s_per_byte(node: Digest) -> float | None:
    size = (node.totals.copied_bytes or 0) + (node.totals.peer_bytes or 0)
    return node.disk_write_s / size if node.disk_write_s and size else None


def _behind(values: Values) -> list[float | None]:
    """Returns by how much each value exceeds the median of the others; None where there is nothing to compare."""
    return [None if value is None or other is None else value - other for value, other in _with_others(values)]


def _times_others(values: Values) -> list[float | None]:
    return [value / other if value is not None and other else None for value, other in _with_others(values)]


def _with_others(values: Values) -> list[tuple[float | None, float | None]]:
    """Returns each value with the median of the other known values."""
    known = sorted(value for value in values if value is not None)
    return [(one, None if one is None or len(known) < 2 else median_without(known, one)) for one in values]


# ---- the nodes together ----


def group_of(nodes: Sequence[Digest], total: int) -> GroupSection | None:
    """Returns the section; None where the job has one node."""
    if total < 2:
        return None
    told = [node.part for node in nodes if node.speaks]
    return GroupSection(
        placement=_most_frequent([part.placement for part in told]),
        placement_why=next((part.placement_why for part in told if part.placement_why), None),
        generations=max((group.generations for node in nodes if (group := node.part.group)), default=0),
    )


def _most_frequent(placements: Sequence[str]) -> str | None:
    """Returns the placement that most nodes followed, as a node that lost the group reports `private`."""
    return Counter(placements).most_common(1)[0][0] if placements else None
