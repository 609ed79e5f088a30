"""The shipped job scripts, unchanged, on a real Slurm and a real Grid Engine.

Only the environment says which dataset and how many epochs, as the scripts' first lines say. What the scripts ask for
(GPUs, processors, TSUBAME's resource types) the clusters have, in name.
"""

from __future__ import annotations

import os
import shlex
import signal
import sys

import pytest
from clusterproject import DATA, DATA_BYTES, NODES, Project, digest, heard, needs_checkpoints, ranks_wait
from conftest import REPO, problems
from gridlab import GridEngine
from nodeslab import until
from slurmlab import Slurm

pytest_plugins = ("clusterfixtures",)

GIVEN = {"DATA": str(DATA), "EPOCHS": "2", "GPUS": "2"}


def checked(project: Project, ranks: int, hosts: int) -> None:
    """All ranks read everything right; the run's record is whole and names all nodes."""
    said = project.said("rank-*.said")
    assert [line["digest"] for line in said] == [digest(2)] * ranks, project.log()
    assert len({line["host"] for line in said}) == hosts
    record = project.record()
    assert record["complete"] is True, record["notes"]
    assert problems(record) == []
    assert len(record["nodes"]) == hosts
    assert record["run"]["exit_code"] == 0


@pytest.mark.parametrize(
    ("script", "ranks", "hosts"),
    [("slurm", 1, 1), ("slurm-srun", 16, NODES), ("slurm-srun-behind", 16, NODES)],
)
def test_slurm(slurm: Slurm, project: Project, script: str, ranks: int, hosts: int) -> None:
    job = slurm.submit(f"{script}.sh", env={**project.env, **GIVEN}, cwd=project.path)
    assert slurm.wait(job)["JobState"] == "COMPLETED", project.log()
    checked(project, ranks, hosts)
    assert set(slurm.left_by(job).values()) == {""}
    if ranks > 1:
        said = project.said("rank-*.said")
        assert {line["SRUN_CPUS_PER_TASK"] for line in said} == {"16"}, "srun does not take them from the job"
        assert {line["MASTER_PORT"] for line in said} == {str(20000 + job % 10000)}, "jobs share nodes, not ports"


def test_the_script_of_the_readme(slurm: Slurm, project: Project) -> None:
    """As a stranger submits it, from an activated environment, which Slurm hands on."""
    text = (REPO / "README.md").read_text().partition("```diff\n")[2].partition("```")[0]
    script = "\n".join(line[1:] for line in text.splitlines() if not line.startswith("-"))
    script = script.replace("/lustre/imagenet/train", str(DATA)).replace("--epochs 90", "--epochs 2")
    environment = {"PATH": f"{sys.prefix}/bin:{os.environ['PATH']}", "PYTHONPATH": str(REPO)}
    job = slurm.submit("--time=2", env={**project.env, **environment}, cwd=project.path, script=script)
    assert slurm.wait(job)["JobState"] == "COMPLETED", project.log()
    checked(project, 1, 1)
    assert "\nhpcstage: " in (project.outside / f"slurm-{job}.out").read_text()
    assert "python train.py" in project.report()


def test_slurm_requeue(slurm: Slurm, project: Project) -> None:
    """Warned before the time is up, the job saves, waits in the queue and goes on from what it had saved."""
    needs_checkpoints()
    job = slurm.submit("slurm-requeue.sh", env={**project.env, **GIVEN}, cwd=project.path)
    ranks_wait(project)
    slurm.cancel(job, "--batch", "--signal=USR1")  # as --signal=B:USR1@300 does
    until(lambda: heard(project) == {0: [signal.SIGUSR1]}, 120, "USR1")
    slurm.cancel(job, "--batch", "--signal=TERM")  # of a program that has a handler for USR1, and saves on TERM
    slurm.start_again(job)
    assert slurm.wait(job)["JobState"] == "COMPLETED", project.log()
    said = [line for line in project.said("rank-0.said") if "digest" in line]
    assert [(line["first"], line["digest"]) for line in said] == [(0, digest(2)), (1, digest(2))], project.log()
    assert sorted(path.name for path in project.outside.glob("checkpoints/epoch*")) == ["epoch0", "epoch1"]


@pytest.mark.torch
@pytest.mark.slow
@pytest.mark.parametrize("script", ["slurm-torchrun", "slurm-elastic"])
def test_slurm_torchrun(slurm: Slurm, project: Project, script: str) -> None:
    pytest.importorskip("torch")
    job = slurm.submit(f"{script}.sh", env={**project.env, **GIVEN}, cwd=project.path)
    assert slurm.wait(job)["JobState"] == "COMPLETED", project.log()
    checked(project, 2 * NODES, NODES)
    assert set(slurm.left_by(job).values()) == {""}


