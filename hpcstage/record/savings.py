"""What staging saved: estimates, each with its formula and inputs; None with a reason where nothing can be said. Pure.

Both answer "and if the same command had run the other way?" from what this run measured. They assume that the program
computes as fast as it did, and, against `direct`, that no file would have come from the node's page cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hpcstage.record import tally
from hpcstage.record.histogram import merge, percentile_ns
from hpcstage.record.part import NodePart, ProcessPart, RunPart
from hpcstage.record.window import shift_of

NS = 1e9
ENOUGH_OPENS = 20
"""So many opens at the source tell how fast the program itself reads there."""


@dataclass(frozen=True)
class Estimate:
    """Seconds saved (negative: lost), how that follows, from what."""

    saved_s: float | None
    formula: str
    inputs: dict[str, Any]
    reason: str | None = None
    """Why nothing can be said."""

    def to_json(self) -> dict[str, Any]:
        """For the record."""
        return {"saved_s": self.saved_s, "formula": self.formula, "inputs": self.inputs, "reason": self.reason}


def savings_of(run: RunPart, nodes: Sequence[NodePart], record: dict[str, Any]) -> dict[str, Any]:
    """The savings section, from the sections that are there already."""
    mode = nodes[0].mode if nodes else None
    direct = _vs_direct(nodes, record, mode)
    upfront = _vs_upfront(run, nodes, record, mode)
    return {
        "vs_direct_s": direct.saved_s,
        "vs_upfront_s": upfront.saved_s,
        "estimate": True,
        "method": f"against direct: {_method(direct)}; against upfront: {_method(upfront)}",
        "vs_direct": direct.to_json(),
        "vs_upfront": upfront.to_json(),
    }


def _method(estimate: Estimate) -> str:
    return estimate.reason or estimate.formula


def _cannot(reason: str, formula: str = "") -> Estimate:
    return Estimate(None, formula, {}, reason)


# ---- against direct ----

WITH_WORKERS = "max(compute + preprocessing, opens x time per file / readers) + other - wall - time before the command"
WITHOUT = "compute + preprocessing + opens x time per file / readers + other - wall - time before the command"


def _vs_direct(nodes: Sequence[NodePart], record: dict[str, Any], mode: str | None) -> Estimate:
    split, opens = record["time_split"], record["coverage"]["opens"]
    if mode is None:
        return _cannot("no node reported")
    if mode == "direct":
        return _cannot("this run read directly")
    if not opens:
        return _cannot("no open below the datasets was seen")
    if split["compute_s"] is None or split["wait_source_s"] is None:
        return _cannot("the time split was not measured")
    file_s, how = _time_per_file(nodes, record)
    if file_s is None:
        return _cannot(how)
    return _direct_estimate(nodes, record, file_s, how)


def _direct_estimate(nodes: Sequence[NodePart], record: dict[str, Any], file_s: float, how: str) -> Estimate:
    split, opens = record["time_split"], record["coverage"]["opens"]
    trainers, readers, prefetch = _readers(tally.processes_of(nodes))
    reading_s = opens / trainers * file_s / readers
    work_s = split["compute_s"] + (split["preprocess_s"] or 0.0)
    without_s = max(work_s, reading_s) if prefetch else work_s + reading_s
    now_s = split["wall_s"] + _before_s(split, nodes)
    inputs = {
        "compute_s": split["compute_s"], "preprocess_s": split["preprocess_s"], "other_s": split["other_s"],
        "wall_s": split["wall_s"], "before_s": _before_s(split, nodes), "opens": opens, "file_s": file_s,
        "file_s_from": how, "readers": readers, "training_processes": trainers,
    }  # fmt: skip
    saved_s = without_s + (split["other_s"] or 0.0) - now_s
    return Estimate(saved_s, WITH_WORKERS if prefetch else WITHOUT, inputs)


def _before_s(split: dict[str, Any], nodes: Sequence[NodePart]) -> float:
    """Staging before the command: only upfront makes it wait."""
    return float(split["before_s"] or 0.0) if nodes[0].mode == "upfront" else 0.0


def _readers(processes: Sequence[ProcessPart]) -> tuple[int, int, bool]:
    """Training processes, files that one of them reads at once, and whether it reads ahead."""
    trainers = [p for p in processes if tally.count(p, "loader_steps")]
    if not trainers:
        return 1, 1, False
    workers = max(tally.count(p, "loader_workers") for p in trainers)
    return len(trainers), max(1, workers), workers > 0


def _time_per_file(nodes: Sequence[NodePart], record: dict[str, Any]) -> tuple[float | None, str]:
    """Seconds in which one reader gets one file from the source, and where that comes from."""
    own = _own_time(tally.processes_of(nodes))
    if own is not None:
        return own, "the program's own opens and reads at the source"
    return _copiers_time(nodes, record)


def _own_time(processes: Sequence[ProcessPart]) -> float | None:
    measured = [p for p in processes if tally.reads_known(p)]
    opens, reads = tally.total(measured, "source_opens"), tally.total(measured, "source_reads")
    if opens < ENOUGH_OPENS or not reads:
        return None
    return (tally.total(measured, "source_open_ns") + tally.total(measured, "source_read_ns")) / opens / NS


def _copiers_time(nodes: Sequence[NodePart], record: dict[str, Any]) -> tuple[float | None, str]:
    """From the copiers: half of their opens and reads took no longer than p50. Many in flight make each slower where
    bandwidth is the limit, so the bytes are taken at the bandwidth of all of them together: never too slow."""
    files, size = record["totals"]["copied_files"], record["totals"]["copied_bytes"]
    opens = percentile_ns(merge(node.hist_open for node in nodes), 50)
    best = record["contention"]["typical_bytes_per_s"]
    if not files or size is None or opens is None:
        return None, "how fast the program itself would have read the source is not known"
    file_s = opens / NS + (size / files / best if best else 0.0)
    return file_s, "median open of the copiers, bytes at the copiers' joint bandwidth: the least it would have been"


# ---- against upfront ----

UPFRONT = "time that staging took - time that the program waited for the source"


def _vs_upfront(run: RunPart, nodes: Sequence[NodePart], record: dict[str, Any], mode: str | None) -> Estimate:
    split = record["time_split"]
    if mode is None:
        return _cannot("no node reported")
    if mode == "upfront":
        return _cannot("this run staged upfront")
    if mode == "direct":
        return _cannot("this run staged nothing, so what staging takes is not known")
    if split["wait_source_s"] is None:
        return _cannot("waits for the source were not measured", UPFRONT)
    staging_s = _staging_s(nodes)
    if staging_s is None:
        return _cannot("staging did not end within the run", UPFRONT)
    return _upfront_estimate(staging_s, run, nodes, split)


def _staging_s(nodes: Sequence[NodePart]) -> float | None:
    """From the daemon's start to the last file; all nodes stage at once."""
    ends = [node.staged_s for node in nodes]
    known = [end for end in ends if end is not None]
    return max(known) if known and len(known) == len(ends) else None


def _upfront_estimate(staging_s: float, run: RunPart, nodes: Sequence[NodePart], split: dict[str, Any]) -> Estimate:
    lead_s = max(0.0, (run.child_started_s or 0.0) - min(shift_of(run, node) for node in nodes))
    staging_s = max(0.0, staging_s - lead_s)
    inputs = {"staging_s": staging_s, "wait_source_s": split["wait_source_s"]}
    return Estimate(staging_s - split["wait_source_s"], UPFRONT, inputs)
