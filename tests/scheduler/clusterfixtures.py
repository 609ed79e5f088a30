"""Fixtures of the tests on real schedulers: one cluster of each kind in a session, a project directory for each test.

A test that uses a project fails if it leaves a process of the user anywhere on the nodes.
"""

from __future__ import annotations

import itertools
import signal
import sys
from collections.abc import Iterator

import pytest
import resuming
from clusterproject import NODES, READABLE, Limited, Project, batch, behind, processes_of, write_dataset
from conftest import REPO
from gridlab import GridEngine
from nodeslab import GONE_S, Nodes, NoNodes, until
from slurmlab import Slurm

_numbers = itertools.count(1)
_slow: set[str] = set()
"""Names of projects whose jobs outlive a test."""


def _nodes(tmp_path_factory: pytest.TempPathFactory, name: str) -> Nodes:
    nodes = Nodes(tmp_path_factory.mktemp(name), NODES, READABLE)
    try:
        nodes.up()
    except NoNodes as error:
        pytest.skip(str(error))
    probe = nodes.run(
        1, sys.executable, "-c", "import hpcstage, click", user=True, env={"PYTHONPATH": str(REPO)}, check=False
    )
    if probe.returncode != 0:
        nodes.down()
        pytest.skip(f"other users cannot run {sys.executable} or read {REPO}: {probe.stderr.strip()}")
    write_dataset(nodes)
    return nodes


@pytest.fixture(scope="session")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    """A Slurm of four nodes."""
    nodes = _nodes(tmp_path_factory, "slurm")
    cluster = Slurm(nodes)
    try:
        cluster.up()
        yield cluster
    except NoNodes as error:
        pytest.skip(str(error))
    finally:
        nodes.down()
        cluster.remove_groups()


@pytest.fixture(scope="session")
def gridengine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GridEngine]:
    """A Grid Engine of four nodes."""
    nodes = _nodes(tmp_path_factory, "gridengine")
    cluster = GridEngine(nodes)
    try:
        cluster.up()
        yield cluster
    except NoNodes as error:
        pytest.skip(str(error))
    finally:
        nodes.down()


@pytest.fixture(scope="session")
def limited(slurm: Slurm) -> Limited:
    """Submitted before anything else and left to run beside the other tests."""

    def submit(name: str, script: str, *options: str) -> tuple[Project, int]:
        own = Project(slurm.nodes, name)
        _slow.add(name)
        return own, slurm.submit("--time=1", *options, env=own.env, cwd=own.path, script=script)

    leave_on_usr1 = f"--patient --leave-on {int(signal.SIGUSR1)}"
    return Limited(
        submit("warned", batch(leave_on_usr1), "--signal=B:USR1@20"),
        submit("ranks-warned", behind(leave_on_usr1), "--signal=USR1@20", "--nodes=2", "--ntasks-per-node=2"),
        submit("unwarned", batch("--patient")),
        submit("resumed", resuming.SCRIPT),
    )


@pytest.fixture
def project(request: pytest.FixtureRequest) -> Iterator[Project]:
    """A project on the cluster that the test uses; afterwards no process of the user may be left on any node."""
    (name,) = {"slurm", "gridengine"} & set(request.fixturenames)
    nodes = request.getfixturevalue(name).nodes
    own = Project(nodes, f"{name}{next(_numbers)}")
    yield own
    try:
        until(lambda: not processes_of(nodes, but=_slow), GONE_S, f"the end of all processes of {own.name}")
    finally:
        for process in processes_of(nodes, but=_slow):  # of a test that failed: the next one starts without them
            process.kill()
