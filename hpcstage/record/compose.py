"""Composes the record, the one machine-readable result of a run, from the parts of the wrapper and the nodes. Pure.

This module owns the top level of the record (`schema` says what each key holds). Each section has a module of its
own. The parts are read one after the other, and only the `Digest` of each node stays in memory.

A sum over nodes covers the nodes that reported a figure; `group` and `problems` name those that did not.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any

from hpcstage.record.figures import coverage, totals, virtual
from hpcstage.record.figures.contention import contention_of
from hpcstage.record.figures.digest import Digest, digest_of
from hpcstage.record.figures.order import order_of
from hpcstage.record.figures.savings import savings_of
from hpcstage.record.figures.series import Together, series_of
from hpcstage.record.figures.timesplit import time_split
from hpcstage.record.nodes.group import group_of
from hpcstage.record.nodes.sidebyside import rows_of
from hpcstage.record.notes.notes import notes_of
from hpcstage.record.notes.problems import ended, problems_of
from hpcstage.record.parts.alive import Life
from hpcstage.record.parts.part import DatasetPart, NodePart, RunPart
from hpcstage.record.parts.roster import State, expected, is_left_over, names_of, without_part
from hpcstage.record.schema import VERSION, Record


@dataclass
class _Looked:
    """The digests of all parts, and what several of them add up to."""

    nodes: list[Digest] = field(default_factory=list)
    speaking: list[Digest] = field(default_factory=list)
    """The nodes that reported any figure, or all nodes if none did."""
    alone: NodePart | None = None
    """The whole part of the reporting node where only one reported."""
    together: Together = field(default_factory=Together)


def compose(run: RunPart, nodes: Iterable[NodePart], running: Life | None = None) -> Record:
    """Returns the record. A missing value is null in it, and `problems` names it.

    `running` says why the command is taken to be still running, where hpcstage saw no end of it.
    """
    looked = _look(run, nodes, running=running is not None)
    found, parts = looked.speaking, [node.part for node in looked.nodes]
    silent, total = without_part(run, parts), expected(run, parts)
    record: dict[str, Any] = {
        "schema_version": VERSION,
        "generator": f"hpcstage {run.version}".strip(),
        "complete": ended(run) and not silent and all(node.state is State.OK for node in looked.nodes),
        "problems": [p.to_json() for p in problems_of(run, looked.nodes, silent, total, running)],
        "run": _run(run, found, running),
        "environment": _environment(run),
        "config": list(run.config),
        "datasets": _datasets(found),
        "nodes": [],
        "group": None,
        "totals": totals.summed([(node.part, node.totals) for node in found]),
        "time_split": time_split(run, found),
        "coverage": coverage.added([node.coverage for node in found]),
        "contention": contention_of(found, looked.alone),
        "order": order_of(found),
    }
    if running and not ended(run):
        record["time_split"]["unmeasured"] = [
            "the command has not ended, as far as is known: the times are those up to now"
        ]
    record["nodes"] = rows_of(run, looked.nodes, silent if total > 1 else [], record)
    record["group"] = group_of(looked.nodes, silent, total, record)
    record["savings"] = savings_of(run, found, record)
    record["forecast"] = next((node.part.forecast for node in found if node.part.forecast is not None), None)
    record["series"] = _series(looked)
    record["notes"] = notes_of(record)
    return Record.from_json(record)


def _look(run: RunPart, nodes: Iterable[NodePart], *, running: bool) -> _Looked:
    looked = _Looked()
    for node in nodes:
        if is_left_over(run, node):
            continue
        digest = digest_of(run, node, running=running)
        looked.nodes.append(digest)
        if digest.speaks:
            looked.alone = node if not looked.speaking else None
            looked.speaking.append(digest)
            looked.together.add(node, digest.shift_s)
    looked.nodes = _without_doubles(looked.nodes)
    looked.nodes.sort(key=lambda node: node.index)
    looked.speaking = [node for node in looked.nodes if node.speaks] or looked.nodes
    virtual.settle([(node.part, node.pids, node.coverage) for node in looked.speaking])
    for digest, name in zip(looked.nodes, names_of([node.part for node in looked.nodes]), strict=True):
        digest.name = name
    return looked


def _without_doubles(nodes: Sequence[Digest]) -> list[Digest]:
    """Drops the part that says that a node never came up, where the node came up after all and has its own part."""
    here = {(node.part.host, node.index) for node in nodes if node.state is not State.MISSING}
    return [node for node in nodes if node.state is not State.MISSING or (node.part.host, node.index) not in here]


def _series(looked: _Looked) -> dict[str, Any]:
    if looked.alone is None and looked.speaking:
        return looked.together.section()
    return series_of(looked.alone, looked.speaking[0].shift_s if looked.speaking else 0.0)


def _run(run: RunPart, nodes: Sequence[Digest], running: Life | None) -> dict[str, Any]:
    mode_why = nodes[0].part.mode_why if nodes else None
    return {
        "id": run.run_id,
        "command": list(run.command),
        "cwd": run.cwd,
        "run_dir": run.run_dir,
        "host": run.host,
        "mode": nodes[0].part.mode if nodes else None,
        "mode_asked": run.mode_asked,
        "mode_why": run.direct_why or mode_why,
        "state": _state(run, running),
        "started_utc": datetime.fromtimestamp(run.started_unix_s, timezone.utc).isoformat(timespec="seconds"),
        "started_unix_s": run.started_unix_s,
        "child_started_s": run.child_started_s,
        "child_ended_s": run.child_ended_s,
        "ended_s": run.ended_s,
        "exit_code": run.exit_code,
        "signal": run.signal,
        "child_cpu_s": run.child_cpu_s,
    }


def _state(run: RunPart, running: Life | None) -> str:
    """Says how far the run got, as far as hpcstage saw it."""
    if run.aside:
        return "aside"
    if ended(run):
        return "ended" if run.child_started_s is not None else "not started"
    if running is None:
        return "lost"
    return "running" if running.is_certain else "unclear"


def _environment(run: RunPart) -> dict[str, Any]:
    return {
        "version": run.version,
        "python": run.python,
        "kernel": run.kernel,
        "scheduler": run.scheduler,
        "job_id": run.job_id,
        "nodes": run.nodes or [run.host],
        "local_dir": run.local_dir,
        "local_dir_why": run.local_dir_why,
    }


def _datasets(nodes: Sequence[Digest]) -> list[dict[str, Any]]:
    """Merges the datasets by root: adds what the nodes staged; what they scanned is the same on all nodes."""
    merged: dict[str, dict[str, Any]] = {}
    for dataset in (dataset for node in nodes for dataset in node.part.datasets):
        found = merged.setdefault(dataset.root, _dataset(dataset))
        found["files"] = _larger(found["files"], dataset.files)
        found["size_bytes"] = _larger(found["size_bytes"], dataset.size_bytes)
        found["staged_files"] += dataset.staged_files
        found["staged_bytes"] += dataset.staged_bytes
    return list(merged.values())


def _dataset(dataset: DatasetPart) -> dict[str, Any]:
    names = {"name": dataset.name, "root": dataset.root, "arguments": list(dataset.arguments)}
    return {**names, "files": None, "size_bytes": None, "staged_files": 0, "staged_bytes": 0}


def _larger(one: int | None, other: int | None) -> int | None:
    known = [value for value in (one, other) if value is not None]
    return max(known) if known else None
