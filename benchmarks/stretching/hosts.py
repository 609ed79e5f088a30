"""Hosts of an elastic training on this machine: agents of `torchrun`, each with one process and a name of its own.

Owns their start, what is done to them, and their end. A host may have a network of its own (`networks`). A host of
torchft has no agent: its process is started alone, and meets the others through torchft's lighthouse.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path

import psutil

from benchmarks.harness import Options
from benchmarks.stretching.networks import Cut, Networks
from hpcstage.elastic.membership.arbiter import Arbiter

OURS, KEPT, THEIRS, TORCHFT = "hpcstage", "kept", "c10d", "torchft"
CONF = {
    OURS: "policy=minmax,last_call_s=2",
    KEPT: "policy=minmax,last_call_s=2,survivors=keep",
    THEIRS: "last_call_timeout=2",
}
"""The options of each rendezvous: either waits for 2 s at the start."""
WORKLOAD = Path(__file__).resolve().parent.parent / "workload"
PROGRAMS = {
    OURS: "elastic_steps.py",
    KEPT: "elastic_kept.py",
    THEIRS: "elastic_steps.py",
    TORCHFT: "elastic_torchft.py",
}
STEP_S = 0.05
PORT = 29400


def has_torchft() -> bool:
    """Whether torchft is installed."""
    return find_spec("torchft") is not None


class Hosts:
    """Hosts that train together."""

    def __init__(
        self,
        backend: str,
        names: str,
        directory: Path,
        *,
        most: int | None = None,
        program: Callable[[Path], Sequence[str | Path]] | None = None,
        conf: str = "",
        apart: bool = False,
    ) -> None:
        """`program`: with its arguments, for a directory, instead of one that makes steps for ever. `apart`: each host
        has a network of its own."""
        self.directory = directory
        self._backend, self._most, self._conf = backend, most or len(names), conf
        steps: list[str | Path] = [WORKLOAD / PROGRAMS[backend], directory, str(STEP_S)]
        self._program = steps if program is None else list(program(directory))
        self.agents: dict[str, subprocess.Popen[bytes]] = {}
        self._others: list[subprocess.Popen[bytes]] = []
        self._networks = Networks() if apart else None
        self._port = PORT if apart else _free_port()
        if backend == TORCHFT:
            self._start_lighthouse()
        for name in names:
            self.start(name)

    def start(self, name: str) -> None:
        """Starts one host."""
        address = Networks.address(_number(name)) if self._networks else "127.0.0.1"
        interface = "eth0" if self._networks else "lo"
        env = {**os.environ, "ELASTIC_HOST": name, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": interface}
        if self._backend == TORCHFT:
            env["TORCHFT_LIGHTHOUSE"] = f"http://127.0.0.1:{self._port}"
        words = self._command(name, address)
        if self._networks:
            self._networks.add(_number(name))
            words = [*self._networks.enter(_number(name)), *words]
        with (self.directory / f"{name}.log").open("ab") as log:
            # Elsewhere than in a clone, whose metadata may be older than what is installed.
            self.agents[name] = subprocess.Popen(
                words, cwd=self.directory, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )

    def _command(self, name: str, address: str) -> list[str]:
        program = [os.fspath(word) for word in self._program]
        if self._backend == TORCHFT:
            return [sys.executable, *program]
        own = f",dir={self.directory},host={name}" if self._backend != THEIRS else ""
        conf = f"{CONF[self._backend]}{own},is_host={int(name == 'a')}" + (f",{self._conf}" if self._conf else "")
        endpoint = Networks.address(1) if self._networks else "127.0.0.1"
        return [
            sys.executable, "-m", "torch.distributed.run",
            f"--nnodes=1:{self._most}", "--nproc-per-node=1", "--max-restarts=99",
            f"--rdzv-backend={THEIRS if self._backend == THEIRS else OURS}", f"--rdzv-endpoint={endpoint}:{self._port}",
            "--rdzv-id=bench", f"--rdzv-conf={conf}", f"--local-addr={address}",
            *program,
        ]  # fmt: skip

    def cut(self, sender: str, receivers: str) -> float:
        """Has all that one host sends to some others be lost from now on, and nothing else; returns when."""
        assert self._networks is not None
        for receiver in receivers:
            self._networks.cut(Cut(_number(sender), _number(receiver)))
        return time.time()

    def mend(self, sender: str, receivers: str) -> float:
        """Ends what `cut` began; returns when."""
        assert self._networks is not None
        for receiver in receivers:
            self._networks.mend(Cut(_number(sender), _number(receiver)))
        return time.time()

    # ---- torchft

    def _start_lighthouse(self) -> None:
        import torchft  # type: ignore[import-not-found, unused-ignore]

        beside = Path(str(torchft.__file__)).parent.parent / "bin" / "torchft_lighthouse"
        program = shutil.which("torchft_lighthouse") or os.fspath(beside)
        words = [program, "--min_replicas", "1", "--join_timeout_ms", "2000", "--quorum_tick_ms", "100"]
        words += ["--bind", f"127.0.0.1:{self._port}"]
        with (self.directory / "lighthouse.log").open("wb") as log:
            self._others.append(subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=log, stderr=log))

    # ---- what is seen, and done

    def wait_for_steps(self, hosts: str, since: float, limit_s: float) -> float | None:
        """Returns when all these hosts, and nobody else, made a step together that began after `since`."""
        while time.time() < since + limit_s:
            found = [self._step_of(host, len(hosts), since) for host in hosts]
            times = [at for at in found if at is not None]
            if len(times) == len(hosts):
                return max(times)
            time.sleep(0.02)
        return None

    def _step_of(self, host: str, world: int, since: float) -> float | None:
        found: list[float] = []
        for path in self.directory.glob(f"{host}-*.steps"):
            lines = [line.split() for line in path.read_text().splitlines() if line.count(" ") == 2]
            times = [float(at) for at, size, _ in lines if int(size) == world and float(at) > since]
            found += times[:1]
        return min(found, default=None)

    def processes(self, host: str) -> list[psutil.Process]:
        """The processes of a host, the agent first."""
        agent = psutil.Process(self.agents[host].pid)
        return [agent, *agent.children(recursive=True)]

    def worker(self, host: str) -> psutil.Process:
        """The process that trains."""
        return self.processes(host)[-1 if self._backend == TORCHFT else 1]

    def strike(self, host: str, signum: int) -> float:
        """Sends a signal to all processes of a host, the agent first, and returns when."""
        processes = self.processes(host)
        at = time.time()
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signum)
        return at

    def strike_worker(self, host: str, signum: int) -> float:
        """Sends a signal to the process that trains, and returns when."""
        worker = self.worker(host)
        at = time.time()
        worker.send_signal(signum)
        return at

    def hold_lock(self, host: str) -> float:
        """Has the process of a host, which is kept, hold Python's lock from its next step on; returns when."""
        (self.directory / f"hold-{host}").touch()
        return time.time()

    def generations(self) -> int:
        """Returns how many memberships there were."""
        return len(list(self.directory.glob("elastic-*/generation-*")))

    def ranks(self) -> str:
        """Returns the hosts of the newest membership, by their ranks."""
        (agreed,) = self.directory.glob("elastic-*")
        newest = Arbiter(agreed).newest_generation()
        return "".join(node.host for node in newest.nodes) if newest else ""

    def agreed(self, since: float) -> float | None:
        """Returns when the next generation was agreed on, where that is known."""
        paths = self.directory.glob("elastic-*/generation-*")
        return min((at for at in (path.stat().st_mtime for path in paths) if at > since), default=None)

    def agreed_last(self) -> float:
        """Returns when the newest generation was agreed on."""
        return max(path.stat().st_mtime for path in self.directory.glob("elastic-*/generation-*"))

    def said(self) -> str:
        """Returns what the agents and their processes wrote."""
        return "\n".join(path.read_text(errors="replace") for path in sorted(self.directory.glob("*.log")))

    def end(self) -> None:
        """Ends all processes."""
        for agent in [*self.agents.values(), *self._others]:
            with contextlib.suppress(psutil.NoSuchProcess):
                found = psutil.Process(agent.pid)
                for process in [*found.children(recursive=True), found]:
                    with contextlib.suppress(psutil.NoSuchProcess):
                        process.kill()
            agent.wait()
        for process in psutil.process_iter():  # of agents that were killed
            with contextlib.suppress(psutil.Error):
                if os.fspath(self.directory) in process.cmdline():
                    process.kill()
        if self._networks:
            self._networks.close()


@contextlib.contextmanager
def hosts(backend: str, names: str, options: Options, **more: object) -> Iterator[Hosts]:
    """Gives hosts that have been started, and ends them."""
    directory = Path(tempfile.mkdtemp(prefix="hpcstage-bench-elastic-", dir=options.work_dir))
    made = Hosts(backend, names, directory, **more)  # type: ignore[arg-type]
    try:
        yield made
    finally:
        made.end()
        shutil.rmtree(directory, ignore_errors=True)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


def _number(name: str) -> int:
    """Returns the number of a host's network."""
    return ord(name) - ord("a") + 1
