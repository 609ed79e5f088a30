"""Several real daemons on one machine, and their exchanges as one MPI program."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from daemon_process import REPO, DaemonProcess, wait_until

from hpcstage.protocol.exchangespec import GroupSpec
from hpcstage.protocol.membership import Membership
from hpcstage.record.parts.part import NodePart

MPIEXEC = shutil.which("mpiexec", path=os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", "")]))


class World:
    """One generation of exchanges."""

    def __init__(self, path: Path, generation: int, daemons: list[DaemonProcess]) -> None:
        membership = daemons[0].spec.membership.followed(dict.fromkeys(d.spec.node_index for d in daemons))
        for d in daemons:
            membership = membership.knowing(d.spec.node_index, node_dir=os.fspath(d.node_dir), sock=os.fspath(d.sock))
        spec = path / f"group{generation}.json"
        GroupSpec(replace(membership, generation=100 * generation)).save(spec)
        self.log_path = path / f"group{generation}.log"
        command = [str(MPIEXEC), "-n", str(len(daemons)), sys.executable, "-m", "hpcstage.exchange", os.fspath(spec)]
        with self.log_path.open("ab") as log:
            self.process = subprocess.Popen(
                command,
                env={**os.environ, "PYTHONPATH": os.fspath(REPO)},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def end(self) -> int:
        """The daemons have ended: so do the exchanges."""
        return self.process.wait(300)

    def kill(self) -> None:
        """All of them at once."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(300)


class Nodes:
    """Daemons of one job, and worlds of exchanges."""

    def __init__(self, start: Callable[..., DaemonProcess], path: Path) -> None:
        self._start = start
        self._path = path
        self.daemons: list[DaemonProcess] = []
        self.worlds: list[World] = []

    def up(self, source: Path, count: int, *, group: bool = True, **options) -> list[DaemonProcess]:
        run_dir = self._path / "run"
        (run_dir / "nodes").mkdir(parents=True, exist_ok=True)
        each = options.pop("each", {})
        expected = Membership.of([f"node{index}" for index in range(count)])
        for index in range(count):
            own = {"membership": expected, "node_index": index, "run_dir": os.fspath(run_dir)}
            self.daemons.append(self._start(source, **{**own, **options, **each.get(index, {})}))
            self.daemons[-1].run_dir = run_dir
        for daemon in self.daemons:
            daemon.attach()
        if group:
            self.world()
        return self.daemons

    def world(self, daemons: list[DaemonProcess] | None = None) -> World:
        world = World(self._path, len(self.worlds), self.daemons if daemons is None else daemons)
        self.worlds.append(world)
        return world

    def staged(self) -> None:
        for daemon in self.daemons:
            daemon.staged()

    def end(self) -> list[NodePart]:
        return [daemon.end() for daemon in self.daemons if daemon.process.poll() is None]


@pytest.fixture
def nodes(start_daemon, tmp_path: Path) -> Iterator[Nodes]:
    """See Nodes."""
    if MPIEXEC is None:
        pytest.skip("needs mpiexec (pip install mpich mpi4py)")
    found = Nodes(start_daemon, tmp_path)
    yield found
    for world in found.worlds:
        world.kill()


def total(parts: list[NodePart], name: str) -> float:
    return float(sum(getattr(part.totals, name) for part in parts))


__all__ = ["Nodes", "World", "nodes", "total", "wait_until"]
