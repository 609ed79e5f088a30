"""Sums counters over processes and nodes: the sections `totals` and `coverage`. Zero and unknown are kept apart. Pure.

The job's totals are the sums over the nodes that reported: a byte that two nodes read from the source counts twice,
since the source delivered it twice. A sum is unknown if a node's value is unknown.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, replace
from typing import TypeAlias

from hpcstage.protocol.shim import Reason
from hpcstage.record.parts.part import NodePart, NodeTotals
from hpcstage.record.parts.rows import UNCOUNTED_LAYER, ProcessPart
from hpcstage.record.schema import Coverage, LayerCoverage, RunTotals

DIRECT_LAYER = "direct"
"""A process of this layer attached but counts nothing: its self-tests failed."""
UNSEEN_LAYERS = (DIRECT_LAYER, UNCOUNTED_LAYER)
Counts: TypeAlias = Mapping[str, int]
"""Counters of a process, or summed over several; zeros are left out."""
Histogram = dict[int, int]


def opens_of(counts: Counts) -> int:
    """Counts the successful opens for reading below a dataset."""
    return swapped_of(counts) + counts.get("source_opens", 0)


def swapped_of(counts: Counts) -> int:
    """Counts the opens that got the staged copy."""
    return counts.get("hit_opens", 0) + counts.get("ready_opens", 0)


def maps(counts: Counts) -> bool:
    """Returns whether files of the datasets were mapped into memory, which are then read without calls."""
    return bool(counts.get("source_maps") or counts.get("local_maps"))


def reads_known(process: ProcessPart) -> bool:
    """Returns whether this process's reads were measured."""
    return bool(process.counters.get("reads_measured")) and process.layer not in UNSEEN_LAYERS


def add(*values: int | None) -> int | None:
    """Returns the sum; None if a part is None."""
    known = [value for value in values if value is not None]
    return sum(known) if len(known) == len(values) else None


def ratio(part: float | None, whole: float | None) -> float | None:
    """Returns part / whole; None if either is unknown or the whole is 0."""
    return None if part is None or not whole else part / whole


def merge(parts: Iterable[Mapping[int, int]]) -> Histogram:
    """Returns the sum of several histograms."""
    found = Counter[int]()
    for part in parts:
        found.update(part)
    return found


def by_layer(processes: Iterable[ProcessPart]) -> dict[str, Counter[str]]:
    """Returns the counters summed over the processes of each layer. `processes` is their number; `blind_source` and
    `blind_local` count those that may have read files there, and whose reads were not measured."""
    found: dict[str, Counter[str]] = {}
    for process in processes:
        counts, layer = process.counters, found.setdefault(process.layer, Counter())
        layer.update(counts)
        layer["processes"] += process.processes
        blind, unseen = not reads_known(process), process.layer in UNSEEN_LAYERS
        at_source, copies = counts.get("source_opens", 0), swapped_of(counts)
        layer["blind_source"] += bool(unseen or counts.get("source_maps") or (blind and at_source))
        layer["blind_local"] += bool(unseen or counts.get("local_maps") or (blind and copies))
    return found


def joined(layers: Iterable[Mapping[str, int]]) -> Counter[str]:
    """Returns the counters summed over layers or nodes."""
    found = Counter[str]()
    for layer in layers:
        found.update(layer)
    return found


# ---- totals ----

TOTALS = [part.name for part in fields(RunTotals)]
PEERS = ("peer_bytes", "peer_files", "sent_bytes")
COPIED = ("source_bytes", "source_opens")
SCANNED = ("source_listings", "source_stats")
PASSED_ON = ("source_listings", *PEERS, "want_ready")


