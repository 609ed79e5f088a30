"""Checkpoints and outputs under real schedulers, whose local directories go with the job: the next job of the same
script goes on where the one before was. What runs into a time limit of Slurm is in `test_slurm_signals`, what is ended
on several nodes of Grid Engine in `test_grid_checkpoints`."""

from __future__ import annotations

from clusterproject import Project, needs_checkpoints
from gridlab import GridEngine
from nodeslab import until
from resuming import SCRIPT, check, drained, wait_for_some
from slurmlab import Slurm

needs_checkpoints()
pytest_plugins = ("clusterfixtures",)

OPTIONS = ("-cwd", "-j", "y", "-S", "/bin/bash", "-o", "job.out")


def test_a_requeued_job(slurm: Slurm, project: Project) -> None:
    job = slurm.submit("--requeue", env=project.env, cwd=project.path, script=SCRIPT)
    wait_for_some(project)
    slurm.nodes.run(1, "scontrol", "requeue", str(job), user=True)
    until(lambda: slurm.job(job)["JobState"] == "PENDING", 120, "the job in the queue")
    before = drained(project)
    (project.outside / "enough").touch()
    slurm.start_again(job)
    assert slurm.wait(job)["JobState"] == "COMPLETED", project.log()
    check(project, before)


def test_a_rescheduled_job(gridengine: GridEngine, project: Project) -> None:
    """Grid Engine starts it anew, on another node, some seconds before it kills what runs: that start watches the
    earlier one."""
    job = gridengine.submit(*OPTIONS, "-r", "y", env=project.env, cwd=project.path, script=SCRIPT)
    wait_for_some(project)
    gridengine.reschedule(job)
    until(lambda: len(project.said("steps-*.said")) == 2, 120, "the second start")
    (project.outside / "enough").touch()
    assert gridengine.wait(job)["exit_status"] == "0", project.log()
    assert any("watching for" in line and f" job {job}:" in line for line in project.log().splitlines()), project.log()
    check(project, list(range(project.said("steps-*.said")[1]["first"])))
