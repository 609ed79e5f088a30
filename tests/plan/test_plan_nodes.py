"""The plan for several nodes: the cost model's equations, hit rates, each node's part, and `plan --nodes`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import equations
from benchmarks.equations import Hits, alike
from hpcstage.plan.placement.fitting import NodesPlan, nodes_plan
from hpcstage.plan.placement.placements import Placing
from hpcstage.plan.types import Budget

GB = 1000 << 20


def planned(nodes: int, asked: str = "replicate", room: float = 1.0) -> NodesPlan:
    return nodes_plan([100 << 20] * 1000, Budget(int(room * 100 * GB), 10**9), asked, nodes)


# ---- the equations


def test_equations_by_hand() -> None:
    assert equations.training_s(100, 4, 5) == 5
    assert equations.source_s(100, 10) == 10
    assert equations.preprocessing_s(100, 4, 25) == 1
    assert equations.loading_s(100, 4, 10, 25) == 11
    assert equations.knee(20, 5) == 4
    assert [equations.true_cost_s(100, p, 20, 5) for p in (2, 4, 8)] == [10, 5, 5]
    assert equations.cached_s(100, 4, 10, 50, 0.8) == pytest.approx(2 + 1.6 * 0.75)
    assert equations.local_first_s(100, 10, 50, 0.8, 0.05) == pytest.approx(2 + 0.08)


@pytest.mark.parametrize(("batch", "seen"), [(32, 0.069), (64, 0.048), (128, 0.034)])
def test_imbalance_is_what_the_paper_simulated(batch: int, seen: float) -> None:
    assert equations.imbalance(batch, 256) == pytest.approx(seen, rel=0.05)


# ---- hit rates


def test_hits_by_placement() -> None:
    assert alike(Placing.REPLICATE, 4, 1.0).hits(2) == Hits(1.0, 0.0, 0.0)
    assert alike(Placing.REPLICATE, 4, 1.0).hits(1) == Hits(0.25, 0.75, 0.0)
    assert alike(Placing.PARTITION, 4, 0.25).hits(7) == Hits(0.25, 0.75, 0.0)
    assert alike(Placing.PARTITION, 4, 0.125).hits(2) == Hits(0.125, 0.375, 0.5)
    assert alike(Placing.PRIVATE, 4, 1.0).hits(1) == Hits(0.0, 0.0, 1.0)
    assert alike(Placing.PRIVATE, 4, 1.0).hits(3).local == pytest.approx(1 - 0.75**2)
    assert alike(Placing.PRIVATE, 4, 0.3).hits(3).local == pytest.approx(0.3)


@given(kind=st.sampled_from(list(Placing)), nodes=st.integers(1, 64), room=st.floats(0, 1), epoch=st.integers(1, 40))
def test_hits_add_up(kind: Placing, nodes: int, room: float, epoch: int) -> None:
    sharing = alike(kind, nodes, room)
    found = sharing.hits(epoch)
    assert found.local + found.peers + found.source == pytest.approx(1)
    assert min(found.local, found.peers, found.source) >= -1e-9


# ---- each node's part


def test_each_nodes_part() -> None:
    replicas, parts = planned(8, "replicate"), planned(8, "partition", room=0.2)
    assert (replicas.fetched_bytes, replicas.kept_bytes, replicas.peers_bytes) == (12.5 * GB, 100 * GB, 87.5 * GB)
    assert (parts.fetched_bytes, parts.kept_bytes) == (12.5 * GB, 12.5 * GB)
    assert parts.peers_bytes == pytest.approx(87.5 * GB / 8)
    assert replicas.unplaced_bytes == parts.unplaced_bytes == 0
    private = planned(4, "private", room=0.5)
    assert (private.fetched_bytes, private.kept_bytes, private.peers_bytes) == (50 * GB, 50 * GB, 0)


def test_what_has_room_on_no_node() -> None:
    short = planned(4, room=0.2)
    assert short.kind == "partition"
    assert short.unplaced_bytes == pytest.approx(28 * GB, rel=0.01)  # a tenth of each budget is for temporary copies
    assert 4 * short.fetched_bytes + short.unplaced_bytes == pytest.approx(100 * GB)


def test_replicas_need_room_for_all() -> None:
    assert planned(4, "replicate").why == "every node has room for all files"
    short = planned(4, "replicate", room=0.5)
    assert (short.kind, short.why) == ("partition", "not every node has room for all files")


def test_a_file_that_has_room_on_no_node_stays_at_the_source() -> None:
    for kind in ("replicate", "partition"):
        found = nodes_plan([120 << 20, 40 << 20], Budget(100 << 20, 100), kind, 2)
        assert (found.kind, found.unplaced_bytes) == ("partition", pytest.approx(120 << 20))
        assert 2 * found.kept_bytes == pytest.approx(40 << 20)


# ---- the command


def test_command_with_nodes(hpcstage: Any, make_tree: Callable[..., Path]) -> None:
    root = make_tree(files=40)
    words = ["plan", "--data", root, "--nodes", "12"]
    done = hpcstage(*words)
    assert done.returncode == 0, done.stderr
    text = done.stdout.decode()
    for part in (
        "nodes    12; placement replicate: every node has room for all files",
        "keeps 400 kB and gets 367 kB from others, once",
        "forecast  none: it is made for one node",
    ):
        assert part in text
    data = json.loads(hpcstage(*words, "--json", "--placement", "partition").stdout)["nodes"]
    assert (data["nodes"], data["kind"], data["why"]) == (12, "partition", "as asked for")
    assert data["fetched_bytes"] == pytest.approx(400_000 / 12)


def test_command_takes_the_nodes_of_the_job(hpcstage: Any, make_tree: Callable[..., Path]) -> None:
    env = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-3]", "SLURM_JOB_NUM_NODES": "3", "SLURMD_NODENAME": "n1"}
    done = hpcstage("plan", "--json", "--data", make_tree(files=4), env=env)
    assert json.loads(done.stdout)["nodes"]["nodes"] == 3


def test_command_on_one_node_says_nothing_of_nodes(hpcstage: Any, make_tree: Callable[..., Path]) -> None:
    done = hpcstage("plan", "--json", "--data", make_tree(files=4))
    assert json.loads(done.stdout)["nodes"] is None


def test_command_refuses_a_placement_that_is_none(hpcstage: Any, make_tree: Callable[..., Path]) -> None:
    done = hpcstage("plan", "--data", make_tree(files=4), "--placement", "scatter")
    assert (done.returncode, b"--placement" in done.stderr) == (2, True)
