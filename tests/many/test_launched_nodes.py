"""Nodes that a scheduler's launcher reaches, in front of it and behind it, with stand-ins for the launchers."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import manylab
import psutil
import pytest
from conftest import Hpcstage, problems, wait_for
from fakecluster import FakeCluster

Tree = Callable[..., Path]
pytest_plugins = ("fakeclusterfixtures",)
pytestmark = [
    manylab.needs_mpi,
    pytest.mark.root,
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root for nodes of their own"),
]


class Job:
    """A job's script on the first node."""

    def __init__(self, hpcstage: Hpcstage, cluster: FakeCluster, scheduler: str) -> None:
        self.hpcstage = hpcstage
        self.cluster = cluster
        kept = {name: value for name, value in hpcstage.env.items() if name != "HPCSTAGE_LOCAL_DIR"}
        self.env = {**kept, **cluster.job(scheduler)}

    def command(self, words: list[str]) -> list[str]:
        """A script's line."""
        return self.cluster.on(self.cluster.nodes[0], words)

    def run(self, words: list[str], **env: str) -> subprocess.CompletedProcess[bytes]:
        """The script, to its end."""
        return subprocess.run(
            self.command(words),
            env={**self.env, **env},
            cwd=self.hpcstage.cwd,
            capture_output=True,
            timeout=300,
            check=False,
        )


def in_front(hpcstage: Hpcstage, data: Path, launcher: list[str], *options: str, epochs: int = 2) -> list[str]:
    _, reader = manylab.write_programs(hpcstage.cwd)
    program = [*launcher, str(reader), str(data), str(epochs), "0.002"]
    return [sys.executable, "-m", "hpcstage", "run", *options, "--data", str(data), "--", *program]


def test_behind_srun(hpcstage: Hpcstage, make_tree: Tree, cluster: FakeCluster) -> None:
    data = make_tree(files=60)
    _, reader = manylab.write_programs(hpcstage.cwd)
    program = (sys.executable, reader, data, "2", "0.002")
    words = ["srun", *hpcstage.command("run", "--nodes", "2", "--data", data, "--", *program)]
    done = Job(hpcstage, cluster, "slurm").run([os.fsdecode(word) for word in words])
    assert done.returncode == 0, done.stderr
    assert done.stderr.count(b"nodes is 2, the scheduler gave 3") == 1, "one of the six ranks says it"
    assert manylab.written(hpcstage.cwd, 6)[0] == manylab.expected(data, 6)
    parts = manylab.parts_of(hpcstage)
    assert [part["host"] for part in parts] == cluster.nodes
    assert all(part["complete"] for part in parts)
    assert len(hpcstage.records()) == 1


def test_in_front_of_pbs(hpcstage: Hpcstage, make_tree: Tree, cluster: FakeCluster) -> None:
    """The nodes come up; MPI across them needs the real scheduler, so without it each stages alone, and it is said."""
    data = make_tree(files=30)
    ranks, _ = manylab.write_programs(hpcstage.cwd)
    done = Job(hpcstage, cluster, "pbs").run(in_front(hpcstage, data, [sys.executable, str(ranks), "2"]))
    assert done.returncode == 0, done.stderr
    assert manylab.written(hpcstage.cwd, 2)[0] == manylab.expected(data, 2)
    parts = manylab.parts_of(hpcstage)
    assert [part["host"] for part in parts] == cluster.nodes
    assert all(part["complete"] for part in parts)
    assert cluster.job_output() == "", "the agents print nothing into the job's output"
    told = {note["id"] for note in manylab.record_of(hpcstage)["notes"]}
    assert "node-missing" not in told, "two agents on a node are one node"


