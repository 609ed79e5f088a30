"""Checkpoints of jobs on several nodes of a real Grid Engine, whose local directories go with the job: a notice,
and none; the next job goes on where the one before was."""

from __future__ import annotations

import contextlib
from typing import Any

import psutil
from clusterproject import Project, needs_checkpoints, staging_of
from gridlab import GridEngine
from nodeslab import LOCAL, UID, until

needs_checkpoints(of_nodes=True)
pytest_plugins = ("clusterfixtures",)


COUNT = 3
SOME = 3
# A node needs a slot for hpcstage beside the one of its rank.
OPTIONS = ("-cwd", "-j", "y", "-S", "/bin/bash", "-o", "job.out", "-pe", "mpi", str(2 * COUNT))
SCRIPT = f"""#!/bin/bash
. .venv/bin/activate
exec hpcstage run --checkpoint ckpt --protect 2+1 -- mpirun -n {COUNT} -ppn 1 python ranksteps.py {{checkpoint}}
"""


def whole(project: Project) -> list[int]:
    """The steps in DIR that have the parts of all ranks."""
    found = [path for path in (project.outside / "ckpt").glob("step*") if len(list(path.iterdir())) == COUNT]
    numbers = (path.name.removeprefix("step") for path in found)  # what was killed halfway is stepN.RUN-ID
    return sorted(int(number) for number in numbers if number.isdecimal())


def starts(project: Project) -> list[dict[str, Any]]:
    return project.said("steps-*.said")


def submit(cluster: GridEngine, project: Project, *options: str) -> int:
    """A job that has some steps in DIR."""
    job = cluster.submit(*OPTIONS, *options, env=project.env, cwd=project.path, script=SCRIPT)
    until(lambda: len(whole(project)) >= SOME, 120, f"{SOME} steps in DIR")
    return job


def end_ranks_elsewhere(cluster: GridEngine, project: Project) -> None:
    """Ends the ranks that a cell without ENABLE_ADDGRP_KILL leaves on other nodes, when all of hpcstage has ended."""
    until(lambda: not staging_of(project), 120, "the end of all processes of hpcstage")
    for rank in cluster.nodes.processes(uid=UID):
        with contextlib.suppress(psutil.NoSuchProcess):  # one may go with another
            if any(word.endswith("ranksteps.py") for word in rank.cmdline()):
                rank.kill()


def check(project: Project, before: list[int]) -> None:
    """All ranks of the last start went on behind what was in DIR, on their local disks, and nothing is missing."""
    said = starts(project)
    assert len(said) == 2 * COUNT, project.log()
    firsts = sorted(one["first"] for one in said)
    assert firsts[:COUNT] == [0] * COUNT
    assert len(set(firsts[COUNT:])) == 1, project.log()
    assert firsts[-1] > before[-1], project.log()
    assert all(one["at"].startswith(f"{LOCAL}/") for one in said), project.log()
    assert len({one["host"] for one in said if one["first"]}) == COUNT
    assert whole(project) == list(range(firsts[-1] + 1)), project.log()


def finish(cluster: GridEngine, project: Project) -> None:
    """The next job of the script makes one more step."""
    (project.outside / "enough").touch()
    job = cluster.submit(*OPTIONS, env=project.env, cwd=project.path, script=SCRIPT)
    assert cluster.wait(job)["exit_status"] == "0", project.log()


def test_qdel_with_a_notice_and_the_next_job(gridengine: GridEngine, project: Project) -> None:
    job = submit(gridengine, project, "-notify")
    gridengine.cancel(job)
    gridengine.wait(job)
    end_ranks_elsewhere(gridengine, project)
    before = whole(project)
    finish(gridengine, project)
    check(project, before)


def test_qdel_without_a_notice_and_the_next_job(gridengine: GridEngine, project: Project) -> None:
    """Everything on the first node is killed at once, and its local directory deleted."""
    job = submit(gridengine, project)
    gridengine.cancel(job)
    gridengine.wait(job)
    end_ranks_elsewhere(gridengine, project)
    before = whole(project)
    finish(gridengine, project)
    check(project, before)
