"""Sums counters over processes and nodes: the sections `totals` and `coverage`. Zero and unknown are kept apart. Pure.

The job's totals are the sums over the nodes that reported: a byte that two nodes read from the source counts twice,
since the source delivered it twice. A sum is unknown if a node's value is unknown.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Any

from hpcstage.protocol.shim import Reason
from hpcstage.record.parts.part import NodePart
from hpcstage.record.parts.rows import UNCOUNTED_LAYER, ProcessPart
from hpcstage.record.schema import Coverage, RunTotals

DIRECT_LAYER = "direct"
"""A process of this layer attached but counts nothing: its self-tests failed."""
UNSEEN_LAYERS = (DIRECT_LAYER, UNCOUNTED_LAYER)
Histogram = dict[int, int]

# ---- one process ----


def count(process: ProcessPart, name: str) -> int:
    """Returns a counter; the part leaves out those that are zero."""
    return process.counters.get(name, 0)


def opens_of(process: ProcessPart) -> int:
    """Counts the successful opens for reading below a dataset."""
    return swapped_of(process) + count(process, "source_opens")


def swapped_of(process: ProcessPart) -> int:
    """Counts the opens that got the staged copy."""
    return count(process, "hit_opens") + count(process, "ready_opens")


def reads_known(process: ProcessPart) -> bool:
    """Returns whether this process's reads were measured."""
    return bool(count(process, "reads_measured")) and process.layer not in UNSEEN_LAYERS


def life_ns(process: ProcessPart) -> int:
    """Returns the nanoseconds from a process's attaching to its end; 0: unknown.

    Where the end was not seen, its last call on a dataset's file counts as the end.
    """
    if process.processes > 1:
        return count(process, "life_ns")
    begin_ns = count(process, "attach_ns")
    end_ns = count(process, "exit_ns") or count(process, "last_ns")
    return end_ns - begin_ns if end_ns > begin_ns > 0 else 0


def maps(process: ProcessPart) -> bool:
    """Returns whether the process mapped files of the datasets into memory, which it then reads without calls."""
    return bool(count(process, "source_maps") or count(process, "local_maps"))


# ---- several processes ----


def total(processes: Iterable[ProcessPart], name: str) -> int:
    """Returns a counter summed over processes."""
    return sum(count(process, name) for process in processes)


def number(processes: Iterable[ProcessPart]) -> int:
    """Counts the processes that these rows stand for."""
    return sum(process.processes for process in processes)


def source_reads(processes: Iterable[ProcessPart], name: str) -> int | None:
    """Sums a counter of reads at the source; None if a process that opened files there did not measure its reads."""
    return _reads(processes, name, "source_maps", "source_opens")


def local_reads(processes: Iterable[ProcessPart], name: str) -> int | None:
    """Sums a counter of reads of staged copies; None if a process that opened some did not measure its reads."""
    return _reads(processes, name, "local_maps", "hit_opens", "ready_opens")


def _reads(processes: Iterable[ProcessPart], name: str, mapped: str, *opens: str) -> int | None:
    value = 0
    for process in processes:
        if process.layer in UNSEEN_LAYERS or count(process, mapped):
            return None
        if any(count(process, o) for o in opens) and not reads_known(process):
            return None
        value += count(process, name)
    return value


def add(*values: int | None) -> int | None:
    """Returns the sum; None if a part is None."""
    known = [value for value in values if value is not None]
    return sum(known) if len(known) == len(values) else None


def ratio(part: float | None, whole: float | None) -> float | None:
    """Returns part / whole; None if either is unknown or the whole is 0."""
    return None if part is None or not whole else part / whole


def at_once(spans: Iterable[tuple[float, float, float]]) -> float:
    """Returns the mean number of processes at a time, over the time in which there was any. A span is when processes
    began and ended, and how long they lasted in sum."""
    end = covered = lasted = 0.0
    for first, last, length in sorted(spans):
        covered += max(0.0, last - max(first, end))
        end = max(end, last)
        lasted += length
    return max(1.0, lasted / covered) if covered else 1.0


def merge(parts: Iterable[Mapping[int, int]]) -> Histogram:
    """Returns the sum of several histograms."""
    found = Counter[int]()
    for part in parts:
        found.update(part)
    return found


# ---- totals ----

TOTALS = [part.name for part in fields(RunTotals)]


