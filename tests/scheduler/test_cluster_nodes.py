"""The clusters of the tests themselves: nodes are apart, what a job leaves is seen, nothing stays when they go."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import psutil
import pytest
from clusterproject import READABLE, Project
from nodeslab import HOME, LOCAL, UID, Nodes, NoNodes
from slurmlab import FREEZER, Slurm

pytest_plugins = ("clusterfixtures",)


def state_outside() -> dict[str, object]:
    """What a cluster could change on the machine."""
    links = subprocess.run(["ip", "-brief", "link"], capture_output=True, text=True, check=True).stdout
    return {
        "mounts": Path("/proc/self/mounts").read_text(),
        "links": sorted(line.split()[0] for line in links.splitlines()),
        "users": Path("/etc/passwd").read_text(),
        "hosts": Path("/etc/hosts").read_text(),
        "groups": sorted(str(path) for path in FREEZER.parent.glob("*/slurm_*")),
        "places": sorted(os.listdir("/mnt") + os.listdir("/etc/slurm") if Path("/etc/slurm").exists() else []),
    }


def alive_in(namespaces: set[int]) -> list[psutil.Process]:
    """Live processes in mount namespaces."""
    found = []
    for process in psutil.process_iter():
        try:
            if os.stat(f"/proc/{process.pid}/ns/mnt").st_ino in namespaces:
                found.append(process)
        except OSError:
            continue
    return found


def test_nothing_stays_of_a_cluster_with_a_running_job(tmp_path: Path) -> None:
    before = state_outside() if os.geteuid() == 0 else {}
    nodes = Nodes(tmp_path / "lab", 2, READABLE)
    try:
        nodes.up()
    except NoNodes as error:
        pytest.skip(str(error))
    cluster = Slurm(nodes)
    try:
        cluster.up()
        job = cluster.submit("--nodes=2", env={}, cwd=HOME, script="#!/bin/sh\nsrun sleep 1000\n")
        cluster.wait_running(job)
        assert alive_in(nodes.namespaces)
    except NoNodes as error:
        pytest.skip(str(error))
    finally:
        nodes.down()
        cluster.remove_groups()
    assert alive_in(nodes.namespaces) == []
    assert not (tmp_path / "lab").exists()
    assert state_outside() == before


def test_nodes_have_names_users_disks_and_a_network(slurm: Slurm) -> None:
    nodes = slurm.nodes
    assert [nodes.run(index, "hostname").stdout.strip() for index in nodes.nodes] == nodes.names
    assert nodes.run(2, "id", "-un", user=True).stdout.strip() == "ada"
    nodes.run(1, "touch", LOCAL / "own")
    assert "own" not in nodes.run(2, "ls", LOCAL).stdout
    nodes.run(1, "rm", LOCAL / "own")
    addresses = nodes.run(1, "getent", "hosts", nodes.names[1]).stdout.split()
    assert addresses[0] in nodes.run(2, "ip", "-brief", "addr", "show", "eth0").stdout


def test_the_epilog_notes_what_a_job_leaves(slurm: Slurm, project: Project) -> None:
    script = f'#!/bin/sh\nmkdir -p "$TMPDIR/hpcstage-{UID}/run/store"\n'
    job = slurm.submit(env=project.env, cwd=project.path, script=script)
    done = slurm.wait(job)
    assert f"hpcstage-{UID}/run/store" in slurm.left_by(job)[done["NodeList"]]
    assert f"job.{job}" not in slurm.nodes.run(1, "ls", LOCAL).stdout.split()
