"""The nodes as a group: placement and why, who took part, how often the group was started, how it shared. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from hpcstage.record.figures import tally
from hpcstage.record.figures.digest import Digest
from hpcstage.record.parts.roster import State

NAMED = 16
Section = dict[str, Any]


def group_of(nodes: Sequence[Digest], silent: Sequence[str], total: int, record: dict[str, Any]) -> Section | None:
    """The section; None where the job has one node. `silent`: names of nodes of which nothing was heard."""
    if total < 2:
        return None
    members = [node for node in nodes if node.part.group]
    died = [node.name for node in nodes if node.state is State.DIED]
    missing = [*(node.name for node in nodes if node.state is State.MISSING), *silent]
    alone = [node for node in nodes if node.state is State.OK and not node.part.group.get("generations")]
    return {
        "nodes": total,
        "reported": sum(node.speaks for node in nodes),
        "missing": missing[:NAMED],
        "missing_count": len(missing),
        "died": died[:NAMED],
        "died_count": len(died),
        "placement": _placement(nodes),
        "placement_why": _first([node.part.placement_why for node in nodes if node.speaks]),
        "generations": max((node.part.group.get("generations") or 0 for node in members), default=0),
        "size": max((node.part.group.get("size") or 0 for node in members), default=0),
        "alone": [node.name for node in alone[:NAMED]],
        "alone_count": len(alone),
        "why": _first([node.part.group.get("why") for node in _troubled(alone, members)]),
        **_times(record),
    }


def _troubled(alone: Sequence[Digest], members: Sequence[Digest]) -> Sequence[Digest]:
    """Those whose reason says something: outside of the group, or in one that was started anew."""
    return alone or [node for node in members if (node.part.group.get("generations") or 0) > 1]


def _placement(nodes: Sequence[Digest]) -> str | None:
    """What most nodes did: one that lost the group is private."""
    kinds = Counter(node.part.placement for node in nodes if node.speaks)
    return kinds.most_common(1)[0][0] if kinds else None


def _first(texts: Sequence[str | None]) -> str | None:
    return next((text for text in texts if text), None)


def _times(record: dict[str, Any]) -> Section:
    """How often the datasets were read from the source, and how often they would have been without sharing."""
    sizes = [dataset["size_bytes"] for dataset in record["datasets"]]
    size = sum(sizes) if sizes and None not in sizes else None
    totals = record["totals"]
    return {"source_times": tally.ratio(totals["source_bytes"], size)}
