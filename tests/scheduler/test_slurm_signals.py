"""scancel, warnings and time limits under a real Slurm: the command hears of them, nothing stays, there is a report."""

from __future__ import annotations

import signal

import pytest
import resuming
from clusterproject import Limited, Project, batch, behind, heard, needs_checkpoints, ranks_wait
from nodeslab import until
from slurmlab import Slurm

pytest_plugins = ("clusterfixtures",)
pytestmark = pytest.mark.usefixtures("limited")

LEFT_ON_TERM = 40 + signal.SIGTERM
LEFT_ON_USR1 = 40 + signal.SIGUSR1


def test_scancel_lets_the_command_save_and_leaves_nothing(slurm: Slurm, project: Project) -> None:
    job = slurm.submit(env=project.env, cwd=project.path, script=batch("--patient"))
    ranks_wait(project)
    slurm.cancel(job)
    done = slurm.wait(job)
    assert done["JobState"] == "CANCELLED", project.log()
    assert heard(project) == {0: [signal.SIGTERM]}
    record = project.record()
    assert record["complete"] is True, record["notes"]
    assert record["run"]["exit_code"] == LEFT_ON_TERM
    assert slurm.left_by(job) == {done["NodeList"]: ""}


def test_scancel_reaches_every_rank_behind_srun(slurm: Slurm, project: Project) -> None:
    shape = ["--nodes=2", "--ntasks-per-node=2"]
    job = slurm.submit(*shape, env=project.env, cwd=project.path, script=behind("--patient"))
    ranks_wait(project, 4)
    slurm.cancel(job)
    assert slurm.wait(job)["JobState"] == "CANCELLED", project.log()
    assert heard(project) == {rank: [signal.SIGTERM] for rank in range(4)}
    record = project.record()
    assert record["complete"] is True, record["notes"]
    assert set(slurm.left_by(job).values()) == {""}


def test_a_signal_for_the_batch_script(slurm: Slurm, project: Project) -> None:
    script = batch(f"--patient --leave-on {int(signal.SIGUSR2)}")
    job = slurm.submit(env=project.env, cwd=project.path, script=script)
    ranks_wait(project)
    slurm.cancel(job, "--batch", "--signal=USR1")
    until(lambda: heard(project) == {0: [signal.SIGUSR1]}, 120, "USR1")
    slurm.cancel(job, "--batch", "--signal=USR2")
    done = slurm.wait(job)
    assert done["ExitCode"] == f"{40 + signal.SIGUSR2}:0", project.log()
    assert heard(project) == {0: [signal.SIGUSR1, signal.SIGUSR2]}
    record = project.record()
    assert record["complete"] is True, record["notes"]
    assert slurm.left_by(job) == {done["NodeList"]: ""}


def test_a_command_that_ignores_everything_is_killed_and_has_a_report(slurm: Slurm, project: Project) -> None:
    job = slurm.submit(env=project.env, cwd=project.path, script=batch("--patient --stubborn"))
    ranks_wait(project)
    slurm.cancel(job)
    assert slurm.wait(job)["JobState"] == "CANCELLED"
    assert heard(project)[0] == [signal.SIGTERM]
    assert "end not seen" in project.report()


def test_a_warning_before_the_time_limit(slurm: Slurm, limited: Limited) -> None:
    project, job = limited.warned
    done = slurm.wait(job)
    assert done["ExitCode"] == f"{LEFT_ON_USR1}:0", project.log()
    assert heard(project) == {0: [signal.SIGUSR1]}
    record = project.record()
    assert record["complete"] is True, record["notes"]
    assert slurm.left_by(job) == {done["NodeList"]: ""}


def test_a_warning_for_ranks_behind_srun(slurm: Slurm, limited: Limited) -> None:
    project, job = limited.ranks_warned
    done = slurm.wait(job)
    assert done["ExitCode"] == f"{LEFT_ON_USR1}:0", project.log()
    assert heard(project) == {rank: [signal.SIGUSR1] for rank in range(4)}
    record = project.record()
    assert record["complete"] is True, f"{record['problems']}\n{project.log()}"
    assert set(slurm.left_by(job).values()) == {""}


@pytest.mark.slow
def test_the_time_limit(slurm: Slurm, limited: Limited) -> None:
    project, job = limited.unwarned
    done = slurm.wait(job)
    assert done["JobState"] == "TIMEOUT", project.log()
    assert heard(project) == {0: [signal.SIGTERM]}
    record = project.record()
    assert record["complete"] is True, record["notes"]
    assert record["run"]["exit_code"] == LEFT_ON_TERM
    assert slurm.left_by(job) == {done["NodeList"]: ""}


@pytest.mark.slow
def test_the_time_limit_and_the_next_job(slurm: Slurm, limited: Limited) -> None:
    needs_checkpoints()
    project, job = limited.resumed
    assert slurm.wait(job)["JobState"] == "TIMEOUT", project.log()
    before = resuming.drained(project)
    assert len(before) >= resuming.SOME, project.log()
    assert resuming.logged(project) == list(range(len(resuming.logged(project))))
    (project.outside / "enough").touch()
    job = slurm.submit(env=project.env, cwd=project.path, script=resuming.SCRIPT)
    assert slurm.wait(job)["JobState"] == "COMPLETED", project.log()
    resuming.check(project, before)
