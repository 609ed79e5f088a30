"""`hpcstage run --elastic` in jobs of a real Slurm and a real Grid Engine: an agent on each node, a training that
outlives the processes of a node, and one that nodes of other jobs join."""

from __future__ import annotations

import contextlib
import json
import subprocess
from collections.abc import Callable

import psutil
import pytest
from clusterproject import PROJECT, Project
from gridlab import GridEngine
from nodeslab import UID, Nodes, until
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
START_S = 300


@pytest.mark.parametrize("keeps", [True, False], ids=["no-kill", "kill"])
def test_slurmd_and_all_below_it_is_lost(slurm: Slurm, project: Project, keeps: bool) -> None:
    """With --no-kill the training goes on without the node; without it Slurm ends the job, and a line names the
    option."""
    write_program(project)
    shape = ("--nodes=3", "--ntasks-per-node=1", "--no-requeue", *["--no-kill"] * keeps)
    job = slurm.submit(*shape, env=project.env, cwd=project.path, script=SCRIPT)
    index = other_node(slurm.nodes, project, lambda: slurm.finished(job))
    host = slurm.nodes.names[index - 1]
    try:
        for process in slurm.nodes.processes(index=index):
            with contextlib.suppress(psutil.NoSuchProcess):
                if process.name() in ("slurmd", "slurmstepd") or is_of(process, project):
                    process.kill()
        count = len(steps(project))
        # Slurm finds that by itself after SlurmdTimeout, 5 minutes by default.
        slurm.nodes.run(1, "scontrol", "update", f"NodeName={host}", "State=DOWN", "Reason=test")
        if keeps:
            await_two(slurm.nodes, project, lambda: slurm.finished(job), index, count)
        else:
            assert slurm.wait(job)["JobState"] == "NODE_FAIL", project.log()
            assert f"while Slurm takes {host} for lost" in project.log()
            assert "sbatch --no-kill" in project.log()
    finally:
        (project.outside / "stop").touch()
        slurm.nodes.run(index, "slurmd")
        state = ("sinfo", "-h", "-n", host, "-o", "%t")
        until(lambda: slurm.nodes.run(1, *state).stdout.strip() in ("idle", "mix"), 120, f"{host} in service again")
    if keeps:
        assert slurm.wait(job)["JobState"] == "COMPLETED", project.log()


def test_nodes_of_other_slurm_jobs_join_and_go(slurm: Slurm, project: Project) -> None:
    """A job of one node trains. One job that came before it joins and is cancelled, another joins and stays to the end,
    and one that comes too late has nothing to do."""
    write_program(project)
    named = SCRIPT.replace("--elastic 2:3", "--elastic 1:3 --name night")
    shape = ("--nodes=1", "--ntasks-per-node=1", "--gres=gpu:4")  # of which a node has as many: each has its own
    join = {**project.env, "NAME": "night"}

    def said(job: int) -> str:
        return "".join(path.read_text() for path in project.outside.glob(f"*-{job}.out"))

    def come(*jobs: int, gone: tuple[int, ...] = ()) -> set[str]:
        """Waits until these jobs train together, and no others; returns the hosts."""
        count = len(steps(project))

        def is_there() -> bool:
            return len({step[0] for step in steps(project)[count:] if step[1] == str(len(jobs))}) == len(jobs)

        until(lambda: is_there() or any(map(slurm.finished, jobs)), START_S, f"{len(jobs)} nodes: {project.log()}")
        assert is_there(), project.log()
        assert all(map(slurm.finished, gone))
        return {step[0] for step in steps(project)[count:] if step[1] == str(len(jobs))}

    second = slurm.submit("slurm-elastic-join.sh", env=join, cwd=project.path)
    until(lambda: "for a training night to begin" in said(second), START_S, f"a job that waits: {project.log()}")
    first = slurm.submit(*shape, env=project.env, cwd=project.path, script=named)
    try:
        together = come(first, second)
        assert together == {slurm.job(first)["NodeList"], slurm.job(second)["NodeList"]}
        slurm.cancel(second)
        slurm.wait(second)
        come(first, gone=(second,))
        third = slurm.submit("slurm-elastic-join.sh", env=join, cwd=project.path)
        come(first, third)
    finally:
        (project.outside / "stop").touch()
    for job in (first, third):
        assert slurm.wait(job)["JobState"] == "COMPLETED", project.log()
    assert "training night: the training is complete" in said(third)
    late = slurm.submit("slurm-elastic-join.sh", env=join, cwd=project.path)
    assert slurm.wait(late)["JobState"] == "COMPLETED", project.log()
    assert "training night is over" in said(late)
    assert all(step[2] == step[3] for step in steps(project)), "the weights count the steps"


