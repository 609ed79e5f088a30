"""Owns the fixtures of tests with agents: `agents`, and the `etcd` in which their training may be kept."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from agentlab import Agents, SiteEtcd


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[SiteEtcd]:
    if shutil.which("etcd") is None:
        pytest.skip("needs etcd (Debian's package etcd-server)")
    made = SiteEtcd(tmp_path / "etcd")
    yield made
    made.kill()


@pytest.fixture
def agents(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Agents]:
    """With the parameter "etcd" (`in_both`) their training is kept there, otherwise in the directory."""
    made = Agents(tmp_path, request.getfixturevalue("etcd") if getattr(request, "param", "") == "etcd" else None)
    yield made
    print(made.end())  # shown if the test fails, as is the rest
    for name in made.pids:
        print(name, *made.log(name), sep="\n")
    print(*made.generations(), sep="\n")
