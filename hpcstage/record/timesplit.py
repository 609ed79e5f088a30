"""The time split: what the command's wall time went into. Pure.

Kept true for any counters: compute + wait for the source + wait for local + preprocessing + other = wall, and none is
negative.
A part that was not measured is None, and its time is contained in `other_s`. `hidden_s` overlaps the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hpcstage.record import tally
from hpcstage.record.part import NodePart, ProcessPart, RunPart, Sample
from hpcstage.record.waits import Shares, blocked_ns, shares_of
from hpcstage.record.window import Window, shift_of, window_of

NS = 1e9
READER_SHARE = 0.5
"""The main process counts as the reader if it did at least this share of all opens."""

LOADER = (
    "PyTorch's loader timed each step's wait in {n}; a wait counts as source or local as far as the time that the "
    "processes reading for it spent inside opens, wants and reads of these files explains it (divided by their "
    "number), the rest of it as preprocessing; compute = from the first to the last batch, less the waits"
)
OPENS = "no PyTorch loader: time inside opens, wants and reads of the datasets' files in {n}; compute = the rest of it"
NOTHING = "not measured: the whole wall time is `other_s`"


@dataclass(frozen=True)
class Split:
    """Seconds of one process; they add up to its wall. None: not measured."""

    compute_s: float | None = None
    wait_source_s: float | None = None
    wait_local_s: float | None = None
    preprocess_s: float | None = None


def time_split(run: RunPart, nodes: Sequence[NodePart]) -> dict[str, Any]:
    """The time_split section."""
    window = window_of(run, nodes)
    unmeasured = [] if window.end_seen or not nodes else ["the end of the command was not seen: up to the last sample"]
    wall_s = window.wall_s
    if wall_s is None:
        return _section(None, Split(), None, NOTHING, ["when the command ended is not known"])
    split, method = _measure(run, nodes, wall_s, unmeasured)
    split = _fit(split, wall_s)
    hidden_s = _hidden_s(run, nodes, window, split)
    section = _section(wall_s, split, hidden_s, method, unmeasured)
    section["before_s"] = run.child_started_s
    return section


def _section(
    wall_s: float | None, split: Split, hidden_s: float | None, method: str, unmeasured: list[str]
) -> dict[str, Any]:
    known = [split.compute_s, split.wait_source_s, split.wait_local_s, split.preprocess_s]
    taken = sum(value for value in known if value is not None)
    return {
        "wall_s": wall_s,
        "compute_s": split.compute_s,
        "wait_source_s": split.wait_source_s,
        "wait_local_s": split.wait_local_s,
        "preprocess_s": split.preprocess_s,
        "other_s": None if wall_s is None else max(0.0, wall_s - taken),
        "hidden_s": hidden_s,
        "before_s": None,
        "method": method,
        "unmeasured": unmeasured,
    }


def _fit(split: Split, wall_s: float) -> Split:
    """Scaled down where the parts exceed the wall (clocks of several processes, or several threads that read)."""
    values = [split.compute_s, split.wait_source_s, split.wait_local_s, split.preprocess_s]
    taken = sum(value for value in values if value is not None)
    factor = min(1.0, wall_s / taken) if taken > 0 else 1.0
    return Split(*(None if value is None else max(0.0, value * factor) for value in values))


def _measure(run: RunPart, nodes: Sequence[NodePart], wall_s: float, unmeasured: list[str]) -> tuple[Split, str]:
    processes = tally.processes_of(nodes)
    trainers = [p for p in processes if tally.count(p, "loader_steps") > 0]
    if trainers:
        shares = shares_of(nodes, trainers, unmeasured)
        splits = [_of_trainer(p, wall_s, shares) for p in trainers]
        return _mean(splits), LOADER.format(n=_several(len(trainers), "training process"))
    readers = _readers(run, processes, unmeasured)
    if not readers:
        unmeasured.append(_why_nothing(nodes, processes))
        return Split(), NOTHING
    if not all(tally.reads_known(p) for p in readers):
        unmeasured.append("this layer does not measure reads: compute and waits cannot be told apart")
        return Split(), NOTHING
    _check_reads(readers, unmeasured)
    return _mean([_of_reader(p, wall_s, unmeasured) for p in readers]), OPENS.format(
        n=_several(len(readers), "process")
    )


def _why_nothing(nodes: Sequence[NodePart], processes: Sequence[ProcessPart]) -> str:
    if not nodes:
        return "no node reported"
    if not processes:
        return "no process of the command attached"
    return "no attached process opened a file of the datasets"


def _several(number: int, what: str) -> str:
    if number == 1:
        return f"one {what}"
    return f"{number} {what}es (mean)"


def _of_trainer(process: ProcessPart, wall_s: float, shares: Shares) -> Split:
    span_s = max(0, tally.count(process, "loader_last_ns") - tally.count(process, "loader_first_ns")) / NS
    span_s = min(span_s, wall_s)
    wait_s = min(tally.count(process, "loader_wait_ns") / NS, span_s)
    parts = [None if share is None else wait_s * share for share in (shares.source, shares.local, shares.preprocess)]
    return Split(span_s - wait_s, *parts)


def _of_reader(process: ProcessPart, wall_s: float, unmeasured: list[str]) -> Split:
    born_ns, died_ns = tally.count(process, "attach_ns"), tally.count(process, "exit_ns")
    life_s = min((died_ns - born_ns) / NS, wall_s) if died_ns > born_ns > 0 else wall_s
    source_ns, local_ns = blocked_ns(process)
    blocked_s = (source_ns + local_ns) / NS
    if blocked_s > life_s:
        _say(unmeasured, "several threads read at once: their summed waits exceed the wall time and were scaled down")
    factor = min(1.0, life_s / blocked_s) if blocked_s > 0 else 1.0
    source_s, local_s = source_ns / NS * factor, local_ns / NS * factor
    return Split(max(0.0, life_s - source_s - local_s), source_s, local_s, None)


def _readers(run: RunPart, processes: Sequence[ProcessPart], unmeasured: list[str]) -> list[ProcessPart]:
    """The process whose waits are the program's: its main one, or all that read where that reads little itself."""
    reading = sorted((p for p in processes if tally.opens_of(p)), key=tally.opens_of, reverse=True)
    if not reading:
        return []
    opens = sum(tally.opens_of(p) for p in reading)
    main = next((p for p in reading if p.pid == run.child_pid), reading[0])
    if tally.opens_of(main) >= READER_SHARE * opens:
        return [main]
    unmeasured.append(f"{len(reading)} processes read; what others waited for them is not measured")
    return reading


