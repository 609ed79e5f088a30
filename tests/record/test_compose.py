"""The record as a whole: its schema, what it says of missing parts, that unknown stays null."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
from conftest import problems
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from recordcases import composed, node_part, run_part, trainer, worker

from hpcstage.problem import Problem
from hpcstage.protocol.shim import Counter, Reason
from hpcstage.record.figures.counts import TOTALS as KEYS
from hpcstage.record.parts.checkpoints import CheckpointsPart, StandstillPart
from hpcstage.record.parts.part import NodePart
from hpcstage.record.parts.rows import ProcessPart, Sample
from hpcstage.record.parts.run import RunPart
from hpcstage.record.schema import Record, json_schema

SCHEMA = json_schema()
VALIDATOR = jsonschema.Draft202012Validator(SCHEMA)
KEPT = {
    "totals": "source_bytes copied_bytes direct_bytes peer_bytes local_bytes wanted",
    "coverage": "opens swapped layers processes_missed",
    "time_split": "wall_s compute_s wait_source_s wait_local_s hidden_s other_s",
    "contention": "best_bytes_per_s typical_bytes_per_s periods latency_ms",
    "order": "provenance lead",
}


def valid(run: RunPart, nodes: list[NodePart]) -> dict[str, Any]:
    record = composed(run, nodes)
    VALIDATOR.validate(json.loads(json.dumps(record, allow_nan=False)))
    return record


def test_the_schema_is_a_schema_and_demands_the_kept_keys() -> None:
    VALIDATOR.check_schema(SCHEMA)
    top = "schema_version complete run config datasets nodes totals time_split coverage contention"
    assert set(f"{top} order series notes".split()) <= set(SCHEMA["required"])
    for section, keys in KEPT.items():
        assert set(keys.split()) <= set(SCHEMA["properties"][section]["required"])


@pytest.mark.parametrize("mode", ["runtime", "upfront", "direct"])
def test_a_whole_run(mode: str) -> None:
    record = valid(run_part(), [node_part(mode=mode)])
    assert record["complete"]
    assert problems(record) == []
    assert record["totals"]["source_bytes"] == 980_000_000 + 2 * 20_000_000
    assert record["totals"]["local_bytes"] == 2 * 980_000_000
    assert record["totals"]["peer_bytes"] is None
    assert record["coverage"]["opens"] == 20_000
    assert record["coverage"]["swapped"] == 19_600
    assert record["coverage"]["reasons"]["scanning"] == 300
    assert sum(record["coverage"]["reasons"].values()) == 400


def test_schema_refuses_a_zero_for_nothing_and_a_lost_key() -> None:
    record = composed(run_part(), [node_part()])
    for broken in ({**record, "totals": {}}, {k: v for k, v in record.items() if k != "notes"}):
        assert not VALIDATOR.is_valid(broken)
    assert not VALIDATOR.is_valid({**record, "time_split": {**record["time_split"], "compute_s": -1.0}})


def test_without_any_node_everything_is_unknown() -> None:
    record = valid(run_part(), [])
    assert not record["complete"]
    assert "no-part" in {p["id"] for p in record["notes"]}
    assert set(record["totals"]) == set(KEYS)
    assert set(record["totals"].values()) == {None}
    assert record["coverage"]["opens"] is None
    assert Record.from_json(record).coverage.share is None
    assert record["time_split"]["wall_s"] == pytest.approx(60.0)
    assert record["time_split"]["compute_s"] is None
    assert record["time_split"]["other_s"] == pytest.approx(60.0)


def test_a_killed_run_ends_with_its_last_sample() -> None:
    run = run_part(exit_code=None, child_ended_s=None, ended_s=None)
    record = valid(run, [node_part(complete=False, ended_s=None)])
    assert not record["complete"]
    assert {"killed", "daemon-died"} <= {p["id"] for p in record["notes"]}
    assert record["time_split"]["wall_s"] == pytest.approx(0.1 + 60.0 - 0.2)
    assert "not seen" in record["time_split"]["unmeasured"][0]


def test_a_missing_node_is_named() -> None:
    record = valid(run_part(nodes=["node17", "node18"]), [node_part()])
    assert not record["complete"]
    assert "node18" in problems(record)[0]["text"]


def test_a_layer_that_measures_no_reads_makes_bytes_unknown_not_zero() -> None:
    python = ProcessPart(7, 1, "python", {"source_opens": 10, "hit_opens": 20})
    record = valid(run_part(), [node_part(processes=[python])])
    assert record["totals"]["source_bytes"] is None
    assert record["totals"]["local_bytes"] is None
    assert (record["coverage"]["opens"], record["coverage"]["swapped"]) == (30, 20)
    assert record["totals"]["copied_bytes"] == 980_000_000
    assert record["time_split"]["compute_s"] is None
    assert record["time_split"]["unmeasured"]


def test_a_process_whose_shim_is_off_counts_as_not_counted() -> None:
    off = ProcessPart(7, 1, "direct", {})
    record = valid(run_part(), [node_part(processes=[off])])
    assert record["coverage"]["layers"] == {"direct": 1}
    assert record["totals"]["source_bytes"] is None
    assert "shim-off" in {note["id"] for note in record["notes"]}


def test_processes_that_found_no_slot_are_told_from_those_whose_shim_is_off() -> None:
    rest = ProcessPart(0, 0, "uncounted", {}, processes=12)
    record = valid(run_part(), [node_part(processes=[rest])])
    assert record["coverage"]["layers"] == {"uncounted": 12}
    assert record["totals"]["local_bytes"] is None
    (note,) = [note for note in record["notes"] if note["id"] in ("shim-off", "uncounted")]
    assert note["id"] == "uncounted"
    assert note["text"].startswith("12 processes found no slot to count in")


def test_in_mode_direct_the_daemon_copied_and_scanned_nothing() -> None:
    record = valid(run_part(), [node_part(mode="direct", totals={}, samples=[])])
    assert record["totals"]["source_bytes"] == 2 * 20_000_000
    ended_early = valid(run_part(), [node_part(totals={}, samples=[])])
    assert ended_early["totals"]["copied_bytes"] == 0
    killed = valid(run_part(), [node_part(totals={}, complete=False, samples=[])])
    assert killed["totals"]["copied_bytes"] is None


def test_what_others_told_is_not_told_again() -> None:
    problem = Problem("daemon-died", "the daemon died", "look")
    record = valid(run_part(problems=[problem]), [node_part(complete=False)])
    assert problems(record) == [{**vars(problem), "severity": "error"}]
    assert [note["severity"] for note in record["notes"] if note["id"] == "daemon-died"] == ["error"]


def test_mode_direct_counts_opens_without_a_reason() -> None:
    bare = worker(101, direct_scanning=0, direct_later=0, hit_opens=0, ready_opens=0)
    record = valid(run_part(), [node_part(mode="direct", processes=[trainer(), bare])])
    assert record["coverage"]["reasons"]["mode_direct"] == 200
    assert Record.from_json(record).coverage.share == 0.0


def test_paths_that_are_no_text_survive_the_round_trip() -> None:
    name = "/data/\udcff\n\x1b[31m"
    record = valid(run_part(command=["python", name]), [node_part(errors=[{"path": name, "error": "EIO", "count": 2}])])
    assert json.loads(json.dumps(record)) == record


def test_training_stands_still_as_long_as_on_the_node_where_that_is_longest() -> None:
    """Nodes save side by side; of a program that saves by itself nothing is known, which is not zero."""
    part = CheckpointsPart(protection="none")
    known = [StandstillPart(saves=3, seconds=0.5), StandstillPart(saves=2, seconds=1.5), None]
    nodes = [node_part(host=f"n{at}", node_index=at, node_count=3, standstill=one) for at, one in enumerate(known)]
    record = valid(run_part(checkpoints=part, nodes=["n0", "n1", "n2"]), nodes)
    assert record["checkpoints"]["standstill"] == {"saves": 2, "seconds": 1.5}
    record = valid(run_part(checkpoints=part), [node_part()])
    assert record["checkpoints"]["standstill"] is None


COUNTERS = [c.name.lower() for c in Counter if c is not Counter.DIRECT_BASE]
COUNTERS += [f"direct_{reason.name.lower()}" for reason in Reason]
values = st.integers(0, 2**63)
processes = st.builds(
    ProcessPart,
    pid=st.integers(1, 6),
    parent_pid=st.integers(1, 6),
    layer=st.sampled_from(["native", "python", "direct"]),
    counters=st.dictionaries(st.sampled_from(COUNTERS), values, max_size=12),
    hist_open=st.dictionaries(st.integers(0, 95), st.integers(0, 1000), max_size=3),
)
big = st.integers(0, 10**15)
arbitrary_samples = st.builds(
    Sample,
    start_s=st.floats(0, 1000),
    length_s=st.floats(0.01, 5),
    copied_bytes=big,
    copied_files=st.integers(0, 10**6),
    copy_open_ns=big,
    copy_read_ns=big,
    busy=st.floats(0, 64),
    limited=st.booleans(),
    shim_opens=big,
    shim_open_ns=big,
    shim_bytes=big,
    shim_read_ns=big,
)


@settings(deadline=None, max_examples=80, suppress_health_check=[HealthCheck.too_slow])
@given(
    found=st.lists(processes, max_size=5),
    seen=st.lists(arbitrary_samples, max_size=12),
    ended=st.one_of(st.none(), st.floats(0, 1e6)),
    mode=st.sampled_from(["runtime", "upfront", "direct"]),
)
def test_any_counters_give_a_valid_record_that_adds_up(
    found: list[ProcessPart], seen: list[Sample], ended: float | None, mode: str
) -> None:
    run = run_part(child_ended_s=ended, exit_code=None if ended is None else 0)
    record = valid(run, [node_part(processes=found, samples=seen, mode=mode)])
    split = record["time_split"]
    parts = [split[k] for k in ("compute_s", "wait_source_s", "wait_local_s", "preprocess_s", "other_s")]
    assert sum(p for p in parts if p is not None) == pytest.approx(split["wall_s"], abs=1e-6, rel=1e-9)
    assert all(p is None or p >= 0 for p in parts)
    assert seen or split["hidden_s"] is None
    assert split["hidden_s"] is None or 0 <= split["hidden_s"] <= split["wall_s"] + 1e-9
    assert split["hidden_s"] is not None or not seen or split["wait_source_s"] is None
    if record["coverage"]["opens"]:
        assert record["coverage"]["swapped"] <= record["coverage"]["opens"]
