"""Fixtures of the tests on NFS: one machine with a server and clients in a session, a project on NFS for each test.

A test that uses a project fails if it leaves a process of hpcstage or a directory on the local disk inside.
"""

from __future__ import annotations

import itertools
import json
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from nfslab import EXPORT, NODE, PATIENCE_S, Job, NfsLab, NoLab

PROGRAMS = Path(__file__).resolve().parent / "programs"
LOCAL = "/disk/tmp"
MARK = "NFS_TEST_PROJECT"
_FIND = f"grep -lzs ^{MARK}= /proc/[0-9]*/environ"
_KILL = f"kill -9 $({_FIND} | cut -d/ -f3)"
_END = f"""ip link set v0 up; [ $(cat /proc/fs/nfsd/threads) != 0 ] || rpc.nfsd 8
for try in $(seq 100); do
    left=$({_FIND}; ls -d {LOCAL}/hpcstage-*/* 2>/dev/null); [ -n "$left" ] || break; sleep 0.2
done
[ -z "$left" ] || {{ echo "$left"; {_KILL}; }}; rm -rf {LOCAL}/*"""
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


class Project:
    """A directory on NFS in which a user works, on both nodes. Scripts have `$HPCSTAGE` and the programs' directory."""

    def __init__(self, lab: NfsLab, name: str) -> None:
        self.lab = lab
        self.name = name
        self.back = f"{EXPORT}/{name}"
        """What the server holds of it."""
        lab.run(f"mkdir {self.back}")

    def script(self, lines: str, mount: str = "/n42", *, node: int = 1) -> str:
        """A script that runs in the project as one mount shows it."""
        text = f"""
export {MARK}={self.name} HPCSTAGE_LOCAL_DIR={LOCAL} XDG_STATE_HOME=/disk/state XDG_CONFIG_HOME=/disk/config
export HPCSTAGE="$PYTHON -m hpcstage" PROGRAMS={PROGRAMS}
cd {mount}/{self.name}
{lines}"""
        return text if node == 1 else f"export PYTHON\nsh {NODE} bash -c {shlex.quote(text)}"

    def start(self, lines: str, mount: str = "/n42", *, node: int = 1) -> Job:
        """Starts a script."""
        return self.lab.start(self.script(lines, mount, node=node))

    def run(
        self, lines: str, mount: str = "/n42", *, node: int = 1, timeout_s: float = PATIENCE_S, code: int | None = 0
    ) -> str:
        """Runs a script; returns what it printed."""
        return self.start(lines, mount, node=node).wait(timeout_s, code=code)

    def kill_all(self) -> None:
        """Kills all that scripts of this project have started, on both nodes."""
        self.lab.run(_KILL.replace(f"{MARK}=", f"{MARK}={self.name}"), code=None)

    def record(self) -> dict[str, Any]:
        """The record of the newest run."""
        found: dict[str, Any] = json.loads(
            self.lab.run(f"cat $(ls -td {self.back}/hpcstage-runs/*/ | head -1)/run.json")
        )
        return found


@pytest.fixture
def project(lab: NfsLab) -> Iterator[Project]:
    """A project; the server is up before and after."""
    made = Project(lab, f"project{next(_numbers)}")
    yield made
    left = lab.run(_END, code=None)
    assert not left, f"left behind: {left}"