def totals_of(node: NodePart) -> RunTotals:
    """Returns the totals of a node. `copied_*` are the copiers' share, `direct_*` the program's own at the source."""
    processes, copied_bytes = node.processes, node.totals.source_bytes
    if copied_bytes is None and _copied_nothing(node):
        copied_bytes = 0
    direct_opens: int | None = total(processes, "source_opens")
    direct_bytes = source_reads(processes, "source_read_bytes")
    if _was_unseen(node):
        direct_opens = direct_bytes = None
    return RunTotals(
        source_bytes=add(copied_bytes, direct_bytes),
        copied_bytes=copied_bytes,
        direct_bytes=direct_bytes,
        direct_opens=direct_opens,
        peer_bytes=node.totals.peer_bytes,
        local_bytes=local_reads(processes, "local_read_bytes"),
        wanted=total(processes, "wants"),
        want_ready=node.totals.want_ready,
    )


def _was_unseen(node: NodePart) -> bool:
    """Returns whether the command may have read files of the datasets, and no process of it attached."""
    return not node.processes and (node.node_count == 1 or bool(node.missed_count))


def _copied_nothing(node: NodePart) -> bool:
    idle = node.complete and not any(sample.copied_bytes or sample.busy for sample in node.samples)
    return node.mode == "direct" or idle


def summed(nodes: Sequence[tuple[NodePart, RunTotals]]) -> RunTotals:
    """Returns the totals of the job. A node without a group received nothing; if none had a group, `peer_bytes` is
    null."""
    found: dict[str, Any] = dict.fromkeys(TOTALS)
    if nodes:
        found = {name: add(*(getattr(totals, name) for _, totals in nodes)) for name in TOTALS}
        shared = [totals.peer_bytes for node, totals in nodes if node.mode != "direct" and _shares(node)]
        found["peer_bytes"] = add(*shared) if shared else None
    return RunTotals(**found)


def _shares(node: NodePart) -> bool:
    return bool(node.group) or node.totals.peer_bytes is not None


# ---- coverage ----

MOST_EXAMPLES = 5
REASONS = [reason.name.lower() for reason in Reason if reason is not Reason.NONE]
DIRECT_COUNTERS = [(name, f"direct_{name}") for name in REASONS]
COUNTS = (
    "opens", "swapped", "dropped", "processes_attached", "processes_missed", "errors",
)  # fmt: skip


def coverage_of(node: NodePart) -> Coverage:
    """Returns the coverage of one node."""
    processes = node.processes
    opens, swapped = sum(map(opens_of, processes)), sum(map(swapped_of, processes))
    return Coverage(
        opens=opens,
        swapped=swapped,
        dropped=total(processes, "dropped"),
        errors=total(processes, "errors"),
        processes_attached=number(processes),
        processes_missed=node.missed_count,
        share=ratio(swapped, opens),
        layers=_by_layer((p.layer, p.processes) for p in processes),
        reasons=_reasons(node),
        missed_examples=tuple(node.missed_processes[:MOST_EXAMPLES]),
    )


def added(nodes: Sequence[Coverage]) -> Coverage:
    """Returns the section: the sum over all nodes that reported; unknown where none did, or where one does not know."""
    sums: dict[str, Any] = dict.fromkeys(COUNTS)
    if nodes:
        sums = {name: add(*(getattr(node, name) for node in nodes)) for name in COUNTS}
    reasons = sum((Counter(node.reasons) for node in nodes), Counter[str]())
    return Coverage(
        **sums,
        share=ratio(sums["swapped"], sums["opens"]),
        layers=_by_layer(pair for node in nodes for pair in node.layers.items()),
        reasons=dict.fromkeys(REASONS, 0) | {name: value for name, value in reasons.items() if value},
        missed_examples=tuple(missed for node in nodes for missed in node.missed_examples)[:MOST_EXAMPLES],
    )


def _by_layer(found: Iterable[tuple[str, int]]) -> dict[str, int]:
    layers = Counter[str]()
    for layer, processes in found:
        layers[layer] += processes
    return dict(sorted(layers.items()))


def _reasons(node: NodePart) -> dict[str, int]:
    """Counts opens at the source by reason; one without a reason counts as `mode_direct`, or as `unstated`."""
    found = dict.fromkeys([*REASONS, "mode_direct", "unstated"], 0)
    for process in node.processes:
        rest = count(process, "source_opens")
        for name, counter in DIRECT_COUNTERS:
            if value := process.counters.get(counter):
                found[name] += value
                rest -= value
        found["mode_direct" if node.mode == "direct" else "unstated"] += max(0, rest)
    return found
