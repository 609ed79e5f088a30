"""The time split: which wait is counted as what, and what is said where nothing was measured."""

from __future__ import annotations

from typing import Any

import pytest
from recordcases import SECOND, blocked, composed, node_part, run_part, trainer, worker

from hpcstage.record.parts.rows import ProcessPart, Sample


def split_of(processes: list[ProcessPart], samples: list[Sample] | None = None, **run: Any) -> dict[str, Any]:
    return composed(run_part(**run), [node_part(processes=processes, samples=samples or [])])["time_split"]


def reader(pid: int = 100, **counters: int) -> ProcessPart:
    base = {"reads_measured": 1, "attach_ns": SECOND, "exit_ns": 51 * SECOND, "source_opens": 50, "source_reads": 50}
    return ProcessPart(pid, 1, "native", base | counters)


def test_reading_explains_waits_first_and_preprocessing_is_the_rest() -> None:
    workers = [worker(p, **blocked(3, 1)) for p in (101, 102)]
    split = split_of([trainer(), *workers])
    assert split["wait_source_s"] == pytest.approx(3)  # (6 + 2) / 2 workers explain 4 s of 12, three quarters of it
    assert split["wait_local_s"] == pytest.approx(1)
    assert split["preprocess_s"] == pytest.approx(8)


def test_processes_that_do_not_descend_from_the_trainer_explain_nothing() -> None:
    stranger = worker(500, parent_pid=400)
    split = split_of([trainer(), stranger])
    assert split["wait_source_s"] is None
    assert split["compute_s"] == pytest.approx(44)
    assert "not divided" in split["unmeasured"][0]
    assert split["other_s"] == pytest.approx(16)


def test_grandchildren_count() -> None:
    between = ProcessPart(200, 100, "native", {"reads_measured": 1})
    split = split_of([trainer(loader_workers=1), between, worker(201, parent_pid=200)])
    assert split["wait_source_s"] > 0


def test_several_ranks_are_averaged() -> None:
    ranks = [trainer(1, loader_wait_ns=10 * SECOND), trainer(2, loader_wait_ns=20 * SECOND)]
    workers = [worker(11, parent_pid=1), worker(12, parent_pid=2)]
    split = split_of([*ranks, *workers])
    waits = [split[k] for k in ("wait_source_s", "wait_local_s", "preprocess_s")]
    assert sum(waits) == pytest.approx(15)
    assert split["compute_s"] == pytest.approx(56 - 15)


def looked(life_s: float, source_s: float = 0.0, local_s: float = 0.0, inside: float = 1.0) -> dict[str, int]:
    """What the daemon saw when it looked at the threads: waits inside calls, a share of the time inside of them."""
    values = {
        "looked_ns": life_s,
        "look_wait_source_ns": source_s,
        "look_wait_local_ns": local_s,
        "look_inside_source_ns": source_s / inside,
        "look_inside_local_ns": local_s / inside,
    }
    return {name: int(value * SECOND) for name, value in values.items()}


def faulted(source_s: float, local_s: float = 0.0) -> dict[str, int]:
    """Page faults that the daemon saw."""
    return {"look_fault_source_ns": int(source_s * SECOND), "look_fault_local_ns": int(local_s * SECOND)}


def test_without_a_loader_the_main_process_is_measured() -> None:
    main = reader(**blocked(7, 3))
    split = split_of([main, reader(300, source_opens=2)])
    assert split["wait_source_s"] == pytest.approx(7)
    assert split["wait_local_s"] == pytest.approx(3)
    assert split["compute_s"] == pytest.approx(40)
    assert split["other_s"] == pytest.approx(10)
    assert split["preprocess_s"] is None
    assert split["unmeasured"] == []


def test_without_an_exit_the_main_process_lived_as_long_as_the_command() -> None:
    split = split_of([reader(exit_ns=0, **blocked(20))])
    assert split["compute_s"] == pytest.approx(40)
    assert split["other_s"] == pytest.approx(0)


def test_without_an_exit_another_process_lived_to_its_last_read() -> None:
    workers = [reader(pid, exit_ns=0, last_ns=31 * SECOND, **blocked(20)) for pid in (300, 301)]
    split = split_of([reader(source_opens=1, **blocked(0)), *workers])
    at_once = (50 + 30 + 30) / 50
    assert split["compute_s"] == pytest.approx((50 + 10 + 10) / at_once)
    assert split["wait_source_s"] == pytest.approx((20 + 20) / at_once)


def test_waits_of_many_threads_are_what_the_looks_at_them_tell() -> None:
    busy = reader(source_read_ns=400 * SECOND, **(blocked(30, 10) | {"readers": 32}), **looked(48, 12, 6, inside=0.5))
    split = split_of([busy])
    assert split["wait_source_s"] == pytest.approx(15)
    assert split["wait_local_s"] == pytest.approx(5)
    assert split["compute_s"] == pytest.approx(50 - 20)
    assert split["unmeasured"] == []


