"""Measures how long the processes of one node waited and computed. Pure.

A process waits while a thread of it is inside a call on a dataset's file (an open, a request, a read, a stat, a
listing) and none of its threads runs. Waits of several threads at the same moment are one wait, and a wait of one
thread beside the computing of another is none.

* Where at most one thread was inside such calls at a time, the time inside them is the wait. It is measured exactly.
* Where several threads were, the daemon's looks at the threads tell in which share of that time no other thread ran
  (`daemon.process.looks`). The time itself is measured exactly, including that before the first look.
* Where files were mapped into memory (a page fault is no call), the share of looks at which all threads rested and one
  was in a page fault, times the life of the process, is added. With too few looks the wait counts as not measured.

A process computes while it lives and does not wait. The times of several reading processes of a node are added and
divided by the mean number of them that lived at a time, over the time in which any did.

Of a training process with PyTorch's loader, the loader's own waits count, and compute is the time from the first to the
last batch, less these. A batch is read by W processes (the loader's workers; the training process itself if it has
none). If they waited for S seconds at the source and L seconds locally, reading explains min(w, (S + L) / W) of w
seconds, in the proportion S : L; they must have spent the rest on decoding and collating. Reading comes first, so
`preprocess_s` is the least that preprocessing can have taken.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass

from hpcstage.record.figures.counts import maps, opens_of, reads_known
from hpcstage.record.parts.part import NodePart
from hpcstage.record.parts.rows import ProcessPart
from hpcstage.record.parts.run import RunPart
from hpcstage.record.schema import Split
from hpcstage.units import NS_PER_S

ENOUGH_SHARE = 0.5
"""At least this share of the processes must have measured their waits to stand for all."""
READER_SHARE = 0.5
"""The main process counts as the reader if it did at least this share of all opens."""
LOOKED_SHARE = 0.5
"""The daemon's looks at a process are used if they cover at least this share of its life and LEAST_LOOKED_NS."""
LEAST_LOOKED_NS = 500_000_000
NO_READS = "this layer does not measure reads"
MAPPED = "mapped files: too few looks at the threads tell what they waited for"
THREADS = "threads read at once: too few looks at them tell what they waited for"
Pair = tuple[float, float]
"""Seconds at the source and on staged copies."""


UNMEASURED = Split(None, None, None, None)


@dataclass(frozen=True)
class NodeTimes:
    """The times of one node's processes."""

    attached: bool
    splits: Sequence[Split] = ()
    """One for each training process, else one of all processes that read."""
    epochs: int | None = None
    """Of the loader, the most of any training process; None: there is none."""
    workers: int | None = None
    said: Sequence[str] = ()
    """Sentences that say what was not measured."""


def times_of(run: RunPart, node: NodePart, wall_s: float) -> NodeTimes:
    """Measures the training processes where there are any, else the processes that read. `wall_s` is how long the
    command ran, as far as the node knows."""
    said: list[str] = []
    trainers = [p for p in node.processes if p.counters.get("loader_steps")]
    if trainers:
        shares = _shares(node, trainers, said)
        epochs, workers = (
            max(p.counters.get(name, 0) for p in trainers) for name in ("loader_epochs", "loader_workers")
        )
        return NodeTimes(True, [_of_loader(p, wall_s, shares) for p in trainers], epochs, workers, said)
    readers = _readers(run, node, said)
    splits = [_of_readers(run, node, readers, wall_s, said)] if readers else []
    return NodeTimes(bool(node.processes), splits, said=said)


def mean(splits: Sequence[Split]) -> Split:
    """Returns the mean of splits; a part that is unknown in one of them is unknown."""
    return Split(*(_mean_of(column) for column in zip(*map(astuple, splits), strict=True))) if splits else UNMEASURED


