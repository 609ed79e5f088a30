"""A node of a Slurm job that goes on without it (`--no-kill`): checkpoints of all nodes, of which one is lost."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable

import psutil
import pytest
from clusterproject import PROJECT, Project, needs_checkpoints
from nodeslab import until
from slurmlab import Slurm

needs_checkpoints(of_nodes=True)
pytest_plugins = ("clusterfixtures",)

COUNT = 3
SCRIPT = """#!/bin/bash
. .venv/bin/activate
train="python ranksteps.py"
hpcstage run --checkpoint ckpt -- env -u SLURM_NO_KILL srun --no-kill --kill-on-bad-exit=0 $train {checkpoint}
echo "exit code $?"
"""


def shards(project: Project) -> dict[str, list[str]]:
    """The steps that have their name in DIR, with the ranks whose part is there."""
    there = project.outside / "ckpt"
    names = [name for name in os.listdir(there) if name.removeprefix("step").isdigit()] if there.exists() else []
    return {name: sorted(os.listdir(there / name)) for name in names}


def newest(project: Project) -> int:
    return max((int(name.removeprefix("step")) for name in shards(project)), default=-1)


def lose(slurm: Slurm, project: Project, index: int) -> None:
    """Kills slurmd and what is below it, the user's processes among it."""
    for process in slurm.nodes.processes(index=index):
        with contextlib.suppress(psutil.Error):
            is_own = process.name() not in ("slurmd", "slurmstepd") and process.environ().get(PROJECT) == project.name
            if is_own or process.name() in ("slurmd", "slurmstepd"):
                process.kill()


def give_up(slurm: Slurm, index: int) -> None:
    """Slurm does so by itself after SlurmdTimeout, 5 minutes by default."""
    host = slurm.nodes.names[index - 1]
    slurm.nodes.run(1, "scontrol", "update", f"NodeName={host}", "State=DOWN", "Reason=test")


def back(slurm: Slurm, index: int) -> None:
    slurm.nodes.run(index, "slurmd")
    state = ("sinfo", "-h", "-n", slurm.nodes.names[index - 1], "-o", "%t")
    until(lambda: slurm.nodes.run(1, *state).stdout.strip() in ("idle", "mix"), 120, "the node in service again")


def said(project: Project, job: int) -> str:
    path = project.outside / f"slurm-{job}.out"
    return path.read_text() if path.exists() else ""


@pytest.mark.parametrize("is_told", [True, False], ids=["down", "silent"])
def test_a_node_is_lost_and_no_state_without_its_part_takes_a_name(
    slurm: Slurm, project: Project, is_told: bool
) -> None:
    shape = (*slurm.first(COUNT), "--ntasks-per-node=1", "--no-kill", "--no-requeue")
    job = slurm.submit(*shape, env={**project.env, "SLURM_NO_KILL": "1"}, cwd=project.path, script=SCRIPT)
    log = project.log

    def await_or_end(condition: Callable[[], bool], what: str) -> None:
        until(lambda: condition() or slurm.finished(job), 400, f"{what}: {log()}")
        assert condition(), log()

    await_or_end(lambda: newest(project) >= 1, "some steps in DIR")
    lost = COUNT
    try:
        lose(slurm, project, lost)
        if is_told:
            give_up(slurm, lost)
        (project.outside / f"lost.{lost - 1}").touch()
        at = max(int(path.name.split(".")[-2]) for path in project.outside.glob("at.*"))
        rank = ".".join(next(project.outside.glob("at.*")).name.split(".")[:-2])
        await_or_end((project.outside / f"{rank}.{at + 20}.1").exists, "twenty more steps of those that are left")
        await_or_end(lambda: connected(project) == slurm.nodes.names[: COUNT - 1], "a group of the healthy nodes")
        assert staging_nodes(slurm, project) == set(range(1, COUNT)), "a healthy node stays in the group"
        if not is_told:
            give_up(slurm, lost)  # the command's own srun ends only then
    finally:
        (project.outside / "enough").touch()
        back(slurm, lost)
    slurm.wait(job)
    assert "exit code 74" in said(project, job), log()
    found = shards(project)
    assert found, "older whole ones stay"
    assert {name: parts for name, parts in found.items() if len(parts) < COUNT} == {}, log()
    assert "node configuration" not in log()
    done = slurm.nodes.run(
        1, "bash", "-c", ". .venv/bin/activate && hpcstage checkpoint verify ckpt", user=True,
        cwd=project.path, env=project.env,
    )  # fmt: skip
    assert done.stdout.count(": whole") == len(found), done.stdout


def connected(project: Project) -> list[str]:
    """The nodes of the newest group, as the lead wrote them for its exchanges."""
    found = max(project.outside.rglob("world-*.json"), key=lambda path: int(path.stem.removeprefix("world-")))
    nodes = json.loads(found.read_text())["membership"]["nodes"]
    return [node["host"] for node in nodes if node["is_present"]]


def staging_nodes(slurm: Slurm, project: Project) -> set[int]:
    """The nodes on which a daemon of the project runs."""
    found = set()
    for index in range(1, COUNT + 1):
        for process in slurm.nodes.processes(index=index):
            with contextlib.suppress(psutil.Error):
                if "hpcstage.daemon" in process.cmdline() and process.environ().get(PROJECT) == project.name:
                    found.add(index)
    return found
