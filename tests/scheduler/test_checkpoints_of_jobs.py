"""Checkpoints of a job on several nodes of a real Slurm, whose local directories outlive the jobs: one node loses its
own, and the next job of the same script goes on."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from clusterproject import Project, needs_checkpoints
from nodeslab import LOCAL, UID, until
from slurmlab import Slurm

needs_checkpoints(of_nodes=True)
pytest_plugins = ("clusterfixtures",)

COUNT = 3
SCRIPT = """#!/bin/bash
. .venv/bin/activate
exec hpcstage run --checkpoint ckpt --protect 2+1 --drain-every 1000 -- srun python ranksteps.py {checkpoint}
"""


@pytest.fixture
def local(slurm: Slurm, project: Project) -> Iterator[Path]:
    """A directory on the local disk of each node that no job owns."""
    path = LOCAL / project.name
    slurm.nodes.all("install", "-d", "-o", str(UID), "-m", "700", path)
    yield path
    slurm.nodes.all("rm", "-rf", path)


def newest_protected(slurm: Slurm, local: Path, *, node: int = 1) -> int:
    """The newest step of which all parts are in a protected generation, as a node knows; -1: none."""
    found = slurm.nodes.run(node, "bash", "-c", f"cat {local}/*/*/out/shares/*.json; true").stdout
    known = [one for one in _values(found) if one["size"]]
    own = [(one, name) for one in known for name, of in one["entries"].items() if of["number"] == one["number"]]
    steps = [name for one, name in own if one["entries"][name]["marks"].keys() == {*one["nodes"]}]
    return max((int(name.removeprefix("step")) for name in steps), default=-1)


def _values(text: str) -> list[dict[str, Any]]:
    found, at, decoder = [], 0, json.JSONDecoder()
    while at < len(text):
        value, at = decoder.raw_decode(text, at)
        found.append(value)
    return found


def firsts(project: Project) -> dict[int, int]:
    """The first step of each rank of the last job."""
    said: list[dict[str, Any]] = sorted(project.said("steps-*.said"), key=lambda one: one["rank"])
    for path in project.outside.glob("steps-*.said"):
        path.unlink()
    return {one["rank"]: one["first"] for one in said}


def whole_in_dir(project: Project) -> list[int]:
    found = [path for path in (project.outside / "ckpt").glob("step*") if len(list(path.iterdir())) == COUNT]
    numbers = (path.name.removeprefix("step") for path in found)  # what was killed halfway is stepN.RUN-ID
    return sorted(int(number) for number in numbers if number.isdecimal())


def test_a_node_loses_its_directories_and_the_next_jobs_go_on(slurm: Slurm, project: Project, local: Path) -> None:
    env = {**project.env, "HPCSTAGE_LOCAL_DIR": str(local)}

    def submit() -> int:
        return slurm.submit(*slurm.first(COUNT), "--ntasks-per-node=1", env=env, cwd=project.path, script=SCRIPT)

    job = submit()
    until(lambda: newest_protected(slurm, local) >= 1, 60, "a protected step")
    slurm.cancel(job, "--full", "--signal=KILL")
    slurm.wait(job)
    before = newest_protected(slurm, local)
    assert firsts(project) == dict.fromkeys(range(COUNT), 0), project.log()
    assert whole_in_dir(project) == [], "nothing was copied so far"
    slurm.nodes.run(2, "bash", "-c", f"rm -r {local}/*")

    job = submit()
    until(lambda: newest_protected(slurm, local, node=2) > before + 1, 60, "a newer step, protected on that node, too")
    slurm.cancel(job)
    assert slurm.wait(job)["JobState"] == "CANCELLED", project.log()
    found = firsts(project)
    assert len(found) == COUNT
    assert len(set(found.values())) == 1, "also where the directories were gone"
    assert found[0] > before, "nothing that was protected is lost"

    (project.outside / "enough").touch()
    job = submit()
    assert slurm.wait(job)["JobState"] == "COMPLETED", project.log()
    again = firsts(project)
    assert len(set(again.values())) == 1
    assert again[0] > before + 1
    assert whole_in_dir(project) == list(range(again[0] + 1)), project.log()
