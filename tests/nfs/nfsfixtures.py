"""Fixtures of the tests on NFS: one machine with a server and clients in a session, a project on NFS for each test.

A test that uses a project fails if it leaves a process of hpcstage or a directory on the local disk inside.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
from nfslab import NfsLab, NoLab
from nfsproject import FIND, KILL, LOCAL, Project

_END = f"""ip link set v0 up; [ $(cat /proc/fs/nfsd/threads) != 0 ] || rpc.nfsd 8
for try in $(seq 100); do
    left=$({FIND}; ls -d {LOCAL}/hpcstage-*/* 2>/dev/null); [ -n "$left" ] || break; sleep 0.2
done
[ -z "$left" ] || {{ echo "$left"; {KILL}; }}; rm -rf {LOCAL}/*"""
_numbers = itertools.count(1)


@pytest.fixture(scope="session")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NfsLab]:
    """The machine inside."""
    made = NfsLab(tmp_path_factory.mktemp("nfs") / "lab")
    try:
        made.up()
    except NoLab as error:
        pytest.skip(str(error))
    try:
        yield made
    finally:
        made.down()


@pytest.fixture
def project(lab: NfsLab) -> Iterator[Project]:
    """A project; the server is up before and after."""
    made = Project(lab, f"project{next(_numbers)}")
    yield made
    left = lab.run(_END, code=None)
    assert not left, f"left behind: {left}"
