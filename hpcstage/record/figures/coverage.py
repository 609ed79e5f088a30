"""Composes the section `coverage`: which opens below the datasets were swapped, which were not and why. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hpcstage.protocol.shim import Reason
from hpcstage.record.figures import tally
from hpcstage.record.parts.part import NodePart, ProcessPart

EXAMPLES = 5
REASONS = [reason.name.lower() for reason in Reason if reason is not Reason.NONE]

Coverage = dict[str, Any]


def coverage_of(node: NodePart) -> Coverage:
    """Returns the coverage of one node."""
    processes = node.processes
    opens = sum(tally.opens_of(p) for p in processes)
    swapped = sum(tally.swapped_of(p) for p in processes)
    return {
        "opens": opens,
        "swapped": swapped,
        "share": tally.ratio(swapped, opens),
        "by_layer": _by_layer(processes),
        "reasons": _reasons(node),
        "failed_opens": tally.total(processes, "failed_opens"),
        "write_opens": tally.total(processes, "write_opens"),
        "dropped": tally.total(processes, "dropped"),
        "stats": _stats(processes),
        "processes_attached": tally.number(processes),
        "processes_missed": node.missed_count,
        "processes_uncounted": tally.number(p for p in processes if p.layer in tally.UNSEEN_LAYERS),
        "missed_examples": node.missed_processes[:EXAMPLES],
        "errors": tally.total(processes, "errors"),
        "accounts": dict(node.accounts),
    }


def added(nodes: Sequence[Coverage]) -> Coverage:
    """Returns the section: the sum over all nodes that reported."""
    if not nodes:
        return {
            **dict.fromkeys(KEYS),
            "unseen_bytes": None,
            "by_layer": {},
            "reasons": _shown({}),
            "missed_examples": [],
        }
    result: Coverage = {name: sum(node[name] for node in nodes) for name in COUNTS}
    result["share"] = tally.ratio(result["swapped"], result["opens"])
    layers = sorted({layer for node in nodes for layer in node["by_layer"]})
    result["by_layer"] = {layer: _added_layer([n["by_layer"].get(layer) for n in nodes]) for layer in layers}
    reasons = _sums([node["reasons"] for node in nodes])
    result["reasons"] = _shown(reasons)
    result["stats"] = _sums([node["stats"] for node in nodes])
    result["unseen_bytes"] = _unseen_bytes([node["accounts"] for node in nodes], result["processes_missed"])
    result["missed_examples"] = [missed for node in nodes for missed in node["missed_examples"]][:EXAMPLES]
    return result


def _unseen_bytes(accounts: Sequence[dict[str, int]], missed: int) -> int | None:
    """Returns how many bytes unseen processes read at most; 0 where it is no more than starting processes takes.

    Returns None where it is not known: a launcher's processes need not descend from the wrapper's command.
    """
    known = [account for account in accounts if account and 2 * account["command_bytes"] >= account["accounted_bytes"]]
    if not known:
        return None
    found = sum(max(0, account["command_bytes"] - account["accounted_bytes"]) for account in known)
    attached = sum(account["attached"] for account in known)
    least = LEAST_MISSED_BYTES if missed else max(LEAST_UNSEEN_BYTES, START_BYTES * attached)
    if found >= least:
        return found
    return 0 if len(known) == len(accounts) else None


LEAST_UNSEEN_BYTES = 64 * 10**6
"""Fewer unseen bytes count as none."""
LEAST_MISSED_BYTES = 10**6
"""This is the limit where processes are known to have been missed."""
START_BYTES = 32 * 10**6
"""An attached process may read this much to start and to import its libraries between two looks at it."""
COUNTS = (
    "opens", "swapped", "failed_opens", "write_opens", "dropped", "processes_attached", "processes_missed",
    "processes_uncounted", "errors",
)  # fmt: skip
KEYS = (*COUNTS, "share", "stats")


def _sums(tables: Sequence[dict[str, int]]) -> dict[str, int]:
    result: dict[str, int] = {}
    for table in tables:
        for name, value in table.items():
            result[name] = result.get(name, 0) + value
    return result


def _added_layer(layers: Sequence[dict[str, Any] | None]) -> dict[str, Any]:
    found = [layer for layer in layers if layer is not None]
    opens, swapped = (tally.add(*(layer[name] for layer in found)) for name in ("opens", "swapped"))
    processes = sum(layer["processes"] for layer in found)
    return {"processes": processes, "opens": opens, "swapped": swapped, "share": tally.ratio(swapped, opens)}


def _shown(reasons: dict[str, int]) -> dict[str, int]:
    """Returns the counts of all known reasons, and of others where they occurred."""
    table = dict.fromkeys(REASONS, 0) | reasons
    return {name: value for name, value in table.items() if value or name in REASONS}


def _by_layer(processes: Sequence[ProcessPart]) -> dict[str, Any]:
    return {layer: _layer([p for p in processes if p.layer == layer]) for layer in sorted({p.layer for p in processes})}


def _layer(processes: Sequence[ProcessPart]) -> dict[str, Any]:
    if processes[0].layer in tally.UNSEEN_LAYERS:
        return {"processes": tally.number(processes), "opens": None, "swapped": None, "share": None}
    opens = sum(tally.opens_of(p) for p in processes)
    swapped = sum(tally.swapped_of(p) for p in processes)
    share = tally.ratio(swapped, opens)
    return {"processes": tally.number(processes), "opens": opens, "swapped": swapped, "share": share}


def _reasons(node: NodePart) -> dict[str, int]:
    """Counts opens at the source by reason; one without a reason counts as `mode_direct`, or as `unstated`."""
    result = dict.fromkeys(REASONS, 0)
    result |= {"mode_direct": 0, "unstated": 0}
    rest = "mode_direct" if node.mode == "direct" else "unstated"
    for process in node.processes:
        given = {name: tally.count(process, f"direct_{name}") for name in REASONS}
        for name, value in given.items():
            result[name] += value
        result[rest] += max(0, tally.count(process, "source_opens") - sum(given.values()))
    return result


def _stats(processes: Sequence[ProcessPart]) -> dict[str, int]:
    return {"local": tally.total(processes, "hit_stats"), "source": tally.total(processes, "source_stats")}
