"""What staging saved: estimates, each with its formula and inputs; None with a reason where nothing can be said. Pure.

Both answer "and if the same command had run the other way?" from what this run measured. They assume that the program
computes as fast as it did, and, against `direct`, that no file would have come from the node's page cache.

Of several nodes: opens, readers and bandwidth are those of all nodes, so that time per file is the job's; staging ends
with the last node; what the command waited is what it waited on the node that waited longest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hpcstage.record.digest import Digest
from hpcstage.record.histogram import merge, percentile_ns
from hpcstage.record.part import RunPart
from hpcstage.record.roster import State

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


def savings_of(run: RunPart, nodes: Sequence[Digest], record: dict[str, Any]) -> dict[str, Any]:
    """The savings section, from the sections that are there already."""
    mode = nodes[0].part.mode if nodes else None
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

WITH_WORKERS = "max(compute + preprocessing, opens x time per file) + other - (time before the command + wall)"
WITHOUT = "compute + preprocessing + opens x time per file + other - (time before the command + wall)"


def _vs_direct(nodes: Sequence[Digest], record: dict[str, Any], mode: str | None) -> Estimate:
    split, opens = record["time_split"], record["coverage"]["opens"]
    if mode is None:
        return _cannot("no node reported")
    if mode == "direct":
        return _cannot("this run read directly")
    if not opens:
        return _cannot("no open below the datasets was seen")
    if split["compute_s"] is None or split["wait_source_s"] is None:
        return _cannot("the time split was not measured")
    trainers, readers, prefetch = _readers(nodes)
    pace = _pace(nodes, record, trainers * readers)
    if pace is None:
        return _cannot("how fast the program itself would have read the source is not known")
    inputs = {"training_processes": trainers, "readers": readers, "file_s": pace[0], "file_s_from": pace[1]}
    return _direct_estimate(nodes, record, prefetch, inputs)


def _direct_estimate(
    nodes: Sequence[Digest], record: dict[str, Any], prefetch: bool, inputs: dict[str, Any]
) -> Estimate:
    split, opens = record["time_split"], record["coverage"]["opens"]
    reading_s = opens * inputs["file_s"]
    work_s = split["compute_s"] + (split["preprocess_s"] or 0.0)
    without_s = max(work_s, reading_s) if prefetch else work_s + reading_s
    before_s = _before_s(split, nodes)
    saved_s = without_s + (split["other_s"] or 0.0) - split["wall_s"] - before_s
    seconds = {key: split[key] for key in ("compute_s", "preprocess_s", "other_s", "wall_s")}
    formula = WITH_WORKERS if prefetch else WITHOUT
    return Estimate(saved_s, formula, {**seconds, "before_s": before_s, "opens": opens, **inputs})


def _before_s(split: dict[str, Any], nodes: Sequence[Digest]) -> float:
    """Staging before the command: only upfront makes it wait."""
    return float(split["before_s"] or 0.0) if nodes[0].part.mode == "upfront" else 0.0


def _readers(nodes: Sequence[Digest]) -> tuple[int, int, bool]:
    """Training processes, files that one of them reads at once, and whether it reads ahead."""
    trainers = sum(node.pace.trainers for node in nodes)
    if not trainers:
        return 1, 1, False
    workers = max(node.pace.workers for node in nodes)
    return trainers, max(1, workers), workers > 0


def _pace(nodes: Sequence[Digest], record: dict[str, Any], readers: int) -> tuple[float, str] | None:
    """Seconds per file at the source for all readers together, and where that comes from: the least that is known.

    What the program itself measured there was slowed down by the copiers; what the copiers measured says how fast the
    source can be.
    """
    found = [p for p in (_own_pace(nodes, readers), _copiers_pace(nodes, record, readers)) if p is not None]
    return min(found) if found else None


def _own_pace(nodes: Sequence[Digest], readers: int) -> tuple[float, str] | None:
    opens, reads = sum(node.pace.opens for node in nodes), sum(node.pace.reads for node in nodes)
    if opens < ENOUGH_OPENS or not reads:
        return None
    spent_ns = sum(node.pace.spent_ns for node in nodes)
    return spent_ns / NS / opens / readers, "the program's own opens and reads at the source"


def _copiers_pace(nodes: Sequence[Digest], record: dict[str, Any], readers: int) -> tuple[float, str] | None:
    """A reader opens as fast as half of the copiers' opens were, and gets bytes at their joint bandwidth if alone."""
    files, size = record["totals"]["copied_files"], record["totals"]["copied_bytes"]
    open_ns = percentile_ns(merge(node.part.hist_open for node in nodes), 50)
    typical = record["contention"]["typical_bytes_per_s"]
    if not files or size is None or open_ns is None:
        return None
    bytes_s = size / files / typical if typical else 0.0
    how = "the copiers' median open and typical bandwidth: the least it would have been"
    return max((open_ns / NS + bytes_s) / readers, bytes_s), how


# ---- against upfront ----

UPFRONT = "time that staging took - time that the program waited for the source"
SEVERAL = "time that staging took on all nodes - time that the program waited for the source on the slowest"


def _vs_upfront(run: RunPart, nodes: Sequence[Digest], record: dict[str, Any], mode: str | None) -> Estimate:
    split = record["time_split"]
    formula = SEVERAL if split["slowest"] else UPFRONT
    if mode is None:
        return _cannot("no node reported")
    if mode == "upfront":
        return _cannot("this run staged upfront")
    if mode == "direct":
        return _cannot("this run staged nothing, so what staging takes is not known")
    wait_s = (split["slowest"] or split)["wait_source_s"]
    if wait_s is None:
        return _cannot("waits for the source were not measured", formula)
    staging_s = _staging_s(run, nodes)
    if staging_s is None:
        return _cannot("staging did not end within the run", formula)
    return Estimate(staging_s - wait_s, formula, {"staging_s": staging_s, "wait_source_s": wait_s})


def _staging_s(run: RunPart, nodes: Sequence[Digest]) -> float | None:
    """From the command's start, or the daemon's, to the last file; all nodes stage at once. Dead ones are left out."""
    alive = [node for node in nodes if node.state is State.OK] or nodes
    ends = [node.part.staged_s for node in alive]
    known = [end for end in ends if end is not None]
    if not known or len(known) < len(ends):
        return None
    lead_s = max(0.0, (run.child_started_s or 0.0) - min(node.shift_s for node in alive))
    return max(0.0, max(known) - lead_s)
