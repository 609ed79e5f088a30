"""hpcstage under a real Grid Engine: batch jobs, ranks, qdel, soft and hard limits."""

from __future__ import annotations

import contextlib
import re
import signal

import psutil
import pytest
from clusterproject import DATA, FILES, NODES, Project, batch, behind, digest, front, heard, ranks_wait, staging_of
from gridlab import GridEngine
from nodeslab import LOCAL, UID, until

pytest_plugins = ("clusterfixtures",)

OPTIONS = ("-cwd", "-j", "y", "-S", "/bin/bash", "-o", "job.out")


def start_patient(cluster: GridEngine, project: Project, *options: str, words: str = "--patient") -> int:
    """A job that has read its dataset and waits for a signal."""
    job = cluster.submit(*OPTIONS, *options, env=project.env, cwd=project.path, script=batch(words))
    ranks_wait(project)
    return job


def test_a_batch_job_is_staged_and_leaves_nothing(gridengine: GridEngine, project: Project) -> None:
    env = {**project.env, "HPCSTAGE_MODE": "upfront"}
    job = gridengine.submit(*OPTIONS, env=env, cwd=project.path, script=batch("--epochs 2"))
    done = gridengine.wait(job)
    assert done["exit_status"] == "0", project.log()
    assert [said["digest"] for said in project.said("rank-*.said")] == [digest(2)]
    record = project.record()
    assert record["complete"] is True, record["notes"]
    where = record["run"]
    assert (where["scheduler"], where["job_id"]) == ("gridengine", str(job))
    assert where["local_dir"].endswith(f"/{job}.1.all.q")
    assert gridengine.left_by(job) == {done["hostname"]: ""}
    assert re.search(rf"^staged +{FILES} of {FILES} files", project.report(), re.MULTILINE)


SUBMITS = """#!/bin/bash
. .venv/bin/activate
exec hpcstage run --data {data} -- qsub -V -sync y -cwd -j y -S /bin/bash -o inner.out inner.sh
"""
"""A job whose command submits another with all of its variables, and waits for it."""


def test_a_job_that_the_command_of_a_run_submits_stages_for_itself(gridengine: GridEngine, project: Project) -> None:
    (project.outside / "inner.sh").write_text(batch("--epochs 2"))
    job = gridengine.submit(*OPTIONS, env=project.env, cwd=project.path, script=SUBMITS.format(data=DATA))
    done = gridengine.wait(job)
    assert done["exit_status"] == "0", project.log()
    assert [said["digest"] for said in project.said("rank-*.said")] == [digest(2)]
    records = [project.record(f"hpcstage-runs/{path.name}") for path in project.run_dirs()]
    outer, inner = sorted(records, key=lambda record: int(record["run"]["job_id"]))
    assert outer["run"]["job_id"] == str(job)
    assert outer["coverage"]["opens"] == 0
    assert inner["coverage"]["opens"] == 2 * FILES


def test_qdel_with_notify_reaches_the_command_once(gridengine: GridEngine, project: Project) -> None:
    """Grid Engine signals the process group, so nothing is passed on: a second USR2 would end a program that is saving
    its state. It does so twice, some milliseconds apart, of which a busy machine may hear both."""
    job = start_patient(gridengine, project, "-notify", words="--patient --stubborn")
    gridengine.cancel(job)
    gridengine.wait(job)
    assert set(heard(project)[0]) == {signal.SIGUSR2}, project.log()
    assert not any(line["passed_on"] for line in project.said("rank-*.said") if "signal" in line)


def test_qdel_without_notify_kills_and_leaves_a_report(gridengine: GridEngine, project: Project) -> None:
    job = start_patient(gridengine, project)
    gridengine.cancel(job)
    gridengine.wait(job)
    assert heard(project) == {}
    assert "end not seen" in project.report()


