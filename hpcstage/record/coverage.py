"""Coverage: which opens below the datasets were swapped, which were not and why. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hpcstage.record import tally
from hpcstage.record.part import NodePart, ProcessPart
from hpcstage.wire import Reason

EXAMPLES = 5
REASONS = [reason.name.lower() for reason in Reason if reason is not Reason.NONE]


def coverage_of(nodes: Sequence[NodePart]) -> dict[str, Any]:
    """The coverage section."""
    processes = tally.processes_of(nodes)
    known = bool(nodes)
    opens = sum(tally.opens_of(p) for p in processes)
    swapped = sum(tally.swapped_of(p) for p in processes)
    return {
        "opens": opens if known else None,
        "swapped": swapped if known else None,
        "share": tally.ratio(swapped, opens),
        "by_layer": _by_layer(processes),
        "reasons": _reasons(nodes),
        "failed_opens": tally.total(processes, "failed_opens") if known else None,
        "write_opens": tally.total(processes, "write_opens") if known else None,
        "dropped": tally.total(processes, "dropped") if known else None,
        "stats": _stats(processes) if known else None,
        "processes_attached": len(processes) if known else None,
        "processes_missed": sum(node.missed_count for node in nodes) if known else None,
        "processes_uncounted": sum(p.layer == tally.UNSEEN_LAYER for p in processes) if known else None,
        "missed_examples": [missed for node in nodes for missed in node.missed_processes][:EXAMPLES],
        "errors": tally.total(processes, "errors") if known else None,
    }


def _by_layer(processes: Sequence[ProcessPart]) -> dict[str, Any]:
    return {layer: _layer([p for p in processes if p.layer == layer]) for layer in sorted({p.layer for p in processes})}


def _layer(processes: Sequence[ProcessPart]) -> dict[str, Any]:
    if processes[0].layer == tally.UNSEEN_LAYER:
        return {"processes": len(processes), "opens": None, "swapped": None, "share": None}
    opens = sum(tally.opens_of(p) for p in processes)
    swapped = sum(tally.swapped_of(p) for p in processes)
    return {"processes": len(processes), "opens": opens, "swapped": swapped, "share": tally.ratio(swapped, opens)}


def _reasons(nodes: Sequence[NodePart]) -> dict[str, int]:
    """Why opens went to the source; what has no reason of its own is mode direct's, or `unstated`."""
    result = dict.fromkeys(REASONS, 0)
    result |= {"mode_direct": 0, "unstated": 0}
    for node in nodes:
        rest = "mode_direct" if node.mode == "direct" else "unstated"
        for process in node.processes:
            given = {name: tally.count(process, f"direct_{name}") for name in REASONS}
            for name, value in given.items():
                result[name] += value
            result[rest] += max(0, tally.count(process, "source_opens") - sum(given.values()))
    return {name: value for name, value in result.items() if value or name in REASONS}


def _stats(processes: Sequence[ProcessPart]) -> dict[str, int]:
    return {"local": tally.total(processes, "hit_stats"), "source": tally.total(processes, "source_stats")}
