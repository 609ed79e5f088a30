"""Checkpoints and outputs under real schedulers, whose local directories go with the job: the next job of the same
script goes on where the one before was. What runs into a time limit of Slurm is in `test_slurm_signals`."""

from __future__ import annotations

import pytest
from clusterproject import Project
from gridlab import GridEngine
from nodeslab import until
from resuming import SCRIPT, check, drained, wait_for_some
from slurmlab import Slurm

pytest.importorskip("xxhash", reason="needs the extra `checkpoint`")
pytest.importorskip("xxhash", reason="needs the extra `checkpoint`")
pytest_plugins = ("clusterfixtures",)

OPTIONS = ("-cwd", "-j", "y", "-S", "/bin/bash", "-o", "job.out")


def test_scancel_and_the_next_job(slurm: Slurm, project: Project) -> None:
    job = slurm.submit(env=project.env, cwd=project.path, script=SCRIPT)
    wait_for_some(project)
    slurm.cancel(job)
    assert slurm.wait(job)["JobState"] == "CANCELLED", project.log()
    before = drained(project)
    (project.outside / "enough").touch()
    job = slurm.submit(env=project.env, cwd=project.path, script=SCRIPT)
    assert slurm.wait(job)["JobState"] == "COMPLETED", project.log()
    check(project, before)


def test_a_requeued_job(slurm: Slurm, project: Project) -> None:
    job = slurm.submit("--requeue", env=project.env, cwd=project.path, script=SCRIPT)
    wait_for_some(project)
    slurm.nodes.run(1, "scontrol", "requeue", str(job), user=True)
    until(lambda: slurm.job(job)["JobState"] == "PENDING", 30, "the job in the queue")
    before = drained(project)
    (project.outside / "enough").touch()
    slurm.nodes.run(1, "scontrol", "update", f"JobId={job}", "StartTime=now", user=True)
    assert slurm.wait(job, 200)["JobState"] == "COMPLETED", project.log()
    check(project, before)


def test_the_hard_limit_and_the_next_job(gridengine: GridEngine, project: Project) -> None:
    """Everything is killed at once, and the local directory deleted: DIR has what had been drained."""
    job = gridengine.submit(*OPTIONS, "-l", "h_rt=00:00:08", env=project.env, cwd=project.path, script=SCRIPT)
    wait_for_some(project)
    gridengine.wait(job)
    before = drained(project)
    (project.outside / "enough").touch()
    job = gridengine.submit(*OPTIONS, env=project.env, cwd=project.path, script=SCRIPT)
    assert gridengine.wait(job)["exit_status"] == "0", project.log()
    check(project, before)


def test_qdel_and_the_next_job(gridengine: GridEngine, project: Project) -> None:
    """With a notice before: the command ends, and what it had closed by then is in DIR."""
    job = gridengine.submit(*OPTIONS, "-notify", env=project.env, cwd=project.path, script=SCRIPT)
    wait_for_some(project)
    gridengine.cancel(job)
    gridengine.wait(job)
    before = drained(project)
    (project.outside / "enough").touch()
    job = gridengine.submit(*OPTIONS, env=project.env, cwd=project.path, script=SCRIPT)
    assert gridengine.wait(job)["exit_status"] == "0", project.log()
    check(project, before)


def test_a_rescheduled_job(gridengine: GridEngine, project: Project) -> None:
    """Grid Engine starts it anew, on another node, some seconds before it kills what runs: that start waits."""
    job = gridengine.submit(*OPTIONS, "-r", "y", env=project.env, cwd=project.path, script=SCRIPT)
    wait_for_some(project)
    gridengine.reschedule(job)
    until(lambda: len(project.said("steps-*.said")) == 2, 90, "the second start")
    (project.outside / "enough").touch()
    assert gridengine.wait(job)["exit_status"] == "0", project.log()
    assert "an earlier start of this job" in project.log()
    check(project, list(range(project.said("steps-*.said")[1]["first"])))
