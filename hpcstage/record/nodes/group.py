"""Composes the section `group`: the placement and why, which nodes took part, how often the node group was started, and
how often the datasets were read from the source. Pure.
"""

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
    """Returns the section; None where the job has one node. `silent` names the nodes that reported nothing at all."""
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
    """Returns the nodes whose reason matters: those outside of the group, else those whose group was started anew."""
    return alone or [node for node in members if (node.part.group.get("generations") or 0) > 1]


def _placement(nodes: Sequence[Digest]) -> str | None:
    """Returns the placement that most nodes followed, as a node that lost the group reports `private`."""
    kinds = Counter(node.part.placement for node in nodes if node.speaks)
    return kinds.most_common(1)[0][0] if kinds else None


def _first(texts: Sequence[str | None]) -> str | None:
    return next((text for text in texts if text), None)


def _times(record: dict[str, Any]) -> Section:
    """Returns how often the datasets were read from the source: source bytes divided by their size."""
    sizes = [dataset["size_bytes"] for dataset in record["datasets"]]
    size = sum(sizes) if sizes and None not in sizes else None
    totals = record["totals"]
    return {"source_times": tally.ratio(totals["source_bytes"], size)}