def totals_of(node: NodePart, seen: Counts) -> RunTotals:
    """Returns the totals of a node, whose processes counted `seen`. `copied_*` are the copiers' share, `direct_*` the
    program's own at the source."""
    told = _told(node)
    direct_opens: int | None = seen.get("source_opens", 0)
    direct_stats: int | None = seen.get("source_stats", 0)
    direct_bytes = None if seen.get("blind_source") else seen.get("source_read_bytes", 0)
    if not node.processes and (node.node_count == 1 or node.missed_count):  # the command may have read files unseen
        direct_opens = direct_stats = direct_bytes = None
    source_opens = add(told.source_opens, direct_opens)
    return RunTotals(
        **{name: getattr(told, name) for name in PASSED_ON},
        source_bytes=add(told.source_bytes, direct_bytes),
        source_ops=add(source_opens, told.source_listings, told.source_stats, direct_stats),
        source_opens=source_opens,
        local_bytes=None if seen.get("blind_local") else seen.get("local_read_bytes", 0),
        moved_opens=seen.get("moved_opens", 0),
        moved_bytes=seen.get("moved_read_bytes", 0),
        wanted=seen.get("wants", 0),
        copied_bytes=told.source_bytes,
        copied_opens=told.source_opens,
        direct_opens=direct_opens,
        direct_bytes=direct_bytes,
    )


def _told(node: NodePart) -> NodeTotals:
    """Returns the daemon's counts; those that are missing are 0 where the copiers or the scan had nothing to do: in
    mode direct, at an early end, or where another node scanned for the group."""
    idle = node.complete and not any(sample.copied_bytes or sample.busy for sample in node.samples)
    unscanned = node.scan_s is None and (node.mode == "direct" or bool(node.group and node.node_index))
    nothing = [*(COPIED if idle or node.mode == "direct" else ()), *(SCANNED if unscanned else ())]
    return replace(node.totals, **{name: 0 for name in nothing if getattr(node.totals, name) is None})


def summed(nodes: Sequence[tuple[NodePart, RunTotals]]) -> RunTotals:
    """Returns the totals of the job. A node without a group exchanged nothing; if none had a group, `peer_*` and
    `sent_*` are null."""
    shared = [totals for node, totals in nodes if node.mode != "direct" and _has_group(node, totals)]

    def total(name: str) -> int | None:
        among = shared if name in PEERS else [totals for _, totals in nodes]
        return add(*(getattr(totals, name) for totals in among)) if among else None

    return RunTotals(**{name: total(name) for name in TOTALS})


def _has_group(node: NodePart, totals: RunTotals) -> bool:
    return bool(node.group) or any(getattr(totals, name) is not None for name in PEERS)


# ---- coverage ----

MOST_EXAMPLES = 5
REASONS = [reason.name.lower() for reason in Reason if reason is not Reason.NONE]


def reasons_of(counts: Counts, *, direct: bool) -> dict[str, int]:
    """Counts opens at the source by reason; one without a reason counts as `mode_direct`, or as `unstated`."""
    found = {name: counts.get(f"direct_{name}", 0) for name in REASONS}
    rest = max(0, counts.get("source_opens", 0) - sum(found.values()))
    return {**found, "mode_direct" if direct else "unstated": rest}


def coverage_of(nodes: Sequence[tuple[NodePart, Mapping[str, Counter[str]]]], missed: int | None) -> Coverage:
    """Returns the section from the layers of all nodes; unknown where no node reported. `missed` is the number of
    Python processes that never attached."""
    names = sorted({name for _, layers in nodes for name in layers})
    layers = {name: joined(layers[name] for _, layers in nodes if name in layers) for name in names}
    every = joined(layers.values())
    reasons = joined(reasons_of(joined(found.values()), direct=node.mode == "direct") for node, found in nodes)
    known = bool(nodes)
    return Coverage(
        opens=opens_of(every) if known else None,
        swapped=swapped_of(every) if known else None,
        dropped=every["dropped"] if known else None,
        errors=every["errors"] if known else None,
        processes_attached=every["processes"] if known else None,
        processes_missed=missed,
        share=ratio(swapped_of(every), opens_of(every)),
        by_layer={name: _layer(name, counts) for name, counts in layers.items()},
        reasons={name: number for name, number in reasons.items() if number},
        missed_examples=tuple(one for node, _ in nodes for one in node.missed_processes)[:MOST_EXAMPLES],
    )


def _layer(name: str, counts: Counts) -> LayerCoverage:
    opens = None if name in UNSEEN_LAYERS else opens_of(counts)
    return LayerCoverage(processes=counts["processes"], opens=opens)
