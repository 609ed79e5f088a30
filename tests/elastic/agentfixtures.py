"""Owns the fixtures of tests with agents: `agents`, and the `etcd` in which their training may be kept."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from agentlab import Agents
from etcdlab import SiteEtcd, certified


@pytest.fixture
def etcd(tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[SiteEtcd]:
    """An etcd of one server, or of as many as the parameter says; with "https" by that, trusted by this process."""
    if shutil.which("etcd") is None:
        pytest.skip("needs etcd (Debian's package etcd-server)")
    kind, certificate = getattr(request, "param", 1), None
    if kind == "https":
        if shutil.which("openssl") is None:
            pytest.skip("needs openssl")
        site, certificate = certified(tmp_path / "site")
        monkeypatch.setenv("SSL_CERT_FILE", os.fspath(site))
    made = SiteEtcd(tmp_path / "etcd", 1 if certificate else kind, certificate)
    yield made
    made.kill()


@pytest.fixture(params=["directory", "etcd"])
def endpoints(request: pytest.FixtureRequest) -> list[str]:
    """Where a training is kept: has a test run for both forms of the register."""
    return request.getfixturevalue("etcd").endpoints if request.param == "etcd" else []


@pytest.fixture
def agents(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Agents]:
    """With the parameter "etcd" (`in_both`) their training is kept there, otherwise in the directory."""
    made = Agents(tmp_path, request.getfixturevalue("etcd") if getattr(request, "param", "") == "etcd" else None)
    yield made
    print(made.end())  # shown if the test fails, as is the rest
    for name in made.pids:
        print(name, *made.log(name), sep="\n")
    print(*made.generations(), sep="\n")
