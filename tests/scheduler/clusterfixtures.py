"""Fixtures of the tests on real schedulers: one cluster of each kind in a session, a project directory for each test.

A test that uses a project fails if it leaves a process of the user anywhere on the nodes.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
from clusterproject import NODES, READABLE, Project, write_dataset
from gridlab import GridEngine
from nodeslab import UID, Nodes, NoNodes, until
from slurmlab import Slurm

GONE_S = 10.0
_numbers = itertools.count(1)


def _nodes(tmp_path_factory: pytest.TempPathFactory, name: str) -> Nodes:
    nodes = Nodes(tmp_path_factory.mktemp(name), NODES, READABLE)
    try:
        nodes.up()
    except NoNodes as error:
        pytest.skip(str(error))
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


@pytest.fixture
def project(request: pytest.FixtureRequest) -> Iterator[Project]:
    """A project on the cluster that the test uses; afterwards no process of the user may be left on any node."""
    (name,) = {"slurm", "gridengine"} & set(request.fixturenames)
    nodes = request.getfixturevalue(name).nodes
    own = Project(nodes, f"{name}{next(_numbers)}")
    yield own
    until(lambda: not nodes.processes(uid=UID), GONE_S, f"the end of all processes of the user ({name})")