def _check_reads(readers: Sequence[ProcessPart], unmeasured: list[str]) -> None:
    if not tally.total(readers, "source_reads") + tally.total(readers, "local_reads"):
        _say(unmeasured, "files were opened but no read was seen (mmap?): waits inside such reads count as compute")


def _say(unmeasured: list[str], sentence: str) -> None:
    if sentence not in unmeasured:
        unmeasured.append(sentence)


def _mean(splits: Sequence[Split]) -> Split:
    return Split(
        _mean_of([s.compute_s for s in splits]),
        _mean_of([s.wait_source_s for s in splits]),
        _mean_of([s.wait_local_s for s in splits]),
        _mean_of([s.preprocess_s for s in splits]),
    )


def _mean_of(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if len(known) == len(values) and known else None


def _hidden_s(run: RunPart, nodes: Sequence[NodePart], window: Window, split: Split) -> float | None:
    """Time with copies in flight while the command ran and did not wait for the source; several nodes are averaged."""
    copying = [_copying_s(node, window, shift_of(run, node)) for node in nodes if node.samples]
    if not copying:
        return None
    waited_s = split.wait_source_s or 0.0
    return max(0.0, min(sum(copying) / len(copying), window.wall_s or 0.0) - waited_s)


def _copying_s(node: NodePart, window: Window, shift_s: float) -> float:
    """Within the command's life. A sample says how many were in flight on average, not when: the node's own sum of
    times with any in flight, and the moment of the last file, correct what short bursts would add."""
    inside_s = total_s = 0.0
    for sample in node.samples:
        length_s = _until(sample, node.staged_s)
        share = min(1.0, sample.busy)
        total_s += length_s * share
        inside_s += window.overlap_s(shift_s + sample.start_s, length_s) * share
    busy_s = node.totals.get("copy_busy_s")
    return inside_s if busy_s is None or total_s <= busy_s else inside_s * max(0.0, busy_s) / total_s


def _until(sample: Sample, end_s: float | None) -> float:
    return sample.length_s if end_s is None else max(0.0, min(sample.length_s, end_s - sample.start_s))
