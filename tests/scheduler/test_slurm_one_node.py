"""hpcstage under a real Slurm: a batch script of one node, and what a job leaves there."""

from __future__ import annotations

import re

import pytest
from clusterproject import FILES, Project, batch, digest
from nodeslab import LOCAL, UID
from slurmlab import Slurm

pytest_plugins = ("clusterfixtures",)
pytestmark = pytest.mark.usefixtures("limited")


def test_a_batch_job_is_staged_and_leaves_nothing(slurm: Slurm, project: Project) -> None:
    job = slurm.submit(env={**project.env, "HPCSTAGE_MODE": "upfront"}, cwd=project.path, script=batch("--epochs 2"))
    done = slurm.wait(job)
    assert done["JobState"] == "COMPLETED", project.log()
    assert [said["digest"] for said in project.said("rank-*.said")] == [digest(2)]
    record = project.record()
    assert record["complete"] is True, record["notes"]
    where = record["run"]
    assert (where["scheduler"], where["job_id"]) == ("slurm", str(job))
    assert where["local_dir"].endswith(f"/job.{job}")
    assert slurm.left_by(job) == {done["NodeList"]: ""}
    assert record["totals"]["local_bytes"] == 2 * record["totals"]["copied_bytes"] > 0
    assert re.search(rf"^staged +{FILES} of {FILES} files", project.report(), re.MULTILINE)


def test_the_epilog_notes_what_a_job_leaves(slurm: Slurm, project: Project) -> None:
    script = f'#!/bin/sh\nmkdir -p "$TMPDIR/hpcstage-{UID}/run/store"\n'
    job = slurm.submit(env=project.env, cwd=project.path, script=script)
    done = slurm.wait(job)
    assert f"hpcstage-{UID}/run/store" in slurm.left_by(job)[done["NodeList"]]
    assert f"job.{job}" not in slurm.nodes.run(1, "ls", LOCAL).stdout.split()
