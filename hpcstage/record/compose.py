"""From the parts of the wrapper and the nodes to the record, the one machine-readable result of a run. Pure.

Owns the top level of the record (`schema.json` says what each key holds). Each section has a module of its own.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from datetime import datetime, timezone
from typing import Any

from hpcstage.record import tally
from hpcstage.record.contention import contention_of
from hpcstage.record.coverage import coverage_of
from hpcstage.record.notes import notes_of
from hpcstage.record.order import order_of
from hpcstage.record.part import DatasetPart, NodePart, ProcessPart, RunPart
from hpcstage.record.savings import savings_of
from hpcstage.record.series import series_of
from hpcstage.record.timesplit import time_split
from hpcstage.record.totals import totals_of
from hpcstage.record.window import shift_of

SCHEMA_VERSION = "1.0"
PROCESSES = 64
"""So many processes are listed per node, those with most opens first."""


def compose(run: RunPart, nodes: Sequence[NodePart]) -> dict[str, Any]:
    """The record. Whatever is missing is null in it, and named in `problems`."""
    record: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "generator": f"hpcstage {run.version}".strip(),
        "complete": _complete(run, nodes),
        "problems": _problems(run, nodes),
        "run": _run(run, nodes),
        "environment": _environment(run),
        "config": list(run.config),
        "datasets": _datasets(nodes),
        "nodes": [_node(run, node) for node in nodes],
        "totals": totals_of(nodes),
        "time_split": time_split(run, nodes),
        "coverage": coverage_of(nodes),
        "contention": contention_of(run, nodes),
        "order": order_of(run, nodes),
    }
    record["savings"] = savings_of(run, nodes, record)
    record["forecast"] = nodes[0].forecast if nodes else None
    record["series"] = series_of(run, nodes)
    record["notes"] = notes_of(record)
    return record


def _missing_hosts(run: RunPart, nodes: Sequence[NodePart]) -> list[str]:
    seen = {node.host for node in nodes}
    expected = run.nodes or [run.host]
    if len(seen) >= len(set(expected)):
        return []
    return [host for host in expected if host not in seen]


def _ended(run: RunPart) -> bool:
    return run.exit_code is not None or run.signal is not None


def _complete(run: RunPart, nodes: Sequence[NodePart]) -> bool:
    return _ended(run) and not _missing_hosts(run, nodes) and all(node.complete for node in nodes)


def _problems(run: RunPart, nodes: Sequence[NodePart]) -> list[dict[str, str]]:
    told = [*run.problems, *(problem for node in nodes for problem in node.problems)]
    names = {problem.get("id") for problem in told}
    return _unique([*told, *(problem for problem in _own_problems(run, nodes) if problem["id"] not in names)])


def _own_problems(run: RunPart, nodes: Sequence[NodePart]) -> list[dict[str, str]]:
    found = []
    if not _ended(run):
        found.append(_problem("killed", "the wrapper did not see the end of the command", KILLED))
    missing = _missing_hosts(run, nodes)
    if missing:
        found.append(_problem("no-part", f"no report from {_few(missing)}", NO_PART))
    cut = [node.host for node in nodes if not node.complete]
    if cut:
        found.append(_problem("daemon-died", f"the daemon on {_few(cut)} did not end in order", DIED))
    return found


KILLED = "the numbers end with the last thing noted; look for a wall time or memory limit of the job"
NO_PART = "its daemon did not start or could not write to the run directory: see daemon.log in the node directory"
DIED = "training went on from the source; the numbers of that node end where it did; see daemon.log"


def _problem(name: str, text: str, remedy: str) -> dict[str, str]:
    return {"id": name, "text": text, "remedy": remedy}


def _few(names: Sequence[str]) -> str:
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"


def _unique(problems: Iterable[dict[str, str]]) -> list[dict[str, str]]:
    kept: dict[tuple[str, str], dict[str, str]] = {}
    for problem in problems:
        whole = _problem(problem.get("id", "unknown"), problem.get("text", ""), problem.get("remedy", ""))
        kept.setdefault((whole["id"], whole["text"]), whole)
    return list(kept.values())


def _run(run: RunPart, nodes: Sequence[NodePart]) -> dict[str, Any]:
    return {
        "id": run.run_id,
        "command": list(run.command),
        "cwd": run.cwd,
        "run_dir": run.run_dir,
        "host": run.host,
        "mode": nodes[0].mode if nodes else None,
        "mode_asked": run.mode_asked,
        "mode_why": nodes[0].mode_why if nodes else None,
        "started_utc": datetime.fromtimestamp(run.started_unix_s, timezone.utc).isoformat(timespec="seconds"),
        "started_unix_s": run.started_unix_s,
        "child_started_s": run.child_started_s,
        "child_ended_s": run.child_ended_s,
        "ended_s": run.ended_s,
        "exit_code": run.exit_code,
        "signal": run.signal,
        "child_cpu_s": run.child_cpu_s,
    }


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


def _datasets(nodes: Sequence[NodePart]) -> list[dict[str, Any]]:
    """By root; what several nodes staged is added, what they scanned is the same."""
    merged: dict[str, dict[str, Any]] = {}
    for dataset in (dataset for node in nodes for dataset in node.datasets):
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


def _node(run: RunPart, node: NodePart) -> dict[str, Any]:
    ended_s = None if node.ended_s is None else node.ended_s + shift_of(run, node)
    return {
        "host": node.host,
        "complete": node.complete,
        "started_s": shift_of(run, node),
        "ended_s": ended_s,
        "scan_s": node.scan_s,
        "staged_s": None if node.staged_s is None else node.staged_s + shift_of(run, node),
        "totals": dict(node.totals),
        "budget": dict(node.budget),
        "pressure": dict(node.pressure),
        "errors": [_error(error) for error in node.errors],
        "processes": _processes(node),
    }


def _error(error: dict[str, Any]) -> dict[str, Any]:
    path = error.get("path")
    return {**error, "path": os.fsdecode(path) if isinstance(path, bytes) else path}


def _processes(node: NodePart) -> list[dict[str, Any]]:
    ordered = sorted(node.processes, key=tally.opens_of, reverse=True)
    return [_process(process) for process in ordered[:PROCESSES]]


def _process(process: ProcessPart) -> dict[str, Any]:
    return {
        "pid": process.pid,
        "parent_pid": process.parent_pid,
        "layer": process.layer,
        "python": process.python,
        "opens": tally.opens_of(process),
        "swapped": tally.swapped_of(process),
        "loader_steps": tally.count(process, "loader_steps"),
        "loader_wait_s": tally.count(process, "loader_wait_ns") / 1e9,
        "loader_epochs": tally.count(process, "loader_epochs"),
        "loader_workers": tally.count(process, "loader_workers"),
    }
