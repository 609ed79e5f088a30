"""`hpcstage run --elastic` in a job of a real Slurm: an agent on each node, and a training that outlives a node's
processes."""

from __future__ import annotations

import contextlib
import subprocess

import psutil
import pytest
from clusterproject import Project
from nodeslab import UID, until
from slurmlab import Slurm

pytest_plugins = ("clusterfixtures",)
pytest.importorskip("torch")
pytestmark = pytest.mark.torch

TRAIN = """
import os, socket, time
import torch, torch.distributed as dist
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
weights, step = torch.load("snapshot") if os.path.exists("snapshot") else (torch.zeros(1), 0)
stop = torch.zeros(1)
while not stop.item():
    gradient = torch.ones(1)
    dist.all_reduce(gradient)
    weights, step = weights + gradient / world, step + 1
    if rank == 0:
        torch.save((weights, step), "snapshot.new")
        os.replace("snapshot.new", "snapshot")
    with open("steps", "a") as file:
        file.write(f"{socket.gethostname()} {world} {step} {weights.item():g}\\n")
    stop[0] = float(os.path.exists("stop"))
    dist.all_reduce(stop, dist.ReduceOp.MAX)
    time.sleep(0.05)
dist.destroy_process_group()
"""
SCRIPT = """#!/bin/bash
. .venv/bin/activate
exec hpcstage run --elastic 2:3 -- python elastic_train.py
"""
START_S = 90


@pytest.mark.timeout(300)
def test_a_training_outlives_a_node_of_the_job(slurm: Slurm, project: Project) -> None:
    (project.outside / "elastic_train.py").write_text(TRAIN)
    subprocess.run(["chown", f"{UID}:{UID}", project.outside / "elastic_train.py"], check=True)

    def steps(after: int = 0) -> list[list[str]]:
        path = project.outside / "steps"
        return [line.split() for line in path.read_text().splitlines()[after:]] if path.exists() else []

    def trains(world: int, after: int = 0) -> bool:
        return len({step[0] for step in steps(after) if step[1] == str(world)}) == world

    job = slurm.submit(
        "--nodes=3", "--ntasks-per-node=1", "--no-kill", env=project.env, cwd=project.path, script=SCRIPT
    )
    try:
        until(lambda: trains(3) or slurm.finished(job), START_S, f"a training on three nodes: {project.log()}")
        assert trains(3), project.log()
        lost = [process for process in slurm.nodes.processes(uid=UID, index=3) if _is_of(process, project)]
        assert lost, "the agent of the third node is there"
        count = len(steps())
        for process in lost:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        until(lambda: trains(2, count) or slurm.finished(job), START_S, f"a training on two nodes: {project.log()}")
        assert {step[0] for step in steps(count) if step[1] == "2"} == set(slurm.nodes.names[:2]), project.log()
    finally:
        (project.outside / "stop").touch()
    assert slurm.wait(job, 120)["JobState"] == "COMPLETED", project.log()
    assert all(step[2] == step[3] for step in steps()), "the weights count the steps"


def _is_of(process: psutil.Process, project: Project) -> bool:
    with contextlib.suppress(psutil.Error):
        return process.environ().get("HPCSTAGE_TEST_WHOSE") == project.name
    return False