def test_nodes_of_other_gridengine_jobs_join_and_are_killed(gridengine: GridEngine, project: Project) -> None:
    """A job of one node trains; another one joins, and is killed whole, which ends no other job."""
    write_program(project)
    alone = ("-pe", "smp", "9")  # of 16 slots: no two on a node
    options = ("-cwd", "-j", "y", "-S", "/bin/bash", "-o", "job.out", *alone)
    named = SCRIPT.replace("--elastic 2:3", "--elastic 1:2 --name night")
    join = {**project.env, "NAME": "night"}

    def come(count: int, after: int) -> set[str]:
        """Waits until so many nodes train together, and returns them."""
        until(lambda: len(hosts(project, count, after)) == count, START_S, f"{count} nodes: {project.log()}")
        return hosts(project, count, after)

    first = gridengine.submit(*options, env=project.env, cwd=project.path, script=named)
    try:
        host = come(1, 0)
        second = gridengine.submit(*alone, "gridengine-elastic-join.sh", env=join, cwd=project.path)
        (lost,) = come(2, 0) - host
        for process in gridengine.nodes.processes(uid=UID, index=gridengine.nodes.names.index(lost) + 1):
            with contextlib.suppress(psutil.NoSuchProcess):
                if is_of(process, project):
                    process.kill()
        assert come(1, len(steps(project))) == host
        assert gridengine.wait(second)["exit_status"] != "0"
    finally:
        (project.outside / "stop").touch()
    assert gridengine.wait(first)["exit_status"] == "0", project.log()
    assert all(step[2] == step[3] for step in steps(project)), "the weights count the steps"


def write_program(project: Project) -> None:
    (project.outside / "elastic_train.py").write_text(TRAIN)
    subprocess.run(["chown", f"{UID}:{UID}", project.outside / "elastic_train.py"], check=True)


def hosts(project: Project, world: int, after: int = 0) -> set[str]:
    """The nodes that have trained, so many together."""
    return {step[0] for step in steps(project)[after:] if step[1] == str(world)}


def other_node(nodes: Nodes, project: Project, is_over: Callable[[], bool]) -> int:
    """Waits for a training on three nodes and returns the number of one that is not the job script's."""
    until(lambda: len(hosts(project, 3)) == 3 or is_over(), START_S, f"a training on three nodes: {project.log()}")
    assert len(hosts(project, 3)) == 3, project.log()
    others = hosts(project, 3) - {script_host(project)}
    return next(index for index, name in enumerate(nodes.names, 1) if name in others)


def await_two(nodes: Nodes, project: Project, is_over: Callable[[], bool], lost: int, count: int) -> None:
    """Waits until the two other nodes go on, after so many steps."""
    until(lambda: len(hosts(project, 2, count)) == 2 or is_over(), START_S, f"two nodes: {project.log()}")
    assert hosts(project, 2, count) == hosts(project, 3) - {nodes.names[lost - 1]}, project.log()


def steps(project: Project) -> list[list[str]]:
    """The steps that the processes have written: host, world, step, weights."""
    path = project.outside / "steps"
    return [line.split() for line in path.read_text().splitlines()] if path.exists() else []


def script_host(project: Project) -> str:
    """The node of the job script."""
    (run_dir,) = project.run_dirs()
    return str(json.loads(next(run_dir.rglob("training.json")).read_text())["hosts"][0])


def is_of(process: psutil.Process, project: Project) -> bool:
    with contextlib.suppress(psutil.Error):
        return process.environ().get(PROJECT) == project.name
    return False
