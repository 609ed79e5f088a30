"""Sums counters over processes and nodes: the sections `totals` and `coverage`. Zero and unknown are kept apart. Pure.

The job's totals are the sums over the nodes that reported: a byte that two nodes read from the source counts twice,
since the source delivered it twice. A sum is unknown if a node's value is unknown.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Any, TypeAlias, TypeVar

from hpcstage.protocol.shim import Reason
from hpcstage.record.parts.part import NodePart
from hpcstage.record.parts.rows import UNCOUNTED_LAYER, ProcessPart
from hpcstage.record.schema import Coverage, RunTotals
from hpcstage.units import NS_PER_S

DIRECT_LAYER = "direct"
"""A process of this layer attached but counts nothing: its self-tests failed."""
UNSEEN_LAYERS = (DIRECT_LAYER, UNCOUNTED_LAYER)
Counts: TypeAlias = Mapping[str, int]
"""Counters of a process, or summed over several; zeros are left out."""
Histogram: TypeAlias = Mapping[int, int]
Key = TypeVar("Key", int, str)


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


def joined(parts: Iterable[Mapping[Key, int]]) -> Counter[Key]:
    """Returns the sum of several histograms, or of counters over layers or nodes."""
    found = Counter[Key]()
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


# ---- totals ----

TOTALS = [part.name for part in fields(RunTotals)]


def totals_of(node: NodePart, seen: Counts) -> RunTotals:
    """Returns the totals of a node, whose processes counted `seen`."""
    copied_bytes = node.totals.copied_bytes
    if copied_bytes is None and _copied_nothing(node):
        copied_bytes = 0
    copy_read_ns = sum(one.copy_open_ns + one.copy_read_ns for one in node.samples)
    direct_bytes = None if seen.get("blind_source") else seen.get("source_read_bytes", 0)
    if not node.processes and (node.node_count == 1 or node.missed_count):  # the command may have read files unseen
        direct_bytes = None
    return RunTotals(
        source_bytes=add(copied_bytes, direct_bytes),
        copied_bytes=copied_bytes,
        copy_read_s=None if copied_bytes is None or (copied_bytes and not node.samples) else copy_read_ns / NS_PER_S,
        direct_bytes=direct_bytes,
        peer_bytes=node.totals.peer_bytes,
        local_bytes=None if seen.get("blind_local") else seen.get("local_read_bytes", 0),
        wanted=seen.get("wants", 0),
        want_ready=node.totals.want_ready,
    )


def _copied_nothing(node: NodePart) -> bool:
    """Returns whether the copiers had nothing to do: in mode direct, or at an early end."""
    idle = node.complete and not any(sample.copied_bytes or sample.busy for sample in node.samples)
    return node.mode == "direct" or idle


def summed(nodes: Sequence[tuple[NodePart, RunTotals]]) -> RunTotals:
    """Returns the totals of the job. A node without a group received nothing; if none had a group, `peer_bytes` is
    null."""
    shared = [
        totals for node, totals in nodes if node.mode != "direct" and (node.group or totals.peer_bytes is not None)
    ]

    def total(name: str) -> Any:  # noqa: ANN401  as the field
        among = shared if name == "peer_bytes" else [totals for _, totals in nodes]
        return add(*(getattr(totals, name) for totals in among)) if among else None

    return RunTotals(**{name: total(name) for name in TOTALS})


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
        processes_missed=missed,
        layers={name: counts["processes"] for name, counts in layers.items()},
        reasons={name: number for name, number in reasons.items() if number},
        missed_examples=tuple(one for node, _ in nodes for one in node.missed_processes)[:MOST_EXAMPLES],
    )
