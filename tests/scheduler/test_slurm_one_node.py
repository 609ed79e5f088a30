"""hpcstage under a real Slurm: batch scripts of one node, ranks behind srun, exit codes."""

from __future__ import annotations

import re

import pytest
from clusterproject import DATA, FILES, NODES, Project, batch, behind, digest
from slurmlab import Slurm

pytest_plugins = ("clusterfixtures",)
pytestmark = pytest.mark.usefixtures("limited")


def test_a_batch_job_is_staged_and_leaves_nothing(slurm: Slurm, project: Project) -> None:
    job = slurm.submit(env={**project.env, "HPCSTAGE_MODE": "upfront"}, cwd=project.path, script=batch("--epochs 2"))
    done = slurm.wait(job)
    assert done["JobState"] == "COMPLETED", project.log()
    assert [said["digest"] for said in project.said("rank-*.said")] == [digest(2)]
    record = project.record()
    assert record["complete"] is True, record["problems"]
    where = record["environment"]
    assert (where["scheduler"], where["job_id"]) == ("slurm", str(job))
    assert where["local_dir"].endswith(f"/job.{job}")
    assert slurm.left_by(job) == {done["NodeList"]: ""}
    assert record["totals"]["local_bytes"] == 2 * record["totals"]["copied_bytes"] > 0
    assert re.search(rf"^staged +{FILES} of {FILES} files", project.report(), re.MULTILINE)


def test_exit_codes_reach_slurm(slurm: Slurm, project: Project) -> None:
    form = batch("--exit $SLURM_ARRAY_TASK_ID")
    job = slurm.submit("--array=0,1,7,125,255", env=project.env, cwd=project.path, script=form)
    slurm.wait_array(job)
    codes = {task: slurm.job(f"{job}_{task}")["ExitCode"] for task in (0, 1, 7, 125, 255)}
    assert codes == {task: f"{task}:0" for task in codes}, project.log()
    assert len(project.run_dirs()) == len(codes)


def test_a_command_that_dies_of_a_signal(slurm: Slurm, project: Project) -> None:
    script = f"#!/bin/bash\n. .venv/bin/activate\nexec hpcstage run --data {DATA} -- sh -c 'kill -KILL $$'\n"
    job = slurm.submit(env=project.env, cwd=project.path, script=script)
    assert slurm.wait(job)["ExitCode"] == "0:9", project.log()
    assert project.record()["run"]["signal"] == 9
    assert set(slurm.left_by(job).values()) == {""}


def test_ranks_behind_srun_share_a_daemon_on_each_node(slurm: Slurm, project: Project) -> None:
    ranks = NODES * 3
    shape = [f"--nodes={NODES}", "--ntasks-per-node=3"]
    job = slurm.submit(*shape, env=project.env, cwd=project.path, script=behind())
    assert slurm.wait(job)["JobState"] == "COMPLETED", project.log()
    said = project.said("rank-*.said")
    assert {line["digest"] for line in said} == {digest()}
    assert {line["rank"] for line in said} == set(range(ranks))
    assert {line["host"] for line in said} == set(slurm.nodes.names)
    assert len({line["node_dir"] for line in said}) == 1, "all ranks name the same node directory, each on its node"
    record = project.record()
    assert record["complete"] is True, record["problems"]
    assert sorted(node["host"] for node in record["nodes"]) == slurm.nodes.names
    assert slurm.left_by(job) == dict.fromkeys(slurm.nodes.names, "")


def test_the_highest_exit_code_of_ranks(slurm: Slurm, project: Project) -> None:
    script = behind("--exit $SLURM_NTASKS")
    job = slurm.submit("--nodes=2", "--ntasks-per-node=2", env=project.env, cwd=project.path, script=script)
    assert slurm.wait(job)["ExitCode"] == "4:0", project.log()
    assert len(re.findall("hpcstage report|report:", project.report())) == 1
