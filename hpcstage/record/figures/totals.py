"""Composes the section `totals`: bytes, files and operations by origin, the daemons' and the shims' parts added. Pure.

The job's totals are the sums over the nodes that reported: a byte that two nodes read from the source counts twice,
since the source delivered it twice. A sum is unknown if a node's value is unknown.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from hpcstage.record.figures import tally
from hpcstage.record.parts.part import NodePart

Totals = dict[str, Any]


def totals_of(node: NodePart) -> Totals:
    """Returns the totals of a node. `copied_*` are the copiers' share, `direct_*` the program's own at the source."""
    processes = node.processes
    copied = _copied(node)
    direct = {
        "direct_opens": tally.total(processes, "source_opens"),
        "direct_stats": tally.total(processes, "source_stats"),
        "direct_bytes": tally.source_reads(processes, "source_read_bytes"),
        "direct_reads": tally.source_reads(processes, "source_reads"),
    }
    measuring_opens = _whole(node.totals.get("measuring_opens", 0))
    source_opens = tally.add(copied["copied_opens"], measuring_opens, direct["direct_opens"])
    return {
        "source_bytes": tally.add(copied["copied_bytes"], direct["direct_bytes"]),
        "source_files": copied["copied_files"],
        "source_ops": tally.add(
            source_opens, copied["source_listings"], copied["source_stats"], direct["direct_stats"]
        ),
        "source_opens": source_opens,
        "measuring_opens": measuring_opens,
        "source_reads": tally.add(copied["copied_reads"], direct["direct_reads"]),
        **{name: _whole(node.totals.get(name)) for name in PEERS},
        "local_bytes": tally.local_reads(processes, "local_read_bytes"),
        "local_reads": tally.local_reads(processes, "local_reads"),
        "wanted": tally.total(processes, "wants"),
        "want_ready": _whole(node.totals.get("want_ready")),
        "want_direct": _whole(node.totals.get("want_direct")),
        "hit_opens": tally.total(processes, "hit_opens"),
        "ready_opens": tally.total(processes, "ready_opens"),
        "failed": _whole(node.totals.get("failed")),
        "void": _whole(node.totals.get("void")),
        "refused": _whole(node.totals.get("refused")),
        "copy_busy_s": node.totals.get("copy_busy_s"),
        **copied,
        **direct,
    }


def summed(nodes: Sequence[tuple[NodePart, Totals]]) -> Totals:
    """Returns the totals of the job. A node without a group exchanged nothing; if none had a group, `peer_*` and
    `sent_*` are null."""
    if not nodes:
        return dict.fromkeys(KEYS)
    result = {name: tally.add(*(totals[name] for _, totals in nodes)) for name in KEYS}
    busy = [totals["copy_busy_s"] for _, totals in nodes if totals["copy_busy_s"] is not None]
    result["copy_busy_s"] = max(busy, default=None)
    shared = [totals for node, totals in nodes if node.mode != "direct" and _has_group(node, totals)]
    result |= {name: tally.add(*(totals[name] for totals in shared)) if shared else None for name in PEERS}
    return result


def _has_group(node: NodePart, totals: Totals) -> bool:
    return bool(node.group) or any(totals[name] is not None for name in PEERS)


def _copied(node: NodePart) -> dict[str, int | None]:
    return {
        **{f"copied_{name}": _total(node, f"source_{name}", _copied_nothing) for name in COPIED},
        **{f"source_{name}": _total(node, f"source_{name}", _scanned_nothing) for name in ("listings", "stats")},
    }


def _total(node: NodePart, name: str, nothing: Callable[[NodePart], bool]) -> int | None:
    """Returns a total of the node. A missing one is 0 if the daemon had nothing to count (`nothing`), else unknown."""
    return 0 if name not in node.totals and nothing(node) else _whole(node.totals.get(name))


def _copied_nothing(node: NodePart) -> bool:
    idle = node.complete and not any(sample.copied_bytes or sample.busy for sample in node.samples)
    return node.mode == "direct" or idle


def _scanned_nothing(node: NodePart) -> bool:
    """Returns whether the daemon scanned nothing: in mode direct, or where another node scanned for the group."""
    return node.scan_s is None and (node.mode == "direct" or bool(node.group and node.node_index))


def _whole(value: float | None) -> int | None:
    return None if value is None else int(value)


PEERS = ("peer_bytes", "peer_files", "sent_bytes", "sent_files")
COPIED = ("bytes", "files", "opens", "reads")
KEYS = (
    "source_bytes", "source_files", "source_ops", "source_opens", "measuring_opens", "source_reads", *PEERS,
    "local_bytes", "local_reads", "wanted", "want_ready", "want_direct", "hit_opens", "ready_opens", "failed", "void",
    "refused", "copy_busy_s", "copied_bytes", "copied_files", "copied_opens", "copied_reads", "source_listings",
    "source_stats", "direct_opens", "direct_stats", "direct_bytes", "direct_reads",
)  # fmt: skip
