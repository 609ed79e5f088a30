"""Savings and notes: what they say, what they refuse to say, worst first."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from recordcases import SECOND, composed, looped, node_part, run_part, trainer, worker

from hpcstage.problem import Problem
from hpcstage.record.parts.part import DatasetPart, NodePart, NodeTotals
from hpcstage.record.parts.rows import ProcessPart, Sample


def record_of(node: NodePart | None, **run: Any) -> dict[str, Any]:
    return composed(run_part(**run), [node] if node else [])


def ids(record: dict[str, Any]) -> list[str]:
    return [note["id"] for note in record["notes"]]


def test_against_upfront_is_what_staging_hid() -> None:
    record = record_of(node_part())
    savings = record["savings"]
    assert savings["estimate"] is True
    assert savings["vs_upfront_s"] == pytest.approx(39.9 - record["time_split"]["wait_source_s"])
    assert savings["vs_upfront"]["inputs"]["staging_s"] == pytest.approx(39.9)


def test_a_node_whose_programs_read_nothing_changes_nothing() -> None:
    idle = looped(node_index=1, host="node18", processes=[ProcessPart(100, 1, "native", "3.11", {})])
    found = composed(run_part(), [looped(), idle])["savings"]["vs_direct"]
    assert found["saved_s"] is not None or found["reason"]


def direct_s(node: NodePart, **run: Any) -> float | None:
    """The estimate of the whole time without staging."""
    record = record_of(node, **run)
    saved = record["savings"]["vs_direct_s"]
    return None if saved is None else saved + record["time_split"]["wall_s"]


def test_a_loop_takes_what_a_file_takes_alone_in_place_of_what_it_waited() -> None:
    assert direct_s(looped(), child_ended_s=16.2) == pytest.approx(16 - 4 + 1000 * 0.0225, rel=0.01)


def test_the_copiers_own_queue_is_not_taken_for_the_time_of_a_file() -> None:
    """A source that answers 150 requests a second: 32 copiers wait 430 ms for each open, the program would wait 13."""
    queued = [
        Sample(s / 4, 0.25, copied_files=19, copy_open_ns=8 * SECOND, busy=32.0, copied_bytes=1_900_000)
        for s in range(53)
    ]
    node = looped(samples=queued, alone={"files": 8, "open_ns": 8 * SECOND // 75, "read_ns": 0, "kept_share": 0.0})
    assert direct_s(node, child_ended_s=16.2) == pytest.approx(16 - 4 + 1000 / 75, rel=0.03)


def test_files_that_stay_in_memory_are_read_from_the_source_once() -> None:
    three = looped()
    three.processes[0].counters |= {"hit_opens": 3_000, "local_read_bytes": 3 * 10**8}
    dropped = direct_s(three, child_ended_s=16.2)
    assert dropped == pytest.approx(12 + 3000 * 0.0225, rel=0.01)
    three = replace(three, alone=replace(three.alone, kept_share=1.0), memory_bytes=10**10)
    kept = direct_s(three, child_ended_s=16.2)
    assert kept == pytest.approx(12 + 1000 * 0.0225 + 2000 * 0.0025, rel=0.05)
    record = record_of(replace(three, alone=replace(three.alone, kept_share=0.5)), child_ended_s=16.2)
    assert record["savings"]["vs_direct_s"] is None
    assert "memory" in record["savings"]["vs_direct"]["reason"]


@pytest.mark.parametrize(
    ("counters", "why"),
    [
        ({"source_maps": 1, "looked_ns": 14 * SECOND}, "memory maps"),
        ({"readers": 8}, "threads waited"),
        ({"readers": 8, "looked_ns": 14 * SECOND, "look_wait_source_ns": 4 * SECOND}, "threads read while it computes"),
        ({"local_read_bytes": 10**7}, "once and whole"),
    ],
)
def test_where_the_inputs_do_not_suffice_nothing_is_said(counters: dict[str, int], why: str) -> None:
    node = looped()
    node.processes[0].counters |= counters
    savings = record_of(node, child_ended_s=16.2)["savings"]
    assert savings["vs_direct_s"] is None
    assert why in savings["vs_direct"]["reason"]


def test_what_was_read_at_the_source_all_the_same_took_no_longer_without_copying() -> None:
    unserved = {"hit_opens": 0, "source_opens": 1_000, "local_read_bytes": 0, "source_read_bytes": 10**8}
    node = looped(alone={}, totals={"source_bytes": 0, "source_files": 0})
    node.processes[0].counters |= unserved
    assert direct_s(node, child_ended_s=16.2) == pytest.approx(16.0)
    node = replace(node, totals=NodeTotals(source_bytes=10**8, source_files=0))  # beside it: half of what it gave
    assert direct_s(node, child_ended_s=16.2) == pytest.approx(15.0)
    node = replace(node, totals=NodeTotals(source_bytes=10**10, source_files=0))
    assert "how much copying slowed" in record_of(node, child_ended_s=16.2)["savings"]["vs_direct"]["reason"]


def test_an_open_file_that_went_on_with_its_copy_was_served_by_it() -> None:
    node = nothing_served(moved_opens=1, moved_read_bytes=8 * 10**7)
    savings = record_of(node, child_ended_s=16.2)["savings"]
    assert savings["vs_direct_s"] is None
    assert "went on with their copies" in savings["vs_direct"]["reason"]


def test_what_had_arrived_of_a_file_was_served() -> None:
    """It is no copy that was opened, nor an open file that went on with one."""
    savings = record_of(nothing_served(arrived_read_bytes=8 * 10**7), child_ended_s=16.2)["savings"]
    assert savings["vs_direct_s"] is None
    assert "while they arrived" in savings["vs_direct"]["reason"]


def nothing_served(**counters: int) -> NodePart:
    """The loop whose opens all went to the source, where it waited 4 s; as many bytes were copied beside it."""
    node = looped(alone={}, totals={"source_bytes": 10**8, "source_files": 0})
    opens = {"hit_opens": 0, "source_opens": 1_000, "local_read_bytes": 0, "source_read_bytes": 10**8}
    node.processes[0].counters |= opens | counters
    return node


def test_a_wait_for_an_answer_is_no_read_that_copying_slowed_down() -> None:
    """Of 4 s of waiting 1 s was for answers: 3 s of reads, which took at most twice as long as alone."""
    inputs = record_of(nothing_served(want_ns=SECOND), child_ended_s=16.2)["savings"]["vs_direct"]["inputs"]
    assert (inputs["low_s"], inputs["high_s"]) == pytest.approx((16 - 1 - 1.5, 16 - 1))
    threads = nothing_served(want_ns=5 * SECOND, readers=8, looked_ns=14 * SECOND)
    inputs = record_of(threads, child_ended_s=40.2)["savings"]["vs_direct"]["inputs"]
    assert inputs["low_s"] == pytest.approx(40 - 5), "the waits of threads for answers may add up to more than all"


@pytest.mark.parametrize(("want_ns", "said"), [(0, "gained nothing"), (SECOND, "cost 1.75 s")])
def test_staging_cost_time_only_where_all_of_the_range_says_so(want_ns: int, said: str) -> None:
    record = record_of(nothing_served(want_ns=want_ns), child_ended_s=16.2)
    assert record["savings"]["vs_direct_s"] <= -1
    (note,) = [note for note in record["notes"] if note["id"] == "gained-nothing"]
    assert note["text"] == f"by estimate, staging {said} compared with reading directly"


@pytest.mark.parametrize(("threads", "low_s", "high_s"), [(1, 14.5, 15.0), (4, 14.3, 15.75)])
def test_waits_for_answers_count_as_the_cost_of_a_run_that_was_served_nothing(
    threads: int, low_s: float, high_s: float
) -> None:
    """And so may waits for a processor, as far as they were outside of calls, where the calls were measured."""
    unserved = {"hit_opens": 0, "source_opens": 1_000, "local_read_bytes": 0, "source_read_bytes": 10**8}
    node = looped(alone={}, totals={"source_bytes": 0, "source_files": 0})
    node.processes[0].counters |= unserved | {"want_ns": SECOND, "queued_ns": 7 * SECOND // 10, "readers": threads}
    found = record_of(node, child_ended_s=16.2)["savings"]["vs_direct"]
    assert "nothing was served" in found["formula"]
    assert (found["inputs"]["low_s"], found["inputs"]["high_s"]) == pytest.approx((low_s, high_s), abs=0.01)
    node.processes[0].counters |= {"want_ns": 6 * SECOND, "queued_ns": 5 * SECOND}
    assert "what hpcstage cost" in record_of(node, child_ended_s=16.2)["savings"]["vs_direct"]["reason"]


def test_what_threads_read_may_be_computed_on_while_they_read_more() -> None:
    """The program computes for 1 s more after the last read. Without staging it may have done so while it waited."""
    looked = {"readers": 8, "looked_ns": 14 * SECOND, "look_inside_source_ns": SECOND, "look_wait_source_ns": SECOND}
    waits = {"blocked_ns": 13 * SECOND, "blocked_source_ns": 13 * SECOND}
    node = looped()
    node.processes[0].counters |= looked | waits
    at_once = record_of(node, child_ended_s=16.2)["savings"]["vs_direct"]["inputs"]
    node.processes[0].counters |= {"exit_ns": 17 * SECOND}
    later = record_of(node, child_ended_s=17.2)["savings"]["vs_direct"]["inputs"]
    assert later["high_s"] == pytest.approx(at_once["high_s"] + 1)
    assert later["low_s"] == pytest.approx(at_once["low_s"])
    node.processes[0].counters |= {"exit_ns": 19 * SECOND}
    assert "threads read while" in record_of(node, child_ended_s=19.2)["savings"]["vs_direct"]["reason"]


def test_of_a_source_that_goes_up_and_down_a_few_periods_do_not_tell_the_mean() -> None:
    node = looped()
    for sample in node.samples[12:24]:
        sample.copied_files = 2
    assert "up and down" in record_of(node, child_ended_s=16.2)["savings"]["vs_direct"]["reason"]
    assert record_of(looped(), child_ended_s=16.2)["savings"]["vs_direct_s"] is not None


@pytest.mark.parametrize(("copied_files", "copying_s", "known"), [(15, 1.0, False), (15, 2.0, True), (2500, 1.0, True)])
def test_a_rate_that_was_seen_for_a_moment_is_no_mean_where_it_counts(
    copied_files: int, copying_s: float, known: bool
) -> None:
    """At 60 files a second passing one takes most of what a file takes alone; at 10,000 a hundredth of it."""
    node = looped(samples=[replace(sample, copied_files=copied_files) for sample in looped().samples[:4]])
    node = replace(node, totals=replace(node.totals, copy_busy_s=copying_s, source_files=8 + 4 * copied_files))
    saved = record_of(node, child_ended_s=16.2)["savings"]["vs_direct"]
    assert (saved["saved_s"] is not None) is known
    assert known or "seen for 1.0 s only" in saved["reason"]


def test_a_few_samples_by_chance_poor_do_not_make_the_source_slow() -> None:
    """Of 32 files in flight many end in one sample and few in the next: the mean of all copying tells better."""
    few = [replace(sample, copied_files=20) for sample in looped().samples[:5]]
    node = looped(samples=few, totals={"source_files": 8 + 250, "copy_busy_s": 0.18 + 2.5})
    inputs = record_of(node, child_ended_s=16.2)["savings"]["vs_direct"]["inputs"]
    assert inputs["source_files_per_s"] == pytest.approx(100)


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
        (node_part(), "vs_direct", "one reader alone was not measured"),
        (node_part(missed_count=1), "vs_direct", "never attached"),
    ],
)
def test_what_cannot_be_said_has_a_reason(node: NodePart | None, which: str, why: str) -> None:
    savings = record_of(node)["savings"]
    assert savings[f"{which}_s"] is None
    assert why in savings[which]["reason"]
    assert why in savings["method"]


def test_upfront_counts_the_staging_before_the_command() -> None:
    record = record_of(looped(mode="upfront"), child_started_s=30.0, child_ended_s=46.0)
    savings = record["savings"]
    assert savings["vs_direct"]["inputs"]["before_s"] == 30.0
    assert savings["vs_direct_s"] == pytest.approx(12 + 22.5 - 16 - 30, abs=0.3)


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
    return ProcessPart(5, 1, "python", "3.11", {"hit_opens": 100} | counters)


@pytest.mark.parametrize(
    ("changes", "note"),
    [
        ({"processes": []}, "nothing-attached"),
        ({"processes": [ProcessPart(5, 1, "native", "3.11", {})]}, "nothing-opened"),
        ({"processes": [python_reader()]}, "python-layer"),
        ({"processes": [python_reader(source_opens=50, direct_full=50)]}, "direct-full"),
        ({"processes": [python_reader(source_opens=50, direct_no_daemon=50)]}, "direct-no-daemon"),
        ({"processes": [python_reader(wants=60)]}, "order"),
        ({"processes": [python_reader(errors=3)]}, "shim-errors"),
        ({"processes": [python_reader(dropped=3)]}, "dropped"),
        ({"budget": {"size_bytes": 10**8}}, "store-full"),
        ({"errors": [{"path": "/d/x", "error": "ESTALE", "count": 4}]}, "copy-failed"),
        (
            {"datasets": [DatasetPart("0", "/d", ())], "problems": [Problem("local", "t", "r")]},
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
    fast = looped(alone={"files": 8, "open_ns": SECOND // 1000, "read_ns": 0, "kept_share": 0.0})
    for sample in fast.samples:
        sample.copied_files, sample.copy_read_ns = 2500, SECOND // 10
    record = record_of(fast, child_ended_s=16.2)
    assert record["savings"]["vs_direct_s"] < 0
    assert "gained-nothing" in ids(record)
