"""Elastic training: how long after a fault the hosts that are left make steps again, beside `torchrun`'s rendezvous.

Hosts are agents of `torchrun` on this machine, each with one process and a name of its own; processes are restarted
after a change, with the import of PyTorch, or kept (`hpcstage.torch.Elastic`). `seconds` is from the fault to the first
step of those that are left. A host is killed with all its processes, or stopped by SIGSTOP; the endpoint's host is the
one through which the others meet.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from benchmarks.harness import Arm, Bench, Figure, Options, at_most, options_of, parser

OURS, KEPT, THEIRS = "hpcstage", "kept", "c10d"
ARMS = {
    OURS: "policy=minmax,last_call_s=2",
    KEPT: "policy=minmax,last_call_s=2,survivors=keep",
    THEIRS: "last_call_timeout=2",
}
"""The options of each rendezvous: either waits for 2 s at the start."""
FAULTS = {
    "host killed": ("b", signal.SIGKILL),
    "host frozen": ("b", signal.SIGSTOP),
    "endpoint's host killed": ("a", signal.SIGKILL),
    "endpoint's host frozen": ("a", signal.SIGSTOP),
}
WORKLOAD = Path(__file__).parent / "workload"
STEP_S = 0.05
START_LIMIT_S, LIMIT_S = 90.0, 60.0
AGAIN_S, KEPT_AGAIN_S = 10.0, 5.0
"""What is asked of restarted processes, and of those that are kept."""


class Hosts:
    """Agents of `torchrun` that train together."""

    def __init__(self, backend: str, names: str, directory: Path) -> None:
        self.directory = directory
        self._backend = backend
        self.agents: dict[str, subprocess.Popen[bytes]] = {}
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        for name in names:
            self.agents[name] = self._start(name, port, len(names))

    def _start(self, name: str, port: int, count: int) -> subprocess.Popen[bytes]:
        own = f",dir={self.directory},host={name}" if self._backend != THEIRS else ""
        program = WORKLOAD / ("elastic_kept.py" if self._backend == KEPT else "elastic_steps.py")
        is_endpoint = f",is_host={int(name == 'a')}"
        name_of = THEIRS if self._backend == THEIRS else OURS
        command = [
            sys.executable, "-m", "torch.distributed.run",
            f"--nnodes=1:{count}", "--nproc-per-node=1", "--max-restarts=9",
            f"--rdzv-backend={name_of}", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=bench",
            f"--rdzv-conf={ARMS[self._backend]}{own}{is_endpoint}", "--local-addr=127.0.0.1",
            os.fspath(program), os.fspath(self.directory), str(STEP_S),
        ]  # fmt: skip
        env = {**os.environ, "ELASTIC_HOST": name, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        with (self.directory / f"{name}.log").open("wb") as log:
            # Elsewhere than in a clone, whose metadata may be older than what is installed.
            return subprocess.Popen(
                command, cwd=self.directory, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )

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
        for path in self.directory.glob(f"{host}-*.steps"):
            lines = [line.split() for line in path.read_text().splitlines() if line.count(" ") == 2]
            times = [float(at) for at, size, _ in lines if int(size) == world and float(at) > since]
            if times:
                return times[0]
        return None

    def strike(self, host: str, signum: int) -> float:
        """Sends a signal to all processes of a host, the agent first, and returns when."""
        agent = psutil.Process(self.agents[host].pid)
        processes = [agent, *agent.children(recursive=True)]
        at = time.time()
        for process in processes:
            process.send_signal(signum)
        return at

    def detected(self, since: float) -> float | None:
        """Returns when the next generation was agreed on, where that is known."""
        paths = self.directory.glob("elastic-*/generation-*")
        return min((at for at in (path.stat().st_mtime for path in paths) if at > since), default=None)

    def said(self) -> str:
        """Returns what the agents and their processes wrote."""
        return "\n".join(path.read_text(errors="replace") for path in sorted(self.directory.glob("*.log")))

    def end(self) -> None:
        """Ends all processes."""
        for agent in self.agents.values():
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


@contextlib.contextmanager
def hosts(backend: str, names: str, options: Options) -> Iterator[Hosts]:
    """Gives hosts that have started, and ends them."""
    directory = Path(tempfile.mkdtemp(prefix="hpcstage-bench-elastic-", dir=options.work_dir))
    made = Hosts(backend, names, directory)
    try:
        yield made
    finally:
        made.end()
        shutil.rmtree(directory, ignore_errors=True)


def sample(backend: str, fault: str, options: Options) -> dict[str, Any]:
    """Trains on three hosts, has a fault happen to one, and waits for the two others."""
    host, signum = FAULTS[fault]
    with hosts(backend, "abc", options) as made:
        if made.wait_for_steps("abc", time.time(), START_LIMIT_S) is None:
            raise RuntimeError(f"{backend} did not start:\n{made.said()}")
        struck = made.strike(host, signum)
        again = made.wait_for_steps("abc".replace(host, ""), struck, LIMIT_S)
        detected = made.detected(struck)
        return {
            "seconds": None if again is None else again - struck,
            "agreed_s": None if detected is None else detected - struck,
            "limit_s": LIMIT_S,
        }


def main() -> int:
    """Measures, prints, checks."""
    options = options_of(parser(__doc__).parse_args())
    bench = Bench("elastic", options, {"cpus": os.cpu_count(), "lease_s": 2.0})
    chosen = [fault for fault in FAULTS if options.wants(fault)][: 1 if options.quick and not options.only else None]
    for fault in chosen:
        arms: dict[str, Arm] = {name: partial(sample, name, fault, options) for name in ARMS}
        bench.measure(fault, arms, options.rounds(3))
    rows = [
        [fault, always(bench, fault, OURS, "agreed_s"), *(always(bench, fault, arm) for arm in ARMS)]
        for fault in chosen
    ]
    columns = ["", "hpcstage: agreed", "hpcstage: steps again", "Elastic: steps again", "c10d: steps again"]
    note = f"-: at least once not within {LIMIT_S:g} s"
    bench.sheet("Seconds after a fault (median)", columns, rows, note)
    return bench.finish(figures(bench, chosen))


def always(bench: Bench, fault: str, arm: str, key: str = "seconds") -> float | None:
    """Returns the median, or None if a sample has no value."""
    values = [sample[key] for sample in bench.select(fault, arm)]
    return None if None in values else bench.median(fault, arm, key)


def figures(bench: Bench, chosen: list[str]) -> list[Figure]:
    """Asked of every fault."""
    asked = {OURS: AGAIN_S, KEPT: KEPT_AGAIN_S}
    return [
        at_most(f"{fault}, {arm}: steps again", always(bench, fault, arm), limit_s, "s")
        for fault in chosen
        for arm, limit_s in asked.items()
        if bench.select(fault, arm)
    ]


if __name__ == "__main__":
    sys.exit(main())
