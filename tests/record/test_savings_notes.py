"""Savings and notes: what they say, what they refuse to say, worst first."""

from __future__ import annotations

from typing import Any

import pytest
from recordcases import SECOND, node_part, run_part, trainer, worker

from hpcstage.record.compose import compose
from hpcstage.record.part import DatasetPart, NodePart, ProcessPart


def record_of(node: NodePart | None, **run: Any) -> dict[str, Any]:
    return compose(run_part(**run), [node] if node else [])


def ids(record: dict[str, Any]) -> list[str]:
    return [note["id"] for note in record["notes"]]


def test_against_upfront_is_what_staging_hid() -> None:
    record = record_of(node_part())
    savings = record["savings"]
    assert savings["estimate"] is True
    assert savings["vs_upfront_s"] == pytest.approx(39.9 - record["time_split"]["wait_source_s"])
    assert savings["vs_upfront"]["inputs"]["staging_s"] == pytest.approx(39.9)


def test_against_direct_follows_its_formula() -> None:
    record = record_of(node_part())
    inputs = record["savings"]["vs_direct"]["inputs"]
    reading = inputs["opens"] * inputs["file_s"]
    work = inputs["compute_s"] + inputs["preprocess_s"]
    expected = max(work, reading) + inputs["other_s"] - inputs["before_s"] - inputs["wall_s"]
    assert record["savings"]["vs_direct_s"] == pytest.approx(expected)
    assert inputs["readers"] == 2


def test_without_prefetch_reading_adds_to_computing() -> None:
    alone = trainer()
    alone.counters.update({**worker(1).counters, "loader_workers": 0, "source_open_ns": 2 * SECOND})
    record = record_of(node_part(processes=[alone], totals={}))
    inputs = record["savings"]["vs_direct"]["inputs"]
    reading = inputs["opens"] * inputs["file_s"]
    work = inputs["compute_s"] + inputs["preprocess_s"]
    assert record["savings"]["vs_direct_s"] == pytest.approx(work + reading + inputs["other_s"] - inputs["wall_s"])


@pytest.mark.parametrize(
    ("node", "which", "why"),
    [
        (None, "vs_direct", "no node"),
        (None, "vs_upfront", "no node"),
        (node_part(mode="direct"), "vs_direct", "read directly"),
        (node_part(mode="direct"), "vs_upfront", "staged nothing"),
        (node_part(mode="upfront"), "vs_upfront", "upfront"),
        (node_part(staged_s=None), "vs_upfront", "did not end"),
        (node_part(processes=[]), "vs_direct", "no open"),
        (node_part(processes=[]), "vs_upfront", "not measured"),
        (node_part(totals={}, processes=[trainer(), worker(101, source_opens=3)]), "vs_direct", "how fast"),
    ],
)
def test_what_cannot_be_said_has_a_reason(node: NodePart | None, which: str, why: str) -> None:
    savings = record_of(node)["savings"]
    assert savings[f"{which}_s"] is None
    assert why in savings[which]["reason"]
    assert why in savings["method"]


def test_upfront_counts_the_staging_before_the_command() -> None:
    record = record_of(node_part(mode="upfront"), child_started_s=30.0, child_ended_s=90.0)
    assert record["savings"]["vs_direct"]["inputs"]["before_s"] == 30.0


def test_a_quiet_good_run_has_no_warnings() -> None:
    done = worker(101, source_opens=0, direct_scanning=0, direct_later=0, wants=0, want_ns=0)
    record = record_of(node_part(processes=[trainer(), done]))
    assert [n for n in record["notes"] if n["severity"] != "info"] == []


def test_worst_first() -> None:
    node = node_part(complete=False, missed_count=2, missed_processes=[{"pid": 9, "command": "python -I x.py"}])
    record = record_of(node)
    order = [note["severity"] for note in record["notes"]]
    assert order == sorted(order, key=["error", "warning", "info"].index)
    assert ids(record)[0] == "daemon-died"
    assert "processes-missed" in ids(record)
    assert all(note["remedy"] for note in record["notes"])


def python_reader(**counters: int) -> ProcessPart:
    return ProcessPart(5, 1, "python", "3.11", 0.0, {"hit_opens": 100} | counters)


@pytest.mark.parametrize(
    ("changes", "note"),
    [
        ({"processes": []}, "nothing-attached"),
        ({"processes": [ProcessPart(5, 1, "native", "3.11", 0.0, {})]}, "nothing-opened"),
        ({"processes": [python_reader()]}, "python-layer"),
        ({"processes": [python_reader(source_opens=50, direct_full=50)]}, "direct-full"),
        ({"processes": [python_reader(source_opens=50, direct_no_daemon=50)]}, "direct-no-daemon"),
        ({"processes": [python_reader(wants=60)]}, "order"),
        ({"processes": [python_reader(errors=3)]}, "shim-errors"),
        ({"processes": [python_reader(dropped=3)]}, "dropped"),
        ({"budget": {"size_bytes": 10**8}}, "store-full"),
        ({"errors": [{"path": "/d/x", "error": "ESTALE", "count": 4}]}, "copy-failed"),
        (
            {"datasets": [DatasetPart("0", "/d", [])], "problems": [{"id": "local", "text": "t", "remedy": "r"}]},
            "local",
        ),
        ({}, "contention"),
    ],
)
def test_each_rule(changes: dict[str, Any], note: str) -> None:
    assert note in ids(record_of(node_part(**changes)))


def test_memory_as_local_disk() -> None:
    assert "local-is-memory" in ids(record_of(node_part(), local_dir_why="/dev/shm is tmpfs"))


def test_direct_mode_that_waits_is_told_to_stage() -> None:
    slow = worker(101, source_read_ns=100 * SECOND, hit_opens=0, ready_opens=0)
    node = node_part(mode="direct", processes=[trainer(loader_wait_ns=30 * SECOND), slow], samples=[])
    record = record_of(node, mode_asked="direct")
    (note,) = [n for n in record["notes"] if n["id"] == "waits-for-source"]
    assert "--mode runtime" in note["remedy"]
    assert "gained-nothing" not in ids(record)


@pytest.mark.parametrize(
    ("run", "said"),
    [
        ({"mode_asked": "auto"}, "the forecast preferred this"),
        ({"mode_asked": "runtime", "direct_why": "/d is already on the node-local disk"}, "on the local disk already"),
    ],
)
def test_who_chose_to_read_directly_decides_the_advice(run: dict[str, Any], said: str) -> None:
    slow = worker(101, source_read_ns=100 * SECOND, hit_opens=0, ready_opens=0)
    node = node_part(mode="direct", processes=[trainer(loader_wait_ns=30 * SECOND), slow], samples=[])
    record = record_of(node, **run)
    (note,) = [n for n in record["notes"] if n["id"] == "waits-for-source"]
    assert said in note["remedy"]
    assert "run it with" not in note["remedy"]
    assert record["run"]["mode_asked"] == run["mode_asked"]


def test_staging_that_gained_nothing_is_said() -> None:
    fast = node_part(hist_open={10: 1000}, samples=[])
    fast.processes = [trainer(loader_wait_ns=SECOND), worker(101, source_opens=0)]
    record = record_of(fast)
    assert record["savings"]["vs_direct_s"] < 1
    assert "gained-nothing" in ids(record)
