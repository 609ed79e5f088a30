"""The plan for several nodes: the cost model's equations, hit rates, each node's part, and `plan --nodes`."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import equations
from hpcstage.plan.forecast import Conditions, forecast
from hpcstage.plan.placement.nodesplan import Hits, NodesInput, NodesPlan, Sharing, alike, nodes_plan
from hpcstage.plan.placement.placements import Placing
from hpcstage.plan.types import Budget, Rates, Workload
from hpcstage.report.canvas import Canvas
from hpcstage.report.plan import nodes as plan_nodes_text

GB = 10**9
# 100 GB in 1000 files: the source gives 1 GB/s, one node trains 0.25 GB/s, a link carries 0.5 GB/s.
WORK = Workload(1000, 100 * GB, epochs=5, epoch_compute_s=400.0, startup_s=0.0, readers=1000)
RATES = Rates(1e9, 1e9, 1e15, peer_bytes_per_s=0.5e9)
SIZES = [GB // 10] * 1000


def planned(nodes: int, asked: str = "auto", room: float = 1.0) -> NodesPlan:
    budget = Budget(int(room * 1.01 * 100 * GB), 10**9)
    return nodes_plan(NodesInput(SIZES, budget, directories=0, asked=asked), nodes)


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


def test_imbalance_is_what_balls_in_bins_give() -> None:
    dice, learners, batch = random.Random(1), 64, 64
    missing = 0
    for _ in range(50):
        held = [0] * learners
        for _ in range(learners * batch):
            held[dice.randrange(learners)] += 1
        missing += sum(batch - n for n in held if n < batch)
    assert missing / (50 * learners * batch) == pytest.approx(equations.imbalance(batch, learners), rel=0.05)


# ---- hit rates


def test_hits_by_placement() -> None:
    assert alike(Placing.REPLICATE, 4, 1.0).hits(2) == Hits(1.0, 0.0, 0.0)
    assert alike(Placing.REPLICATE, 4, 1.0).hits(1) == Hits(0.25, 0.75, 0.0)
    assert alike(Placing.PARTITION, 4, 0.25).hits(7) == Hits(0.25, 0.75, 0.0)
    assert alike(Placing.PARTITION, 4, 0.125).hits(2) == Hits(0.125, 0.375, 0.5)
    assert alike(Placing.PRIVATE, 4, 1.0).hits(1) == Hits(0.0, 0.0, 1.0)
    assert alike(Placing.PRIVATE, 4, 1.0).hits(3).local == pytest.approx(1 - 0.75**2)
    assert alike(Placing.PRIVATE, 4, 0.3).hits(3).local == pytest.approx(0.3)


@given(
    kind=st.sampled_from(list(Placing)), nodes=st.integers(1, 64), room=st.floats(0, 1), epochs=st.integers(1, 40)
)  # fmt: skip
def test_hits_of_later_epochs_are_the_mean(kind: Placing, nodes: int, room: float, epochs: int) -> None:
    sharing = alike(kind, nodes, room)
    each = [sharing.hits(epoch) for epoch in range(2, max(3, epochs + 1))]
    later = sharing.later(epochs)
    if nodes > 1:
        assert later.local == pytest.approx(sum(h.local for h in each) / len(each), abs=1e-9)
    for found in [*each, later]:
        assert found.local + found.peers + found.source == pytest.approx(1)
        assert min(found.local, found.peers, found.source) >= -1e-9


def test_private_hits_are_what_shuffling_gives() -> None:
    files, nodes, epochs, dice = 4000, 4, 4, random.Random(2)
    held: list[set[int]] = [set() for _ in range(nodes)]
    rates = []
    for _ in range(epochs):
        ids = list(range(files))
        dice.shuffle(ids)
        rates.append(sum(i in held[n] for n in range(nodes) for i in ids[n::nodes]) / files)
        for n in range(nodes):
            held[n].update(ids[n::nodes])
    sharing = alike(Placing.PRIVATE, nodes, 1.0)
    assert rates == pytest.approx([sharing.hits(epoch).local for epoch in range(1, epochs + 1)], abs=0.02)
    assert sharing.source_share(epochs) == pytest.approx(sum(1 - rate for rate in rates), abs=0.05)


# ---- the forecast


def test_forecast_with_partition_is_equation_7() -> None:
    sharing = Sharing(Placing.PARTITION, 8, placed=0.75, kept=0.75 / 8)
    mode = forecast(WORK.on(8), RATES, Conditions(nodes=8, sharing=sharing)).modes["runtime"]
    from_source_s, from_peers_s = 0.25 * 100, 0.75 * 100 / (8 * 0.5) * 7 / 8
    assert equations.cached_s(100, 8, 1, 8 * 0.5, 0.75) == pytest.approx(from_source_s + from_peers_s)
    # Both go on at once, beside 50 s of computing: the largest counts.
    assert mode.later_epoch_s == pytest.approx(max(50, from_source_s, from_peers_s))
    given = Conditions(nodes=8, sharing=sharing)
    slow = forecast(WORK.on(8), replace(RATES, peer_bytes_per_s=1e8), given).modes["runtime"]
    assert slow.later_epoch_s == pytest.approx(5 * from_peers_s)


def test_upfront_with_peers_copies_once_from_the_source() -> None:
    def upfront_s(kind: Placing) -> float:
        sharing = alike(kind, 8, 1.0)
        mode = forecast(WORK.on(8), RATES, Conditions(nodes=8, sharing=sharing)).modes["upfront"]
        return mode.total_s - 5 * 50

    assert upfront_s(Placing.PRIVATE) == pytest.approx(800)
    assert upfront_s(Placing.REPLICATE) == pytest.approx(200 * 7 / 8)
    assert upfront_s(Placing.PARTITION) == pytest.approx(100)


def test_compute_scales_with_nodes() -> None:
    work = replace(WORK, epoch_compute_s=50.0, compute_nodes=8)
    assert (work.on(1).epoch_compute_s, work.on(16).epoch_compute_s) == (400, 25)
    assert replace(work, epoch_compute_s=None).on(2).epoch_compute_s is None


# ---- each node's part


@pytest.mark.parametrize("asked", ["replicate", "partition"])
def test_parts_add_up(asked: str) -> None:
    found = planned(8, asked)
    assert sum(part.fetched_files for part in found.parts) == 1000
    assert sum(part.fetched_bytes for part in found.parts) == 100 * GB
    for part in found.parts:
        assert part.fetched_files == 125
        assert part.kept_files == (1000 if asked == "replicate" else 125)
        assert part.others_files == (875 if asked == "replicate" else round(875 / 8))


def test_parts_with_the_known_share_and_replicas_in_what_is_left() -> None:
    short = planned(4, room=0.2)
    assert short.kind == "partition"
    assert short.unplaced_files == pytest.approx(273, abs=10)  # a tenth of each budget is for temporary copies
    assert sum(p.fetched_files for p in short.parts) + short.unplaced_files == 1000
    assert sum(p.fetched_bytes for p in short.parts) + short.unplaced_bytes == 100 * GB
    filled = planned(4, "replicate", room=0.5)
    assert filled.unplaced_files == 0
    assert all(p.kept_files == pytest.approx(454, abs=5) for p in filled.parts)
    assert all(p.others_files == p.kept_files - p.fetched_files for p in filled.parts)
    private = planned(4, "private")
    assert all(p.fetched_files == 1000 and p.others_files == 0 for p in private.parts)


def test_a_file_that_has_room_on_no_node_stays_at_the_source() -> None:
    given = NodesInput([120 << 20, 40 << 20], Budget(100 << 20, 100), directories=0)
    plan = nodes_plan(given, 2)
    assert (plan.kind, plan.unplaced_files, plan.unplaced_bytes) == ("partition", 1, 120 << 20)
    assert sum(part.kept_bytes for part in plan.parts) == 40 << 20
    said = " ".join(" ".join(plan_nodes_text.text(plan, 3, Canvas())).split())
    assert "placement partition: not every node has room for all files" in said
    assert "without room on any node: 1 file (126 MB), read from the source every time" in said
    for placement in Placing.PARTITION, Placing.REPLICATE, Placing.PRIVATE:
        hits = given.sharing(2, placement).later(100)
        assert hits.source == pytest.approx(0.75, abs=0.01), "the other file is a quarter of the bytes"


# ---- the command


def test_command_with_nodes(hpcstage: Any, make_tree: Callable[..., Path]) -> None:
    root = make_tree(files=40)
    words = ["plan", "--data", root, "--nodes", "12", "--epochs", "3", "--epoch-compute", "2s", "--startup", "0"]
    words += ["--readers", "2", "--source-rate", "1GB", "--reader-rate", "100MB/s", "--local-rate", "2GB"]
    lacking = hpcstage(*words).stdout.decode()
    assert "missing  --peer-rate: no earlier run's record tells them" in lacking
    words += ["--peer-rate", "1GB"]
    done = hpcstage(*words)
    assert done.returncode == 0, done.stderr
    text = done.stdout.decode()
    for part in ("nodes    12; placement replicate: every node has room for all files", "from others, once", "median",
                 "peers    1 GB/s (option --peer-rate)"):  # fmt: skip
        assert part in text
    data = json.loads(hpcstage(*words, "--json", "--placement", "partition").stdout)["nodes"]
    assert (data["nodes"], data["kind"], data["why"]) == (12, "partition", "as asked for")
    assert sum(part["fetched_files"] for part in data["parts"]) == 40


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