def test_threads_that_waited_before_the_first_look_waited() -> None:
    """The first 20 s were spent in calls, and the looks that came then saw the program compute nearly all the time."""
    split = split_of([reader(**(blocked(21) | {"readers": 8}), **looked(30, 1))])
    assert split["wait_source_s"] == pytest.approx(21)
    assert split["compute_s"] == pytest.approx(29)


@pytest.mark.parametrize("how", [{"readers": 32}, {"source_maps": 1}, {"local_maps": 1}])
def test_without_looks_what_threads_and_page_faults_wait_for_is_not_computing(how: dict[str, int]) -> None:
    split = split_of([reader(**(blocked(2) | how), **looked(5, 5))])
    assert [split[k] for k in ("compute_s", "wait_source_s", "wait_local_s")] == [None, None, None]
    assert split["other_s"] == pytest.approx(60)
    assert "too few looks" in split["unmeasured"][0]


def test_page_faults_on_mapped_files_are_waiting() -> None:
    split = split_of([reader(source_maps=1, **blocked(0.1), **looked(50), **faulted(40))])
    assert split["wait_source_s"] == pytest.approx(40.1)
    assert split["compute_s"] == pytest.approx(9.9)


def test_a_process_that_maps_files_waited_in_calls_before_the_first_look_too() -> None:
    split = split_of([reader(local_maps=1, hit_opens=50, **blocked(15, 1), **looked(30), **faulted(0, 0.5))])
    assert split["wait_source_s"] == pytest.approx(15)
    assert split["wait_local_s"] == pytest.approx(1 + 0.5 * 50 / 30)
    assert split["compute_s"] == pytest.approx(50 - 15 - 1 - 0.5 * 50 / 30)


def test_what_was_read_of_mapped_files_is_not_known() -> None:
    mapped = reader(source_maps=1, local_maps=1, hit_opens=5, source_read_bytes=8192, local_read_bytes=100)
    totals = composed(run_part(), [node_part(processes=[mapped])])["totals"]
    assert totals["direct_bytes"] is None
    assert totals["local_bytes"] is None
    assert totals["source_bytes"] is None


def test_a_loaders_waits_for_mapped_files_are_not_preprocessing() -> None:
    workers = [worker(p, source_maps=9, blocked_ns=0, blocked_source_ns=0) for p in (101, 102)]
    split = split_of([trainer(), *workers])
    assert split["preprocess_s"] is None
    assert split["compute_s"] == pytest.approx(44)
    for process in workers:
        process.counters |= looked(56) | faulted(14)
    assert split_of([trainer(), *workers])["wait_source_s"] == pytest.approx(12)


def test_many_readers_at_once() -> None:
    split = split_of([reader(pid, **blocked(10)) for pid in (1, 2, 3)])
    assert split["wait_source_s"] == pytest.approx(10)
    assert "3 processes read" in split["unmeasured"][0]


def test_many_readers_one_after_the_other_are_added() -> None:
    one_by_one = [
        reader(pid, **blocked(2), attach_ns=(10 * pid + 1) * SECOND, exit_ns=10 * (pid + 1) * SECOND)
        for pid in (1, 2, 3, 4)
    ]
    split = split_of(one_by_one)
    assert split["wait_source_s"] == pytest.approx(8)
    assert split["compute_s"] == pytest.approx(4 * 7)


def test_hidden_time_is_copying_less_waiting_within_the_command() -> None:
    samples = [Sample(float(s), 1.0, busy=8.0) for s in range(20)]
    split = split_of([reader(**blocked(5))], samples, child_started_s=10.1, child_ended_s=60.1)
    assert split["hidden_s"] == pytest.approx(10 - 5)
    assert split["before_s"] == pytest.approx(10.1)


def test_what_staging_hid_is_unknown_where_waits_are() -> None:
    copying = [Sample(float(s), 1.0, busy=8.0) for s in range(20)]
    assert split_of([], copying, child_started_s=10.1, child_ended_s=60.1)["hidden_s"] is None
    assert split_of([], [Sample(0.0, 1.0)], child_started_s=10.1, child_ended_s=60.1)["hidden_s"] == 0


def test_copies_before_the_command_and_short_bursts_hide_nothing() -> None:
    burst = [Sample(0.0, 1.0, busy=8.0)]
    node = node_part(processes=[reader()], samples=burst, staged_s=0.3, totals={"copy_busy_s": 0.2})
    assert composed(run_part(child_started_s=1.1), [node])["time_split"]["hidden_s"] == 0
    assert composed(run_part(child_started_s=0.0), [node])["time_split"]["hidden_s"] == pytest.approx(0.2)


def test_nothing_attached() -> None:
    split = split_of([])
    assert split["other_s"] == split["wall_s"] == pytest.approx(60)
    assert split["unmeasured"] == ["no process of the command attached"]
