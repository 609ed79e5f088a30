"""Composes the section `order`: where the access order came from, how well the program kept to it, and how far ahead
of the program the copies were. Pure.

The section is composed from what each node's daemon saw of its own loaders.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hpcstage.record.figures.digest import Digest

SUMMED = (
    "announcements",
    "announced_files",
    "announced_opens",
    "unknown_samples",
    "opened_files",
    "lost_bytes",
)
SHARES = ("kept_share", "near_share")
"""The fields that are shares of announced_opens."""
OF_FIRST = ("provenance", "planned", "ids", "followed", "trace_used", "trace_unused_why", "trace_written", "trace_why")
"""The fields that are the same on all nodes, except that only one node may know those of the trace."""


def order_of(nodes: Sequence[Digest]) -> dict[str, Any]:
    """Returns the section. The shares and `lead` are null where nothing was announced, or no announced file was seen
    to be opened."""
    parts = [node.part.order for node in nodes]
    found: dict[str, Any] = {name: _first(parts, name) for name in OF_FIRST}
    found |= {name: _sum(parts, name) for name in SUMMED}
    found |= {name: _share(parts, name) for name in SHARES}
    found["lead"] = _lead(nodes)
    found["tables"] = [table for part in parts[:1] for table in part.get("tables") or []]
    return found


def _first(parts: Sequence[dict[str, Any]], name: str) -> object:
    return next((part[name] for part in parts if part.get(name) is not None), None)


def _sum(parts: Sequence[dict[str, Any]], name: str) -> int | None:
    known = [part[name] for part in parts if part.get(name) is not None]
    return sum(known) if known else None


def _share(parts: Sequence[dict[str, Any]], name: str) -> float | None:
    known = [(part[name], part["announced_opens"]) for part in parts if part.get(name) is not None]
    opens = sum(count for _, count in known)
    return sum(share * count for share, count in known) / opens if opens else None


def _lead(nodes: Sequence[Digest]) -> dict[str, Any] | None:
    """Returns the lead of the node whose copies were least ahead, as a job waits for its slowest node."""
    known = [(node, node.part.order["lead"]) for node in nodes if node.part.order.get("lead")]
    if not known:
        return None
    node, lead = min(known, key=lambda pair: (pair[1]["median_files"], pair[1]["least_files"]))
    samples = [[round(at_s + node.shift_s, 3), files, seconds] for at_s, files, seconds in lead["samples"]]
    return {**lead, "samples": samples, "host": node.name}
