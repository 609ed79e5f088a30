"""Parts of runs as literals, for the tests of the record and of the report."""

from __future__ import annotations

import functools
import random
from collections.abc import Iterable
from typing import Any

from sourcesim import Source, samples_of

from hpcstage import jsonform
from hpcstage.protocol.shim import bucket_of_ns
from hpcstage.record.compose import compose
from hpcstage.record.parts.alive import Life
from hpcstage.record.parts.part import (
    DatasetPart,
    ErrorPart,
    GroupPart,
    MissedProcess,
    NodePart,
    NodeTotals,
    OrderPart,
)
from hpcstage.record.parts.rows import ProcessPart, Sample
from hpcstage.record.parts.run import RunPart

SECOND = 1_000_000_000
START = 1_800_000_000.0


def run_part(**changes: Any) -> RunPart:
    values: dict[str, Any] = {
        "run_id": "20261121-031422-1f3a",
        "command": ["python", "train.py", "--data", "/lustre/imagenet/train", "--epochs", "2"],
        "host": "node17",
        "started_unix_s": START,
        "child_started_s": 0.2,
        "child_ended_s": 60.2,
        "ended_s": 60.5,
        "exit_code": 0,
        "scheduler": "slurm",
        "job_id": "4711",
        "local_dir": "/local/4711",
        "child_pid": 100,
    }
    return RunPart(**(values | changes))


@functools.cache
def histogram(mean_ns: float, number: int, seed: int = 1) -> dict[int, int]:
    rng = random.Random(seed)
    result: dict[int, int] = {}
    for _ in range(number):
        bucket = bucket_of_ns(int(rng.lognormvariate(0, 0.4) * mean_ns))
        result[bucket] = result.get(bucket, 0) + 1
    return result


def blocked(source_s: float, local_s: float = 0.0) -> dict[str, int]:
    """The time in which any thread was inside a call on a file."""
    return {"blocked_ns": int((source_s + local_s) * SECOND), "blocked_source_ns": int(source_s * SECOND), "readers": 1}


def trainer(pid: int = 100, **changes: int) -> ProcessPart:
    counters = {
        "attach_ns": 5 * SECOND,
        "exit_ns": 65 * SECOND,
        "loader_steps": 400,
        "loader_wait_ns": 12 * SECOND,
        "loader_first_ns": 8 * SECOND,
        "loader_last_ns": 64 * SECOND,
        "loader_workers": 2,
        "loader_epochs": 2,
        "reads_measured": 1,
    }
    return ProcessPart(pid, 1, "native", counters | changes)


def worker(pid: int, parent_pid: int = 100, **changes: int) -> ProcessPart:
    counters = {
        "attach_ns": 8 * SECOND,
        "exit_ns": 64 * SECOND,
        "hit_opens": 9_500,
        "ready_opens": 300,
        "source_opens": 200,
        "direct_scanning": 150,
        "direct_later": 50,
        "wants": 350,
        **blocked(9, 1.25),
        "source_open_ns": 1 * SECOND,
        "source_read_ns": 2 * SECOND,
        "source_reads": 400,
        "source_read_bytes": 20_000_000,
        "local_reads": 19_600,
        "local_read_bytes": 980_000_000,
        "local_read_ns": 1 * SECOND,
        "hit_stats": 100,
        "source_stats": 20,
        "reads_measured": 1,
    }
    hists = {"hist_open": histogram(2e6, 200), "hist_read": histogram(8e6, 400)}
    return ProcessPart(pid, parent_pid, "native", counters | changes, **hists)


@functools.cache
def samples(loaded: bool = True) -> list[Sample]:
    def competitors(now_s: float) -> int:
        return 24 if loaded and 12 <= now_s < 25 else 0

    found = samples_of(Source(bytes_per_s=40e6), lambda _: 1e5, 40, competitors, noise=0.1, seed=4)
    return found + [Sample(40.0 + second, 1.0) for second in range(20)]


def announced(**changes: Any) -> dict[str, Any]:
    """The order section of a node whose program's samplers announced what they read."""
    values: dict[str, Any] = {
        "provenance": "sampler",
        "announcements": 2,
        "lead": {"median_files": 412, "least_files": 0, "median_s": 3.1},
    }
    return values | changes


def node_part(**changes: Any) -> NodePart:
    values: dict[str, Any] = {
        "host": "node17",
        "mode": "runtime",
        "started_unix_s": START + 0.1,
        "ended_s": 60.3,
        "complete": True,
        "datasets": [DatasetPart("/lustre/imagenet/train", 10_000, 10**9, 10_000, 10**9)],
        "staged_s": 40.0,
        "totals": {
            "copied_bytes": 980_000_000,
            "copied_files": 9_800,
            "want_ready": 300,
            "copy_busy_s": 39.0,
        },
        "hist_open": histogram(2e6, 9_800, 2),
        "hist_read": histogram(9e6, 9_800, 3),
        "budget_bytes": 64 * 10**9,
        "used_bytes": 10**9,
        "order": {"provenance": "given"},
        "samples": samples(),
        "processes": [trainer(), worker(101), worker(102)],
    }
    return NodePart(**typed(values | changes))


FORMS: dict[str, type[Any]] = {
    "totals": NodeTotals, "order": OrderPart, "group": GroupPart,
    "errors": ErrorPart, "missed_processes": MissedProcess,
}  # fmt: skip


def typed(values: dict[str, Any]) -> dict[str, Any]:
    """The values, which may be given as they stand in JSON."""

    def one(name: str, value: Any) -> Any:
        if isinstance(value, list):
            return [one(name, member) for member in value]
        return jsonform.read(FORMS[name], value) if isinstance(value, dict) else value

    return {name: one(name, value) if name in FORMS else value for name, value in values.items()}


def composed(run: RunPart, nodes: Iterable[NodePart], running: Life | None = None) -> dict[str, Any]:
    """The record as it is written, so that the tests hold its keys."""
    return compose(run, nodes, running).to_json()
