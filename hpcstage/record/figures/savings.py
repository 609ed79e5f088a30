"""Estimates what staging saved, with formula and inputs; None with a reason where no estimate is possible. Pure.

Both estimates say from what this run measured how long the same command would have taken in another mode. They assume
that the program computes as fast as it did. The kernel tells whether files that are read again would have come from
the node's page cache (`daemon.copying.alone`); where that is unknown and matters, there is no estimate.

With several nodes, the readers and the rate of the source are those of all nodes; the command takes as long as on the
node where it takes longest; staging ends with the last node.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from hpcstage.record.figures.digest import Digest
from hpcstage.record.figures.direct import FORMULA, CannotTell, direct_of
from hpcstage.record.figures.sourceload import load_of
from hpcstage.record.parts.part import RunPart
from hpcstage.record.parts.roster import State


@dataclass(frozen=True)
class Estimate:
    """Seconds saved (negative: lost), the formula from which they follow, and its inputs."""

    saved_s: float | None
    formula: str
    inputs: dict[str, Any]
    reason: str | None = None
    """Why there is no estimate."""

    def to_json(self) -> dict[str, Any]:
        """Returns the estimate as plain data for the record."""
        return {"saved_s": self.saved_s, "formula": self.formula, "inputs": self.inputs, "reason": self.reason}


def savings_of(run: RunPart, nodes: Sequence[Digest], record: dict[str, Any]) -> dict[str, Any]:
    """Returns the section `savings`, from the sections that the record has already."""
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


def _vs_direct(nodes: Sequence[Digest], record: dict[str, Any], mode: str | None) -> Estimate:
    """Estimates the savings against mode direct; `direct` describes the model."""
    split, datasets = record["time_split"], record["datasets"]
    if mode is None:
        return _cannot("no node reported")
    if mode == "direct":
        return _cannot("this run read directly")
    if not record["coverage"]["opens"]:
        return _cannot("no open below the datasets was seen")
    if split["wall_s"] is None:
        return _cannot("when the command ended is not known")
    if record["coverage"]["processes_missed"]:
        return _cannot("Python processes that never attached may have read the data, too")
    files, size_bytes = (_sum(dataset[name] for dataset in datasets) for name in ("files", "size_bytes"))
    load = load_of([node.seen for node in nodes], size_bytes)
    try:
        programs, copied = [node.program for node in nodes], record["totals"]["copied_bytes"]
        found = direct_of(split["wall_s"], programs, load, files, size_bytes, copied)
    except CannotTell as why:
        return _cannot(str(why))
    before_s = _before_s(split, nodes)
    saved_s = found.seconds.middle - split["wall_s"] - before_s
    return Estimate(saved_s, FORMULA, {**found.inputs, "before_s": before_s})


def _sum(values: Iterable[int | None]) -> int | None:
    known = list(values)
    return None if None in known else sum(value or 0 for value in known)


def _before_s(split: dict[str, Any], nodes: Sequence[Digest]) -> float:
    """Returns the seconds of staging before the command, which waits for it only in mode upfront."""
    return float(split["before_s"] or 0.0) if nodes[0].part.mode == "upfront" else 0.0


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
    """Returns the time from the command's start, or the daemons' if that is later, to the last staged file.

    All nodes stage at once. Nodes that died are left out.
    """
    alive = [node for node in nodes if node.state is State.OK] or nodes
    ends = [node.part.staged_s for node in alive]
    known = [end for end in ends if end is not None]
    if not known or len(known) < len(ends):
        return None
    lead_s = max(0.0, (run.child_started_s or 0.0) - min(node.shift_s for node in alive))
    return max(0.0, max(known) - lead_s)