def test_the_soft_limit_is_a_warning(gridengine: GridEngine, project: Project) -> None:
    words = f"--patient --leave-on {int(signal.SIGUSR1)}"
    job = start_patient(gridengine, project, "-l", "s_rt=00:00:05,h_rt=00:01:00", words=words)
    done = gridengine.wait(job)
    assert heard(project) == {0: [signal.SIGUSR1]}, project.log()
    assert done["exit_status"] == str(40 + signal.SIGUSR1)
    record = project.record()
    assert record["complete"] is True, record["notes"]
    assert gridengine.left_by(job) == {done["hostname"]: ""}


def test_the_hard_limit(gridengine: GridEngine, project: Project) -> None:
    words = f"--patient --leave-on {int(signal.SIGUSR2)}"
    job = start_patient(gridengine, project, "-notify", "-l", "h_rt=00:00:06", words=words)
    gridengine.wait(job)
    assert heard(project) == {0: [signal.SIGUSR2]}, project.log()
    assert project.report()


def test_ranks_behind_mpirun(gridengine: GridEngine, project: Project) -> None:
    pytest.importorskip("mpi4py")
    script = behind(launcher="mpirun -n 8 -ppn 2")
    job = gridengine.submit(*OPTIONS, "-pe", "mpi", "8", env=project.env, cwd=project.path, script=script)
    assert gridengine.wait(job)["exit_status"] == "0", project.log()
    said = project.said("rank-*.said")
    assert [line["digest"] for line in said] == [digest()] * 8
    assert {line["host"] for line in said} == set(gridengine.nodes.names)
    assert len({(line["host"], line["node_dir"]) for line in said}) == NODES, "one node directory on each node"
    assert set(gridengine.left_by(job).values()) == {""}


def test_one_slot_on_each_node_is_left_to_mpirun(gridengine: GridEngine, project: Project) -> None:
    pytest.importorskip("mpi4py")
    pytest.importorskip("xxhash", reason="needs the extra `checkpoint`")
    script = """#!/bin/bash
. .venv/bin/activate
exec hpcstage run --checkpoint ckpt -- mpirun -n 3 -ppn 1 sh -c 'echo {checkpoint} on $(hostname)'
"""
    job = gridengine.submit(*OPTIONS, "-pe", "mpi2", "3", env=project.env, cwd=project.path, script=script)
    assert gridengine.wait(job)["exit_status"] == "0", project.log()
    assert project.log().count(f"{project.path}/ckpt on ") == 3, project.log()
    assert "gave a node one slot" in project.log()


def test_qdel_of_a_job_of_several_nodes(gridengine: GridEngine, project: Project) -> None:
    pytest.importorskip("mpi4py")
    script = front(f"--patient --leave-on {int(signal.SIGUSR2)}", launcher="mpirun -n 4 -ppn 2")
    job = gridengine.submit(*OPTIONS, "-notify", "-pe", "mpi", "4", env=project.env, cwd=project.path, script=script)
    ranks_wait(project, 4)
    gridengine.cancel(job)
    gridengine.wait(job)
    record = project.record()
    assert record["complete"] is True, record["notes"]
    assert record["run"]["signal"] == signal.SIGUSR2, "MPICH's mpirun has no handler for it"
    assert set(gridengine.left_by(job).values()) == {""}


def test_qdel_without_notify_of_a_job_of_several_nodes(gridengine: GridEngine, project: Project) -> None:
    pytest.importorskip("mpi4py")
    script = front("--patient", launcher="mpirun -n 8 -ppn 2")
    job = gridengine.submit(*OPTIONS, "-pe", "mpi", "8", env=project.env, cwd=project.path, script=script)
    ranks_wait(project, 8)
    gridengine.cancel(job)
    gridengine.wait(job)
    until(lambda: not staging_of(project), 120, "the end of all processes of hpcstage")
    for rank in gridengine.nodes.processes(uid=UID):  # without ENABLE_ADDGRP_KILL the cell leaves those of other nodes
        with contextlib.suppress(psutil.NoSuchProcess):  # one may go with another
            assert "train.py" in rank.cmdline()
            rank.kill()
    assert "end not seen" in project.report()
    places = [gridengine.nodes.run(index, "ls", LOCAL) for index in gridengine.nodes.nodes]
    assert not any(f"{job}.1.all.q" in place.stdout for place in places)