def test_slurm_array(slurm: Slurm, project: Project) -> None:
    job = slurm.submit("slurm-array.sh", env={**project.env, **GIVEN}, cwd=project.path)
    slurm.wait_array(job)
    assert {slurm.job(f"{job}_{task}")["ExitCode"] for task in range(4)} == {"0:0"}, project.log()
    said = project.said("rank-0.said")
    assert {(line["digest"], line["seed"]) for line in said} == {(digest(2), seed) for seed in range(4)}
    assert len(project.run_dirs()) == 4


def test_gridengine(gridengine: GridEngine, project: Project) -> None:
    job = gridengine.submit("gridengine.sh", env={**project.env, **GIVEN}, cwd=project.path)
    done = gridengine.wait(job)
    assert done["exit_status"] == "0", project.log()
    checked(project, 1, 1)
    assert gridengine.left_by(job) == {done["hostname"]: ""}


def test_gridengine_array(gridengine: GridEngine, project: Project) -> None:
    job = gridengine.submit("gridengine-array.sh", env={**project.env, **GIVEN}, cwd=project.path)
    assert gridengine.wait_array(job, 10) == dict.fromkeys(range(1, 11), 0), project.log()
    said = project.said("rank-0.said")
    assert {(line["digest"], line["seed"]) for line in said} == {(digest(2), seed) for seed in range(1, 11)}
    assert len(project.run_dirs()) == 10


@pytest.mark.torch
@pytest.mark.slow
def test_gridengine_elastic(gridengine: GridEngine, project: Project) -> None:
    pytest.importorskip("torch")
    job = gridengine.submit("-pe", "mpi", "8", "gridengine-elastic.sh", env={**project.env, **GIVEN}, cwd=project.path)
    assert gridengine.wait(job)["exit_status"] == "0", project.log()
    checked(project, 2 * NODES, NODES)


def test_gridengine_mpirun(gridengine: GridEngine, project: Project) -> None:
    pytest.importorskip("mpi4py")
    given = {**project.env, **GIVEN, "PER_NODE": "-ppn 2", "RANKS": "8", "HPCSTAGE_MODE": "upfront"}
    job = gridengine.submit("-pe", "mpi", "8", "gridengine-mpirun.sh", env=given, cwd=project.path)
    assert gridengine.wait(job)["exit_status"] == "0", project.log()
    checked(project, 8, NODES)
    totals = project.record()["totals"]
    assert totals["source_bytes"] == DATA_BYTES, project.report()
    assert set(gridengine.left_by(job).values()) == {""}


def printed(project: Project, *words: str) -> str:
    """The job script that `hpcstage script` prints in the project, for two epochs of train.py."""
    venv = {"VIRTUAL_ENV": f"{project.path}/.venv"}
    command = ["--data", str(DATA), "--", "python", "train.py", "--data", str(DATA), "--epochs", "2"]
    line = f". .venv/bin/activate && VIRTUAL_ENV={venv['VIRTUAL_ENV']} hpcstage script {shlex.join([*words, *command])}"
    return project.nodes.run(1, "bash", "-c", line, user=True, cwd=project.path, env=project.env).stdout


def test_slurm_takes_what_is_printed(slurm: Slurm, project: Project) -> None:
    asked = ["--nodes", str(NODES), "--processes", "2", "--cpus", "4", "--gpus", "2", "--memory", "2G", "--time", "5"]
    script = printed(project, "slurm", *asked, "--partition", "batch", "--request", "--comment=it")
    job = slurm.submit(env=project.env, cwd=project.path, script=script)
    done = slurm.wait(job)
    assert done["JobState"] == "COMPLETED", project.log()
    assert (done["Partition"], done["TimeLimit"], done["Comment"]) == ("batch", "00:05:00", "it")
    checked(project, 2 * NODES, NODES)


def test_gridengine_takes_what_is_printed(gridengine: GridEngine, project: Project) -> None:
    script = printed(project, "gridengine", "--request", "-pe smp 2", "--time", "0:05:00", "--partition", "all.q")
    job = gridengine.submit(env=project.env, cwd=project.path, script=script)
    done = gridengine.wait(job)
    assert done["exit_status"] == "0", project.log()
    assert (done["qname"], done["slots"], done["granted_pe"]) == ("all.q", "2", "smp")
    checked(project, 1, 1)
