"""Totals: bytes, files and operations by origin, the daemons' and the shims' parts added. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from hpcstage.record import tally
from hpcstage.record.part import NodePart


def totals_of(nodes: Sequence[NodePart]) -> dict[str, Any]:
    """The totals section. `copied_*` are the copiers' share, `direct_*` the program's own at the source."""
    if not nodes:
        return dict.fromkeys(KEYS)
    processes = tally.processes_of(nodes)
    copied = _copied(nodes)
    direct = {
        "direct_opens": tally.total(processes, "source_opens"),
        "direct_stats": tally.total(processes, "source_stats"),
        "direct_bytes": tally.source_reads(processes, "source_read_bytes"),
        "direct_reads": tally.source_reads(processes, "source_reads"),
    }
    source_opens = tally.add(copied["copied_opens"], direct["direct_opens"])
    return {
        "source_bytes": tally.add(copied["copied_bytes"], direct["direct_bytes"]),
        "source_files": copied["copied_files"],
        "source_ops": tally.add(
            source_opens, copied["source_listings"], copied["source_stats"], direct["direct_stats"]
        ),
        "source_opens": source_opens,
        "source_reads": tally.add(copied["copied_reads"], direct["direct_reads"]),
        "peer_bytes": None,
        "local_bytes": tally.local_reads(processes, "local_read_bytes"),
        "local_reads": tally.local_reads(processes, "local_reads"),
        "wanted": tally.total(processes, "wants"),
        "want_ready": tally.node_total(nodes, "want_ready"),
        "want_direct": tally.node_total(nodes, "want_direct"),
        "hit_opens": tally.total(processes, "hit_opens"),
        "ready_opens": tally.total(processes, "ready_opens"),
        "failed": tally.node_total(nodes, "failed"),
        "void": tally.node_total(nodes, "void"),
        "refused": tally.node_total(nodes, "refused"),
        "copy_busy_s": _seconds(nodes, "copy_busy_s"),
        **copied,
        **direct,
    }


def _copied(nodes: Sequence[NodePart]) -> dict[str, int | None]:
    return {
        **{f"copied_{name}": _total(nodes, f"source_{name}", _copied_nothing) for name in COPIED},
        **{f"source_{name}": _total(nodes, f"source_{name}", _scanned_nothing) for name in ("listings", "stats")},
    }


def _total(nodes: Sequence[NodePart], name: str, nothing: Callable[[NodePart], bool]) -> int | None:
    """A daemon that had no reason to begin counting did nothing; where it had, a missing total is unknown."""
    return tally.node_total([node for node in nodes if name in node.totals or not nothing(node)], name, nobody=0)


def _copied_nothing(node: NodePart) -> bool:
    idle = node.complete and not any(sample.copied_bytes or sample.busy for sample in node.samples)
    return node.mode == "direct" or idle


def _scanned_nothing(node: NodePart) -> bool:
    return node.mode == "direct" and node.scan_s is None


def _seconds(nodes: Sequence[NodePart], name: str) -> float | None:
    values = [node.totals[name] for node in nodes if name in node.totals]
    return max(values) if values else None


COPIED = ("bytes", "files", "opens", "reads")
KEYS = (
    "source_bytes", "source_files", "source_ops", "source_opens", "source_reads", "peer_bytes", "local_bytes",
    "local_reads", "wanted", "want_ready", "want_direct", "hit_opens", "ready_opens", "failed", "void", "refused",
    "copy_busy_s", "copied_bytes", "copied_files", "copied_opens", "copied_reads", "source_listings", "source_stats",
    "direct_opens", "direct_stats", "direct_bytes", "direct_reads",
)  # fmt: skip
