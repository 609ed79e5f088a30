"""The clusters of the tests themselves: nodes are apart, what a job leaves is seen, nothing stays when they go."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import psutil
import pytest
from clusterproject import READABLE, Project
from nodeslab import HOME, LOCAL, PRIVATE_TREES, UID, Nodes, NoNodes
from slurmlab import FREEZER, Slurm

pytest_plugins = ("clusterfixtures",)


WATCHED = ("/", *PRIVATE_TREES, "/run", "/dev/shm", "/etc/hosts", "/etc/passwd", "/etc/group", "/etc/slurm", "/mnt")


def state_outside(lab: Path, prefix: str) -> dict[str, object]:
    """What a cluster could change on the machine; others may work beside us, so only places that are a cluster's."""
    links = subprocess.run(["ip", "-brief", "link"], capture_output=True, text=True, check=True).stdout
    places = [line.split()[1] for line in Path("/proc/self/mounts").read_text().splitlines()]
    ours = ("/mnt/local", "/mnt/shared", "/mnt/held", str(lab))
    return {
        "mounts": sorted(place for place in places if place in WATCHED or place.startswith(ours)),
        "links": sorted(line.split()[0] for line in links.splitlines()),
        "files": [Path(name).read_text() for name in ("/etc/passwd", "/etc/group", "/etc/hosts")],
        "groups": sorted(str(path) for path in FREEZER.parent.glob(f"*/slurm_{prefix}*")),
        "mnt": sorted(os.listdir("/mnt")),
        "lab": lab.exists(),
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
    lab = tmp_path / "lab"
    nodes = Nodes(lab, 2, READABLE)
    try:
        before = state_outside(lab, nodes.prefix)
        nodes.up()
    except (NoNodes, FileNotFoundError) as error:
        pytest.skip(str(error))
    cluster = Slurm(nodes)
    try:
        cluster.up()
        job = cluster.submit("--nodes=2", env={}, cwd=HOME, script="#!/bin/sh\nsrun sleep 1000\n")
        cluster.wait_running(job)
        assert alive_in(nodes.namespaces)
        during = state_outside(lab, nodes.prefix)
        assert during["lab"]
        assert during["groups"] or cluster.tracking != "cgroup"
    except NoNodes as error:
        pytest.skip(str(error))
    finally:
        nodes.down()
        cluster.remove_groups()
    assert alive_in(nodes.namespaces) == []
    assert state_outside(lab, nodes.prefix) == before


def test_nodes_have_names_users_disks_and_a_network(slurm: Slurm) -> None:
    nodes = slurm.nodes
    assert [nodes.run(index, "hostname").stdout.strip() for index in nodes.nodes] == nodes.names
    assert nodes.run(2, "id", "-un", user=True).stdout.strip() == "ada"
    nodes.run(1, "touch", LOCAL / "own")
    assert "own" not in nodes.run(2, "ls", LOCAL).stdout
    nodes.run(1, "rm", LOCAL / "own")
    addresses = nodes.run(1, "getent", "hosts", nodes.names[1]).stdout.split()
    assert addresses[0] in nodes.run(2, "ip", "-brief", "addr", "show", "eth0").stdout


def test_nodes_keep_their_users_when_this_machine_changes_its_own(slurm: Slurm) -> None:
    """A mount over a file ends when another is renamed to its name outside, as `useradd` does with /etc/passwd."""
    lines = slurm.nodes.run(1, "cat", "/proc/self/mounts").stdout.splitlines()
    places = [Path(line.split()[1]) for line in lines]
    below = [place for place in places if place.is_relative_to("/etc")]
    assert below
    for place in below:
        slurm.nodes.run(1, "test", "-d", place)


def test_the_epilog_notes_what_a_job_leaves(slurm: Slurm, project: Project) -> None:
    script = f'#!/bin/sh\nmkdir -p "$TMPDIR/hpcstage-{UID}/run/store"\n'
    job = slurm.submit(env=project.env, cwd=project.path, script=script)
    done = slurm.wait(job)
    assert f"hpcstage-{UID}/run/store" in slurm.left_by(job)[done["NodeList"]]
    assert f"job.{job}" not in slurm.nodes.run(1, "ls", LOCAL).stdout.split()
