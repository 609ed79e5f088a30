"""`hpcstage doctor` in a real job tells the nodes, the directory that the site made, and which MPI connects them."""

from __future__ import annotations

import json

import pytest
from clusterproject import DATA, Project
from nodeslab import LOCAL
from slurmlab import Slurm

pytest.importorskip("mpi4py")
pytest_plugins = ("clusterfixtures",)
SCRIPT = f"""#!/bin/bash
. .venv/bin/activate
hpcstage doctor --json --data {DATA} -- srun python train.py >sound.json
echo $? >sound.code
unset TMPDIR
hpcstage doctor --json -- python -E train.py >faulty.json
echo $? >faulty.code
"""


def test_in_a_job_of_two_nodes(slurm: Slurm, project: Project) -> None:
    job = slurm.submit("--nodes=2", env=project.env, cwd=project.path, script=SCRIPT)
    done = slurm.wait(job)
    assert done["JobState"] == "COMPLETED", project.log()
    codes = {name: int((project.outside / f"{name}.code").read_text()) for name in ("sound", "faulty")}
    told = {name: json.loads((project.outside / f"{name}.json").read_text())["findings"] for name in codes}
    assert codes == {"sound": 0, "faulty": 1}, told
    sound = {(item["check"], item["level"]): item["text"] for item in told["sound"]}
    assert f"slurm, job {job}, 2 nodes: {done['NodeList']}" == sound["scheduler", "ok"]
    assert sound["local directory", "ok"].startswith(f"{LOCAL}/job.{job} ($TMPDIR={LOCAL}/job.{job}), on tmpfs: ")
    assert sound["nodes", "ok"].endswith(f" connects {done['NodeList']}")
    assert sound[f"dataset {DATA}", "ok"].startswith(f"{DATA} can be read")
    assert sound["python", "ok"]
    faulty = {item["check"]: item for item in told["faulty"] if item["level"] == "error"}
    assert faulty["local directory"]["remedy"].startswith("ask the scheduler for local disk")
    assert set(slurm.left_by(job).values()) == {""}
