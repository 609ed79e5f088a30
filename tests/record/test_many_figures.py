"""The record of several nodes: means over them, clocks, bounds, parts on disk."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from manycases import job, missing, node, record_of, row, run
from recordcases import SECOND, START, blocked, trainer, worker

from hpcstage import jsonform
from hpcstage.record import files
from hpcstage.record.compose import compose
from hpcstage.record.parts.part import NodePart
from hpcstage.record.parts.roster import Presence
from hpcstage.record.parts.rows import ProcessPart, Sample
from hpcstage.record.parts.run import RunPart
from hpcstage.record.schema import Record

# ---- time ----


def waits(index: int, count: int, wait_s: float) -> NodePart:
    """A node whose loader waited so long, for the source."""
    samples = [Sample(float(s), 1.0, busy=16.0, copied_bytes=10**6, copied_files=10) for s in range(40)]
    processes = [trainer(loader_wait_ns=int(wait_s * SECOND), loader_workers=1), worker(101, **blocked(wait_s, 1))]
    return node(index, count, samples=samples, processes=processes)


def test_the_split_is_a_mean_that_adds_up_and_names_the_slowest() -> None:
    waited = [2.0, 2.0, 30.0, 2.0]
    record = record_of(run(4), [waits(index, 4, wait_s) for index, wait_s in enumerate(waited)])
    split = record["time_split"]
    parts = [split[k] for k in ("compute_s", "wait_source_s", "wait_local_s", "preprocess_s", "other_s")]
    assert sum(parts) == pytest.approx(split["wall_s"])
    assert split["compute_s"] == pytest.approx(56 - sum(waited) / 4)
    slow = row(record, "node0002")
    assert slow["waited_s"] == pytest.approx(30, abs=0.5)
    assert slow["slow"] == ["waited 28 s longer for files than the others"]
    assert row(record, "node0001")["slow"] == []
    assert [n["severity"] for n in record["notes"] if n["id"] == "slow-nodes"] == ["warning"]
    whole = Record.from_json(record)
    assert whole.slowest is not None
    assert whole.slowest.host == "node0002"
    assert whole.headroom_s == pytest.approx(30, abs=0.5), "of the slowest"


@pytest.mark.parametrize("name", ["want_ready", "copied_bytes"])
def test_what_daemons_count_is_the_jobs_sum_and_unknown_where_one_does_not_know(name: str) -> None:
    counted = [replace(one, totals=replace(one.totals, **{name: 3 + one.node_index})) for one in job(3)]
    assert record_of(run(3), counted)["totals"][name] == 3 + 4 + 5
    counted[1] = replace(counted[1], totals=replace(counted[1].totals, **{name: None}))
    assert record_of(run(3), counted)["totals"][name] is None


def test_a_node_is_compared_with_the_median_of_the_others_not_with_the_fastest() -> None:
    loads = [lambda _now_s: 0.25, lambda _now_s: 1.0]
    record = record_of(run(6), [node(index, 6, own=loads[index == 2]) for index in range(6)])
    assert not any(row["slow"] for row in record["nodes"])


def test_of_several_slow_nodes_the_worst_is_told_first() -> None:
    waited = [2.0, 14.0, 2.0, 30.0, 20.0, 2.0, 2.0, 2.0]
    record = record_of(run(8), [waits(index, 8, wait_s) for index, wait_s in enumerate(waited)])
    (note,) = [note for note in record["notes"] if note["id"] == "slow-nodes"]
    assert note["text"] == (
        "3 of 8 nodes are slow (node0003, node0004, node0001); node0003: waited 28 s longer for files than the others"
    )
    assert note["severity"] == "warning"


def test_training_processes_whose_waits_are_not_known_are_left_out_of_the_mean() -> None:
    blind = node(3, 4)
    for process in blind.processes:
        process.counters["reads_measured"] = 0
    record = record_of(run(4), [*(node(i, 4) for i in range(3)), blind])
    assert record["time_split"]["wait_source_s"] is not None
    assert "waits of 1 of 4 processes were not measured: left out of the mean" in record["time_split"]["unmeasured"]
    assert row(record, "node0003")["waited_s"] is None
    mostly = [replace(blind, host=f"node{i:04d}", node_index=i) for i in range(3)]
    assert record_of(run(4), [*mostly, node(3, 4)])["time_split"]["wait_source_s"] is None


def test_programs_that_read_without_a_loader_are_averaged_too() -> None:
    def reader(index: int, wait_s: int) -> NodePart:
        counters = {
            "attach_ns": SECOND,
            "exit_ns": 41 * SECOND,
            "hit_opens": 10,
            "reads_measured": 1,
            "local_reads": 10,
        }
        process = ProcessPart(7, 1, "native", counters | blocked(wait_s))
        return node(index, 2, processes=[process])

    split = record_of(run(2), [reader(0, 10), reader(1, 20)])["time_split"]
    assert split["wait_source_s"] == pytest.approx(15)
    assert split["compute_s"] == pytest.approx(25)


def test_pids_of_other_hosts_are_not_the_command() -> None:
    """A process that happens to have the pid of the launcher on the first node is nothing special."""
    small = ProcessPart(100, 1, "native", {"hit_opens": 6, "reads_measured": 1})
    large = ProcessPart(9, 1, "native", {"hit_opens": 5, "reads_measured": 1} | blocked(30))
    here = record_of(run(2), [node(0, 2, processes=[small, large]), node(1, 2, processes=[])])
    there = record_of(run(2), [node(0, 2, processes=[]), node(1, 2, processes=[small, large])])
    assert here["time_split"]["wait_source_s"] == there["time_split"]["wait_source_s"] == 0.0


# ---- clocks ----


@pytest.mark.parametrize("skew_s", [-4000.0, -30.0, 0.0, 30.0, 4000.0])
def test_clocks_that_the_run_proves_wrong_are_put_right(skew_s: float) -> None:
    nodes = list(job(4, source=lambda t: 0.3 if 20 <= t < 32 else 1.0))
    nodes[2] = replace(nodes[2], started_unix_s=nodes[2].started_unix_s + skew_s)
    record = record_of(run(4), nodes)
    (period,) = record["contention"]["periods"]
    assert (period["start_s"], period["end_s"]) == (pytest.approx(20, abs=2), pytest.approx(32, abs=2))
    assert record["series"]["start_s"][-1] < 70


# ---- bounds ----


def test_a_thousand_nodes_make_a_small_record() -> None:
    many = [worker(200 + n) for n in range(16)]
    record = record_of(run(1024), job(1024, 3, processes=[trainer(), *many], hist_open={}, hist_read={}))
    assert len(record["nodes"]) == 1024
    assert record["time_split"]["loader_workers"] == 2
    assert len(json.dumps(record)) < 1_500_000
    assert sum(record["coverage"]["layers"].values()) == 17 * 1024


shifts = st.floats(-1e5, 1e5)
some_samples = st.lists(
    st.builds(
        Sample,
        start_s=st.floats(0, 1e6),
        length_s=st.floats(0.001, 1e4),
        copied_bytes=st.integers(0, 10**13),
        copied_files=st.integers(0, 10**6),
        busy=st.floats(0, 64),
        limited=st.booleans(),
    ),
    max_size=12,
).map(lambda found: sorted(found, key=lambda s: s.start_s))
kinds = st.sampled_from(["whole", "missing", "died", "mute", "private"])


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(
    found=st.lists(st.tuples(kinds, shifts, some_samples), min_size=1, max_size=9),
    heard_of=st.integers(0, 3),
    ended=st.one_of(st.none(), st.floats(0, 1e6)),
)
def test_any_parts_give_a_valid_record(
    found: list[tuple[str, float, list[Sample]]], heard_of: int, ended: float | None
) -> None:
    count = len(found) + heard_of
    nodes = []
    for index, (kind, shift_s, seen) in enumerate(found):
        part = node(index, count, 0, samples=seen, started_unix_s=START + shift_s)
        if kind == "missing":
            part = missing(index, count)
        elif kind == "died":
            part = replace(part, complete=False, ended_s=None, totals={"copied_bytes": 7})
        elif kind == "mute":
            part = replace(part, complete=False, ended_s=None, totals={}, samples=[], processes=[])
        elif kind == "private":
            part = replace(part, placement="private", group=None)
        nodes.append(NodePart.from_json(json.loads(json.dumps(part.to_json()))))
    record = record_of(run(count, child_ended_s=ended, exit_code=None if ended is None else 0), nodes)
    assert len(record["nodes"]) == (count if count > 1 else len(nodes))
    split = record["time_split"]
    parts = [split[k] for k in ("compute_s", "wait_source_s", "wait_local_s", "preprocess_s", "other_s")]
    if split["wall_s"] is not None:
        assert sum(p for p in parts if p is not None) == pytest.approx(split["wall_s"], abs=1e-6, rel=1e-9)
    assert len(record["series"]["start_s"]) <= 240
    assert record["complete"] == (
        ended is not None and heard_of == 0 and all(k in ("whole", "private") for k, *_ in found)
    )


# ---- files ----


def write(run_dir: Path, nodes: list[NodePart], run_part: RunPart) -> None:
    (run_dir / "nodes").mkdir()
    for part in nodes:
        (run_dir / "nodes" / f"{part.host}.json").write_text(json.dumps(part.to_json()))
    (run_dir / "run.part.json").write_text(json.dumps(jsonform.written(run_part)))


def test_a_late_part_is_in_the_report_after_all(tmp_path: Path) -> None:
    nodes = list(job(3))
    write(tmp_path, nodes[:2], run(3))
    early = compose(run(3), files.node_parts(tmp_path))
    files.save(early, tmp_path / "run.json")
    assert [row.host for row in early.nodes if row.state is Presence.MISSING] == ["node0002"]
    assert files.load_run(tmp_path) == early
    late = tmp_path / "nodes" / "node0002.json"
    late.write_text(json.dumps(nodes[2].to_json()))
    assert files.load_run(tmp_path).complete


@pytest.mark.parametrize("broken", [b'{"host": "x"', b'{"samples": NaN}', b'{"host": 1, "samples": {"start_s": [1]}}'])
def test_a_broken_part_among_others_is_a_missing_node(tmp_path: Path, broken: bytes) -> None:
    write(tmp_path, list(job(3)), run(3))
    (tmp_path / "nodes" / "node0001.json").write_bytes(broken)
    rows = files.load_run(tmp_path).nodes
    assert [row.host for row in rows if row.state is Presence.MISSING] == ["node0001"]


def test_columns_of_unequal_length_are_no_part() -> None:
    data = node(0, 1).to_json()
    data["samples"]["busy"] = data["samples"]["busy"][:-1]
    with pytest.raises(ValueError, match="zip"):
        NodePart.from_json(data)