def test_no_node_executes_a_script_that_others_could_replace(
    hpcstage: Hpcstage, make_tree: Tree, cluster: FakeCluster
) -> None:
    data = make_tree(files=30)
    ranks, _ = manylab.write_programs(hpcstage.cwd)
    cluster.base.chmod(0o755)
    everybodys = cluster.base / "everybodys"
    everybodys.mkdir()
    everybodys.chmod(0o777)
    run_dir = everybodys / "run"
    words = in_front(hpcstage, data, [sys.executable, str(ranks), "2"], "--run-dir", str(run_dir))
    done = Job(hpcstage, cluster, "pbs").run(words, XDG_STATE_HOME=str(everybodys / "state"))
    assert done.returncode == 0, done.stderr
    assert manylab.written(hpcstage.cwd, 2)[0] == manylab.expected(data, 2)
    assert not (cluster.base / "job.out").exists(), "pbsdsh was not asked for anything"
    assert f"everybody may write to {everybodys}" in done.stderr.decode()
    assert "--run-dir" in done.stderr.decode()


def test_the_sites_way_to_start_mpi_reaches_our_mpiexec(
    hpcstage: Hpcstage, make_tree: Tree, cluster: FakeCluster
) -> None:
    """Where the user's mpirun needs a remote shell or an interface to be named, ours needs them, too."""
    data = make_tree(files=30)
    ranks, _ = manylab.write_programs(hpcstage.cwd)
    site = {
        "HYDRA_LAUNCHER": "rsh",
        "HYDRA_LAUNCHER_EXEC": os.fspath(cluster.base / "bin" / "site-rsh"),
        "HYDRA_IFACE": "lo",
    }
    words = in_front(hpcstage, data, [sys.executable, str(ranks), "2"], "--mode", "upfront")
    done = Job(hpcstage, cluster, "pbs").run(words, **site)
    assert done.returncode == 0, done.stderr
    record = manylab.record_of(hpcstage)
    assert problems(record) == [], done.stderr
    assert record["totals"]["peer_bytes"] == 2 * record["totals"]["source_bytes"] > 0


