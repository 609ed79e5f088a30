"""Parts of jobs with many nodes: a source that all share, and what befalls single nodes."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from typing import Any

import jsonschema
from recordcases import SECOND, START, composed, histogram, node_part, run_part, trainer, worker

from hpcstage.problem import Problem
from hpcstage.record.parts.part import DatasetPart, NodePart
from hpcstage.record.parts.rows import Sample
from hpcstage.record.parts.run import RunPart
from hpcstage.record.schema import json_schema

FILES = 10_000
SIZE = 10**9
OPENS = histogram(2e6, 1_000, 5)
READS = histogram(9e6, 1_000, 6)
Load = Callable[[float], float]


def steady(_now_s: float) -> float:
    return 1.0


def samples(index: int, seconds: int, count: int, source: Load = steady, own: Load = steady) -> list[Sample]:
    """What a node sees of a source whose bandwidth is shared evenly: `source` and `own` say how much is left of it."""
    rng = random.Random(index)
    each = 400e6 / count
    found = []
    for second in range(seconds):
        rate = each * source(second) * own(second) * max(0.2, rng.gauss(1, 0.1))
        files = int(rate / 1e5) + 1
        found.append(Sample(float(second), 1.0, int(rate), files, 2 * SECOND, 12 * SECOND, SECOND, 16.0))
    return found


def node(index: int, count: int, seconds: int = 60, **changes: Any) -> NodePart:
    """One of `count` nodes of a healthy job with placement replicate; each fetches its share from the source."""
    load = {name: changes.pop(name) for name in ("source", "own") if name in changes}
    share = FILES // count + (index < FILES % count)
    counted = {
        "copied_bytes": share * (SIZE // FILES), "copied_files": share, "want_ready": 10, "copy_busy_s": 39.0,
        "peer_bytes": SIZE - share * (SIZE // FILES), "peer_files": FILES - share,
    }  # fmt: skip
    reading = {"source_opens": 0, "direct_scanning": 0, "direct_later": 0, "source_read_bytes": 0, "source_reads": 0}
    values: dict[str, Any] = {
        "host": f"node{index:04d}",
        "started_unix_s": START + 0.1 + 0.01 * index,
        "datasets": [DatasetPart("/lustre/train", FILES, SIZE, FILES, SIZE)],
        "totals": counted,
        "hist_open": OPENS,
        "hist_read": READS,
        "samples": samples(index, seconds, count, **load),
        "processes": [trainer(), worker(101, **reading), worker(102, **reading)],
        "node_index": index,
        "node_count": count,
        "placement": "replicate",
        "placement_why": "all files fit on every node",
        "group": {"generations": 1, "why": "no exchange has connected"},
    }
    return node_part(**(values | changes))


def missing(index: int, count: int, why: str = "ssh: connection refused") -> NodePart:
    """As the lead writes it of a node whose daemon did not come up."""
    host = f"node{index:04d}"
    problem = Problem("node-missing", f"nothing is staged on {host}: {why}", "give --launcher")
    return NodePart(
        host, "direct", START + 0.1,
        problems=[problem], node_index=index, node_count=count,
    )  # fmt: skip


def run(count: int, **changes: Any) -> RunPart:
    hosts = [f"node{index:04d}" for index in range(count)]
    return run_part(**({"host": "node0000", "nodes": hosts} | changes))


def job(count: int, seconds: int = 60, **changes: Any) -> Iterator[NodePart]:
    """All of them, one after the other."""
    return (node(index, count, seconds, **changes) for index in range(count))


SCHEMA = json_schema()
VALIDATOR = jsonschema.Draft202012Validator(SCHEMA)


def record_of(run_part: RunPart, nodes: list[NodePart] | Iterator[NodePart]) -> dict[str, Any]:
    record = composed(run_part, nodes)
    some = record["nodes"][:: max(1, len(record["nodes"]) // 8)]
    VALIDATOR.validate(json.loads(json.dumps(record | {"nodes": some}, allow_nan=False)))
    return record


def row(record: dict[str, Any], host: str) -> dict[str, Any]:
    (found,) = [node for node in record["nodes"] if node["host"] == host]
    return found


def ids(record: dict[str, Any]) -> list[str]:
    return [note["id"] for note in record["notes"]]