def _mean_of(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if len(known) == len(values) else None


def fit(split: Split, wall_s: float) -> Split:
    """Scales the parts down where they exceed the wall time, as several clocks or several reading threads may do."""
    taken = split.measured_s
    factor = min(1.0, wall_s / taken) if taken > 0 else 1.0
    return Split(*(None if value is None else max(0.0, value * factor) for value in astuple(split)))


# ---- one process


def _waited(process: ProcessPart, life_s: float) -> Pair | None:
    """Returns how long a process waited; None: not measured."""
    counts = process.counters
    if not reads_known(process):
        return None
    calls = {"source": counts.get("blocked_source_ns", 0), "local": 0}
    calls["local"] = max(0, counts.get("blocked_ns", 0) - calls["source"])
    several, looked_ns = counts.get("readers", 0) > 1, counts.get("looked_ns", 0)
    if not several and not maps(counts):
        return calls["source"] / NS_PER_S, calls["local"] / NS_PER_S
    if looked_ns < max(LEAST_LOOKED_NS, LOOKED_SHARE * life_s * NS_PER_S):
        return None
    whole = max(1.0, life_s * NS_PER_S / looked_ns)

    def waited_s(where: str) -> float:
        inside_ns = counts.get(f"look_inside_{where}_ns", 0)
        resting = counts.get(f"look_wait_{where}_ns", 0) / inside_ns if several and inside_ns else 1.0
        return (calls[where] * resting + counts.get(f"look_fault_{where}_ns", 0) * whole) / NS_PER_S

    return waited_s("source"), waited_s("local")


def _life(process: ProcessPart) -> Pair:
    """Returns for how many seconds a process lived, to its end, or else to its last call on a dataset's file; 0:
    unknown. Of several that ended, first all lives together, then the time in which any lived."""
    counts = process.counters
    begin_ns, end_ns = counts.get("attach_ns", 0), counts.get("exit_ns") or counts.get("last_ns", 0)
    span_s = (end_ns - begin_ns) / NS_PER_S if end_ns > begin_ns > 0 else 0.0
    lived_s = counts.get("life_ns", 0) / NS_PER_S if process.processes > 1 else span_s
    return lived_s, min(lived_s, span_s)


# ---- training processes


def _of_loader(process: ProcessPart, wall_s: float, shares: Sequence[float | None]) -> Split:
    counts = process.counters
    span_ns = max(0, counts.get("loader_last_ns", 0) - counts.get("loader_first_ns", 0))
    span_s = min(span_ns / NS_PER_S, wall_s)
    wait_s = min(counts.get("loader_wait_ns", 0) / NS_PER_S, span_s)
    return Split(span_s - wait_s, *(None if share is None else wait_s * share for share in shares))


def _shares(node: NodePart, trainers: Sequence[ProcessPart], said: list[str]) -> Sequence[float | None]:
    """Returns the shares of the loaders' waits for the source, for staged copies and for preprocessing. None: not
    measured."""
    waited_s = sum(p.counters.get("loader_wait_ns", 0) for p in trainers) / NS_PER_S
    reading = [p for p in _with_descendants(trainers, node) if opens_of(p.counters)]
    waits = [_waited(p, _life(p)[0]) for p in reading]
    known = [pair for pair in waits if pair is not None]
    if not waited_s:
        return 0.0, 0.0, 0.0
    if not known or len(known) < len(waits):
        why = (
            "the waits of the processes that read for it are not known"
            if reading
            else "none that reads for it was seen"
        )
        said.append(f"the loader's waits are not divided: {why}")
        return None, None, None
    source_s, local_s = (sum(column) for column in zip(*known, strict=True))
    workers = sum(max(1, p.counters.get("loader_workers", 0)) for p in trainers) / len(trainers)
    explained = min(waited_s, (source_s + local_s) / workers) / waited_s
    source = explained * source_s / (source_s + local_s) if explained else 0.0
    return source, explained - source, 1 - explained


def _with_descendants(trainers: Sequence[ProcessPart], node: NodePart) -> list[ProcessPart]:
    """Returns the processes and all that descend from them."""
    pids, found = {p.pid for p in trainers}, list(trainers)
    rest = [p for p in node.processes if not p.counters.get("loader_steps")]
    while born := [p for p in rest if p.parent_pid in pids]:
        rest = [p for p in rest if p.parent_pid not in pids]
        found += born
        pids = {p.pid for p in born if p.pid}
    return found


# ---- processes that read by themselves


def _readers(run: RunPart, node: NodePart, said: list[str]) -> list[ProcessPart]:
    """Returns the processes whose waits are the program's: its main one, or all that read if that reads little."""
    reading = sorted((p for p in node.processes if _reads(p)), key=lambda p: opens_of(p.counters), reverse=True)
    if not reading:
        return []
    main = next((p for p in reading if _is_main(run, node, p)), reading[0])
    if opens_of(main.counters) >= READER_SHARE * sum(opens_of(p.counters) for p in reading):
        return [main]
    number = sum(p.processes for p in reading)
    said.append(f"{number} processes read; what others waited for them is not measured")
    return reading


def _is_main(run: RunPart, node: NodePart, process: ProcessPart) -> bool:
    return node.host == run.host and process.pid == run.child_pid


def _reads(process: ProcessPart) -> bool:
    """Returns whether it opened files, or listed or looked at them at the source."""
    counts = process.counters
    return bool(opens_of(counts) or counts.get("source_stats") or counts.get("listings"))


def _of_readers(run: RunPart, node: NodePart, readers: Sequence[ProcessPart], wall_s: float, said: list[str]) -> Split:
    """Returns the split of the measured readers, if they are enough to stand for all."""
    spans, known = [], []
    for process in readers:
        lived_s, life_s = _life(process)
        waits, share = _waited(process, lived_s), life_s / lived_s if lived_s else 1.0
        if not life_s or (_is_main(run, node, process) and not process.counters.get("exit_ns")):
            life_s = wall_s  # it lived as long as the command, as far as was seen
        life_s, begin_s = min(life_s, wall_s), process.counters.get("attach_ns", 0) / NS_PER_S
        spans.append((begin_s, begin_s + life_s, life_s))
        if waits is not None:
            source_s = min(waits[0] * share, life_s)
            local_s = min(waits[1] * share, life_s - source_s)
            known.append((life_s - source_s - local_s, source_s, local_s))
        elif sentence := _why_not(process):
            said.append(sentence)
    if not known or len(known) < ENOUGH_SHARE * len(readers):
        return UNMEASURED
    at_once = _at_once(spans) * len(known) / len(readers)
    compute_s, source_s, local_s = (sum(column) / at_once for column in zip(*known, strict=True))
    return Split(compute_s, source_s, local_s, None)


def _why_not(process: ProcessPart) -> str:
    if not reads_known(process):
        return NO_READS
    return MAPPED if maps(process.counters) else THREADS


def _at_once(spans: Iterable[tuple[float, float, float]]) -> float:
    """Returns the mean number of processes at a time, over the time in which there was any. A span is when processes
    began and ended, and how long they lasted in sum."""
    end_s = covered_s = lasted_s = 0.0
    for first_s, last_s, length_s in sorted(spans):
        covered_s += max(0.0, last_s - max(first_s, end_s))
        end_s = max(end_s, last_s)
        lasted_s += length_s
    return max(1.0, lasted_s / covered_s) if covered_s else 1.0