def test_why_mpi_does_not_connect_the_nodes_is_said_at_once(
    hpcstage: Hpcstage, make_tree: Tree, cluster: FakeCluster
) -> None:
    data = make_tree(files=30)
    rsh = cluster.base / "bin" / "broken-rsh"
    rsh.write_text(
        "#!/bin/sh\necho 'rsh: node2: Connection refused' >&2\necho 'see the manual' >&2\nsleep 0.3\nexit 255\n"
    )
    rsh.chmod(0o755)
    site = {"HYDRA_LAUNCHER": "rsh", "HYDRA_LAUNCHER_EXEC": os.fspath(rsh)}
    job = Job(hpcstage, cluster, "pbs")
    words = in_front(hpcstage, data, ["sh", "-c", "read line"])
    process = subprocess.Popen(
        job.command(words), env={**job.env, **site}, cwd=hpcstage.cwd, stdin=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stderr is not None
    assert process.stdin is not None
    try:
        line = next(line for line in process.stderr if b"connected" in line)
    finally:
        process.stdin.close()
        process.wait(300)
        process.stderr.close()
    assert b"rsh: node2: Connection refused" in line
    (problem,) = problems(manylab.record_of(hpcstage))
    assert problem["id"] == "group-lost"
    assert "rsh: node2: Connection refused" in problem["text"]


def test_a_node_that_does_not_come_up_is_named_with_its_reason(
    hpcstage: Hpcstage, make_tree: Tree, cluster: FakeCluster
) -> None:
    data = make_tree(files=30)
    lost = cluster.disk("node3")
    lost.chmod(0o700)
    (lost / f"hpcstage-{os.geteuid()}").symlink_to("/nowhere")
    try:
        done = Job(hpcstage, cluster, "slurm").run(in_front(hpcstage, data, ["srun", sys.executable]))
    finally:
        (lost / f"hpcstage-{os.geteuid()}").unlink()
    assert done.returncode == 0, done.stderr
    assert manylab.written(hpcstage.cwd, 6)[0] == manylab.expected(data, 6)
    (missing,) = [part for part in manylab.parts_of(hpcstage) if part["host"] == "node3"]
    (problem,) = missing["problems"]
    assert problem["id"] == "node-missing"
    assert "symbolic link" in problem["text"]
    assert "node3" in done.stderr.decode()


def test_a_node_that_is_lost_is_not_waited_for(hpcstage: Hpcstage, make_tree: Tree, cluster: FakeCluster) -> None:
    """Its pbsdsh never returns, and nothing answers there any more."""
    data = make_tree(files=30)
    go_on = hpcstage.cwd / "go-on"
    wait = f"until [ -e {go_on} ]; do sleep 0.05; done"
    job = Job(hpcstage, cluster, "pbs")
    words = [sys.executable, "-m", "hpcstage", "run", "--drain", "3", "--data", str(data), "--", "sh", "-c", wait]
    process = subprocess.Popen(job.command(words), env=job.env, cwd=hpcstage.cwd, stderr=subprocess.PIPE)
    try:
        wait_for(lambda: len(of_node(process, "node3")) >= 2, 120, "agent and daemon on all nodes")
        manylab.kill(of_node(process, "node3"))
        go_on.touch()
        asked_at = time.monotonic()
        _, said = process.communicate(timeout=300)
        took_s = time.monotonic() - asked_at
    finally:
        go_on.touch()
        process.wait(300)
        shutil.rmtree(cluster.disk("node3"))
        cluster.disk("node3").mkdir()
    assert process.returncode == 0, said
    assert took_s < 50, "3 s for the answer, not the minute that a removal may take"
    assert "node3" in said.decode()


def of_node(process: subprocess.Popen[bytes], node: str) -> list[psutil.Process]:
    """The run's processes of hpcstage on a node."""
    found = []
    for child in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            ours = any(word.startswith("hpcstage.") for word in child.cmdline())
            if ours and child.environ().get("HOSTNAME") == node and child.pid != process.pid:
                found.append(child)
    return found


def test_a_launcher_that_fails_leaves_the_first_node_staging(
    hpcstage: Hpcstage, make_tree: Tree, cluster: FakeCluster
) -> None:
    data = make_tree(files=30)
    (cluster.base / "bin" / "pbsdsh").write_text("#!/bin/sh\necho 'pbsdsh: task failed to start' >&2\nexit 1\n")
    ranks, _ = manylab.write_programs(hpcstage.cwd)
    done = Job(hpcstage, cluster, "pbs").run(in_front(hpcstage, data, [sys.executable, str(ranks), "2"]))
    assert done.returncode == 0, done.stderr
    assert manylab.written(hpcstage.cwd, 2)[0] == manylab.expected(data, 2)
    assert "task failed to start" in done.stderr.decode()
    parts = manylab.parts_of(hpcstage)
    assert [part["complete"] for part in parts] == [True, False, False]


def over_ssh(hpcstage: Hpcstage, cluster: FakeCluster, data: Path, *options: str) -> list[str]:
    """MPICH's mpirun, two ranks on each node, each behind hpcstage. None fails: it would have all others killed."""
    program = hpcstage.cwd / "rank.py"
    program.write_text(RANK_OF_MPI)
    launcher = ["mpiexec", "-launcher", "ssh", "-launcher-exec", os.fspath(cluster.base / "bin" / "ssh")]
    hosts = ["-iface", "lo", "-f", os.fspath(cluster.base / "hosts")]
    words = [*launcher, *hosts, "-n", "6", "-ppn", "2"]
    staged = hpcstage.command("run", *options, "--data", data, "--", sys.executable, program, data)
    return [*words, *map(os.fsdecode, staged)]


RANK_OF_MPI = """
import hashlib, os, sys
root, rank = sys.argv[1], int(os.environ.get("PMI_RANK") or os.environ["OMPI_COMM_WORLD_RANK"])
total = hashlib.sha256()
for name in sorted(os.path.join(d, f) for d, _, files in os.walk(root) for f in files):
    with open(name, "rb") as file:
        total.update(file.read())
with open(f"out.{rank}", "w") as file:
    file.write(total.hexdigest() + " " + os.environ.get("HPCSTAGE_NODE_DIR", ""))
"""


def records_by_host(hpcstage: Hpcstage) -> dict[str, dict[str, Any]]:
    """The records of nodes that stage alone."""
    found = [json.loads(path.read_text()) for path in hpcstage.records()]
    assert len(found) == len({record["run"]["host"] for record in found})
    return {record["run"]["host"]: record for record in found}


def test_behind_mpirun_over_ssh_each_node_has_a_record_of_its_own(
    hpcstage: Hpcstage, make_tree: Tree, cluster: FakeCluster
) -> None:
    """The ranks have the variables of the first node, whose name must not become that of all."""
    data = make_tree(files=30)
    done = Job(hpcstage, cluster, "slurm").run(over_ssh(hpcstage, cluster, data, "--local-dir", str(cluster.local)))
    assert done.returncode == 0, done.stderr
    digests, places = manylab.written(hpcstage.cwd, 6)
    assert len(set(digests)) == 1
    assert all(places), "all ranks are served"
    found = records_by_host(hpcstage)
    assert sorted(found) == cluster.nodes
    for host, record in found.items():
        assert record["complete"] is True, record["notes"]
        assert [node["host"] for node in record["nodes"]] == [host]
        assert [problem["id"] for problem in problems(record)] == ["alone"]
        (part,) = hpcstage.cwd.glob(f"hpcstage-runs/*/nodes/{host}.json")
        assert len(json.loads(part.read_text())["processes"]) == 2, "one daemon serves all ranks of a node"
    assert "no report from" not in done.stderr.decode()


def test_behind_mpirun_over_ssh_on_nodes_without_the_jobs_directory(
    hpcstage: Hpcstage, make_tree: Tree, cluster: FakeCluster
) -> None:
    """Schedulers make it for the processes that they start."""
    data = make_tree(files=30)
    (cluster.disk(cluster.nodes[0]) / "job").mkdir()
    done = Job(hpcstage, cluster, "pbs").run(over_ssh(hpcstage, cluster, data), TMPDIR=str(cluster.local / "job"))
    assert done.returncode == 0, done.stderr
    digests, places = manylab.written(hpcstage.cwd, 6)
    assert len(set(digests)) == 1
    assert [bool(place) for place in places] == [True, True, False, False, False, False]
    said = [line for line in done.stderr.decode().splitlines() if "no node-local directory" in line]
    assert len(said) == 2, "one line on each node, not one of each rank"
    for node in cluster.nodes[1:]:
        (line,) = [line for line in said if node in line]
        assert "not for those that come by ssh" in line
    found = records_by_host(hpcstage)
    assert found[cluster.nodes[0]]["complete"] is True
    parts = [json.loads(path.read_text()) for path in hpcstage.cwd.glob("hpcstage-runs/*/run.part.json")]
    aside = {part["host"]: part["problems"][0]["text"] for part in parts if part["aside"]}
    assert sorted(aside) == cluster.nodes[1:]
    assert "no node-local directory" in aside[cluster.nodes[1]]


def test_a_node_that_never_joined_is_not_waited_for_at_the_end(
    hpcstage: Hpcstage, make_tree: Tree, cluster: FakeCluster
) -> None:
    """Behind Open MPI's mpirun over ssh only the first node knows the job."""
    data = make_tree(files=30)
    program = hpcstage.cwd / "rank.py"
    program.write_text(RANK_OF_MPI)
    words = [os.fspath(cluster.base / "bin" / "openmpi"), os.fspath(cluster.base / "hosts")]
    words += map(os.fsdecode, hpcstage.command("run", "--data", data, "--", sys.executable, program, data))
    done = Job(hpcstage, cluster, "pbs").run(words)
    assert done.returncode == 0, done.stderr
    assert len(set(manylab.written(hpcstage.cwd, 6)[0])) == 1
    found = records_by_host(hpcstage)
    assert sorted(found) == cluster.nodes
    parts = [json.loads(path.read_text()) for path in hpcstage.cwd.glob("hpcstage-runs/*/run.part.json")]
    (run,) = [part for part in parts if part["host"] == cluster.nodes[0]]
    assert run["ended_s"] - run["child_ended_s"] < 4.0
    assert [found[node]["complete"] for node in cluster.nodes[1:]] == [True, True]
