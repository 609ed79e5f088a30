"""Checkpoints under real schedulers, whose local directories go with the job: the next job of the same script goes on
where the one before was."""

from __future__ import annotations

import os

import pytest
from clusterproject import Project
from gridlab import GridEngine
from nodeslab import LOCAL, until
from slurmlab import Slurm

pytest.importorskip("xxhash", reason="needs the extra `checkpoint`")
pytest.importorskip("zstandard", reason="needs the extra `checkpoint`")
pytest_plugins = ("clusterfixtures",)

SCRIPT = """#!/bin/bash
. .venv/bin/activate
exec hpcstage run --checkpoint ckpt -- python steps.py {checkpoint}
"""
OPTIONS = ("-cwd", "-j", "y", "-S", "/bin/bash", "-o", "job.out")
SOME = 3


def drained(project: Project) -> list[int]:
    """The steps in DIR."""
    there = project.outside / "ckpt"
    names = [name for name in os.listdir(there) if not name.startswith(".")] if there.exists() else []
    assert all(name.removeprefix("step").isdigit() for name in names), names
    return sorted(int(name.removeprefix("step")) for name in names)


def wait_for_some(project: Project) -> None:
    until(lambda: len(drained(project)) >= SOME, 60, f"{SOME} steps in DIR")


def check(project: Project, before: list[int]) -> None:
    """The second process went on behind the last step that the first one had drained, from its local disk."""
    first, second = project.said("steps-*.said")
    assert (first["first"], second["first"]) == (0, before[-1] + 1), project.log()
    assert second["whole"]
    assert second["at"].startswith(f"{LOCAL}/")
    assert drained(project) == list(range(second["first"] + 1))
    assert "verified" in project.record(f"hpcstage-runs/{project.run_dirs()[-1].name}")["checkpoints"]["restored"]


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
