"""Random faults of a whole training: `hpcstage run --elastic` on virtual nodes, with jobs that join it.

Owns the faults, and what must hold after them: the training goes on after each, every sample counts once in every
epoch, the weights are those of a training without faults and with the same memberships, and nothing is left behind. One
node that trains is spared in each fault: where all are lost, a training goes on from a checkpoint, which is tested
elsewhere. Where nodes have networks of their own (`networks`), what passes between them is cut as well, in one
direction or both, and mended later; the network between their daemons, which training does not need, is not.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil

from benchmarks.files import make_files
from benchmarks.harness import Bench, Figure, Options, at_least, at_most, holds
from benchmarks.programs import environment
from benchmarks.stretching.cuts import CUTS, Key, NodeNetworks
from benchmarks.stretching.hosts import WORKLOAD
from benchmarks.stretching.networks import has_networks
from hpcstage.elastic.membership.arbiter import Arbiter

CELL, ARM = "random faults and cuts", "hpcstage run"
FAULTS, QUICK_FAULTS = 100, 6
LEAST_CUTS, QUICK_CUTS = 10, 1
"""So many of them have to be cuts of the network."""
AT_START, MOST = 3, 4
FILES, FILE_BYTES = 240, 1000
STEP_S = 0.03
AGAIN_P, AGAIN_S = 0.35, 2.0
"""How often another fault comes while one is dealt with, and within which time."""
MOST_CUTS, MENDED_P = 2, 0.3
"""The cuts at one time, and how often one of them is mended in the place of a fault."""
SETTLE_S, END_S, GONE_S = 90.0, 120.0, 20.0
MOST_OFF = 1e-9
"""Weights are numbers of 64 bit; their sums have another order with other memberships."""
NAME = "chaos"
HOST = "HPCSTAGE_ELASTIC_HOST"
MEANWHILE, MISSED, GOES_ON, MENDED = "meanwhile:", "missed", "goes on", "cut mended"
NO_FAULTS = (MEANWHILE, MISSED, GOES_ON, MENDED)


class TrainingStuck(RuntimeError):
    """The training did not go on after a fault."""


class Chaos:
    """A training, and what happens to it."""

    def __init__(
        self,
        work: Path,
        local: Path,
        seed: int,
        env: Mapping[str, str] | None = None,
        data: Path | None = None,
        *,
        apart: bool = False,
    ) -> None:
        """`data`: the files of the samples, which are made where there are none. `apart`: each node has a network of
        its own."""
        self.work, self.local = work, local
        self.random = random.Random(seed)
        self.env = {**environment(work), **(env or {}), "CHAOS": os.fspath(work), "OMP_NUM_THREADS": "1"}
        self.env |= {"GLOO_SOCKET_IFNAME": "eth0" if apart else "lo", "HPCSTAGE_LOCAL_DIR": os.fspath(local)}
        self.env["CHAOS_PYTHON"] = sys.executable
        self.data = data or work / "data"
        if data is None:
            make_files(self.data, FILES, FILE_BYTES)
        self.jobs: dict[str, subprocess.Popen[bytes]] = {}
        self.states: dict[Key, str] = {}
        """The nodes that are not lost: `runs` or `frozen`."""
        self.struck: dict[Key, int] = {}
        """The processes that were killed or stopped alone: another one takes the place of each."""
        self.team: frozenset[Key] = frozenset()
        """The nodes that trained when the training was last seen to go on."""
        self.done: list[str] = []
        self.waits_s: list[float] = []
        self.networks = NodeNetworks(work) if apart else None

    # ---- jobs and nodes

    def begin(self, *options: str) -> None:
        """Starts the training, with some more options, and waits for its first steps."""
        words = ["--elastic", f"1:{2 * MOST}", "--name", NAME, "--survivors", "keep", "--nodes", str(AT_START)]
        python = [self.networks.torchrun] if self.networks else [sys.executable]
        program: list[str | Path] = [*python, WORKLOAD / "elastic_chaos.py", self.data, self.work, str(STEP_S)]
        self._start(
            "first", AT_START, *words, "--data", self.data, "--run-dir", self.work / "run", *options, "--", *program
        )
        self.settle(0.0)

    def _start(self, job: str, nodes: int, *words: str | Path) -> None:
        started: dict[Key, str] = {(job, node): "runs" for node in range(nodes)}
        if self.networks:
            for key in started:
                self.networks.add(key)
        with (self.work / f"{job}.log").open("wb") as log:
            self.jobs[job] = subprocess.Popen(
                [sys.executable, "-m", "hpcstage", "run", *(os.fspath(word) for word in words)],
                cwd=self.work, env={**self.env, "CHAOS_JOB": job}, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                start_new_session=True,
            )  # fmt: skip
        self.states |= started

    def agreed(self) -> Path:
        """The directory of what is agreed."""
        (found,) = (self.work / "run").glob("elastic-*")
        return found

    def newest(self) -> dict[Key, dict[str, Any]]:
        """The newest step of each node."""
        found: dict[Key, dict[str, Any]] = {}
        for path in self.work.glob("now-*"):
            with contextlib.suppress(ValueError):
                one = json.loads(path.read_bytes())
                key = (one["job"], one["node"])
                if key not in found or found[key]["at"] < one["at"]:
                    found[key] = one
        return found

    def running(self) -> list[Key]:
        """The nodes that should train."""
        return sorted(key for key, state in self.states.items() if state == "runs")

    def is_settled(self, since: float) -> bool:
        """Whether all nodes that should train have made a step together since a time, and the others make none."""
        running = self.running()
        known = {key: one for key, one in self.newest().items() if key in running and one["at"] > since}
        found = {key: one for key, one in known.items() if one["pid"] != self.struck.get(key)}
        newest = max((one["generation"] for one in found.values()), default=0)
        team = frozenset(key for key, one in found.items() if one["generation"] == newest)
        if not team or {found[key]["world"] for key in team} != {len(team)}:
            return False
        still = [one["at"] for key, one in found.items() if key not in team]
        if max(still, default=0.0) >= min(found[key]["at"] for key in team) or not self._may_train(team):
            return False
        self.team = team
        return True

    def _may_train(self, team: frozenset[Key]) -> bool:
        if self.networks is None:
            return team == frozenset(self.running())
        term = Arbiter(self.agreed()).newest_term()
        leader = None if term is None else self.networks.node_at(term.address)
        return self.networks.may_train(team, self.running(), leader)

    def settle(self, since: float) -> None:
        """Waits until the training goes on. Raises TrainingStuck."""
        began_s = time.monotonic()
        while not self.is_settled(since):
            if time.monotonic() > began_s + SETTLE_S:
                cuts = self.networks.damages if self.networks else []
                raise TrainingStuck(f"after {self.done[-5:]}: {self.states}, {cuts}, {self.newest()}\n{self.said()}")
            time.sleep(0.02)

    def trainer(self, key: Key) -> psutil.Process | None:
        """The process that starts a node's agent."""
        with contextlib.suppress(psutil.Error):
            for process in psutil.Process(self.jobs[key[0]].pid).children(recursive=True):
                with contextlib.suppress(psutil.Error):
                    words = process.cmdline()
                    if "hpcstage.lead.trainer" in words and words[-1] == str(key[1]):
                        return process
        return None

    def processes(self, key: Key) -> list[psutil.Process]:
        """What starts the agent of a node, the agent, and all below it."""
        first = self.trainer(key)
        below: list[psutil.Process] = []
        with contextlib.suppress(psutil.Error):
            below = first.children(recursive=True) if first else []
        return [first, *below] if first else []

    def leads(self, keys: list[Key]) -> list[Key]:
        """Of these nodes the one through which the others meet."""
        term = Arbiter(self.agreed()).newest_term()
        return [key for key in keys if term is not None and self._host(key) == term.host]

    def _host(self, key: Key) -> str | None:
        for process in self.processes(key)[1:2]:
            with contextlib.suppress(psutil.Error):
                return process.environ().get(HOST)
        return None

    def _of_job(self, job: str, *words: str) -> list[psutil.Process]:
        """All processes of a job, or those with a word in their command line."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                env = process.environ()
                is_of_job = env.get("CHAOS") == os.fspath(self.work) and env.get("CHAOS_JOB") == job
                if is_of_job and (not words or set(words) & set(process.cmdline())):
                    found.append(process)
        return found

    # ---- faults

    def strike(self, spared: Key) -> None:
        """Has one fault happen, or a cut be mended."""
        if self.networks and self.networks.damages and self.random.random() < MENDED_P:
            self._mend()
            return
        newest = self.newest()
        others = [key for key in self.running() if key != spared and key in newest and self.trainer(key)]
        frozen = sorted(key for key, state in self.states.items() if state == "frozen")
        kinds: dict[str, Callable[[], bool | None]] = {"daemon killed": self._kill_daemon}
        if len(self.states) < MOST:
            kinds["join"] = self._join
        if frozen:
            kinds[GOES_ON] = lambda: self._go_on(self.random.choice(frozen))
        if others:
            key = self.random.choice(others)
            kinds |= {
                "process killed": lambda: self._strike_process(key, newest[key]["pid"], signal.SIGKILL),
                "process frozen": lambda: self._strike_process(key, newest[key]["pid"], signal.SIGSTOP),
                "agent killed": lambda: self._kill_agent(key),
                "node killed": lambda: self._kill(key),
                "node frozen": lambda: self._freeze(key),
            }
            if leaders := self.leads(others):
                kinds["rendezvous host killed"] = lambda: self._kill(leaders[0])
                kinds["rendezvous host frozen"] = lambda: self._freeze(leaders[0])
        kinds |= self._cuts(spared)
        jobs = sorted({job for job, _ in self.states} - {spared[0]})
        if jobs:
            kinds["job killed"] = lambda: self._kill_job(self.random.choice(jobs))
        kind = self.random.choice(sorted(kinds))
        self.done.append(MISSED if kinds[kind]() is False else kind)

    def _cuts(self, spared: Key) -> dict[str, Callable[[], bool | None]]:
        """Returns the faults of the network that can happen now. The node that is spared may lose a link."""
        networks = self.networks
        if networks is None or len(networks.damages) >= MOST_CUTS:
            return {}
        kinds: dict[str, Callable[[], bool | None]] = {}
        others = sorted(self.team.intersection(self.running()) - {spared})
        if others:
            key, link = self.random.choice(others), self.random.sample(sorted({*others, spared}), 2)
            kinds |= {
                "cut off": lambda: networks.cut_off(key, sends=True, receives=True),
                "what is sent lost": lambda: networks.cut_off(key, sends=True, receives=False),
                "what is received lost": lambda: networks.cut_off(key, sends=False, receives=True),
                "link cut": lambda: networks.part(*link, both=True),
                "link cut in one direction": lambda: networks.part(*link, both=False),
            }
        return kinds

    def _mend(self) -> None:
        assert self.networks is not None
        self.networks.mend(self.random.choice(self.networks.damages))
        self.done.append(MENDED)

    def _gone(self, key: Key) -> None:
        del self.states[key]
        if self.networks:
            self.networks.remove(key)

    def _nodes(self, job: str) -> list[Key]:
        return [key for key in self.states if key[0] == job]

    def _join(self) -> bool:
        self._start(f"job{len(self.jobs)}", 1, "--join", NAME)
        return True

    def _strike_process(self, key: Key, pid: int, signum: int) -> bool:
        self.struck[key] = pid
        return _signal(pid, signum)

    def _kill_agent(self, key: Key) -> bool:
        self._gone(key)
        return send(self.processes(key)[1:2], signal.SIGKILL)

    def _kill(self, key: Key) -> bool:
        self._gone(key)
        found = self.processes(key)
        send(found, signal.SIGSTOP)
        return send(found, signal.SIGKILL)

    def lose(self, key: Key, processes: list[psutil.Process]) -> None:
        """Kills all that runs on a node, with processes that do not belong to its training."""
        send(processes, signal.SIGKILL)
        self._kill(key)

    def _freeze(self, key: Key) -> bool:
        self.states[key] = "frozen"
        return send(self.processes(key), signal.SIGSTOP)

    def _go_on(self, key: Key) -> bool:
        self.states[key] = "runs"
        self.struck.pop(key, None)  # it goes on with the others
        return send(self.processes(key)[::-1], signal.SIGCONT)

    def _kill_daemon(self) -> bool:
        job = self.random.choice(sorted({key[0] for key in self.states}))
        return send(self._of_job(job, "hpcstage.daemon")[:1], signal.SIGKILL)

    def _kill_job(self, job: str) -> bool:
        found = self._of_job(job)
        for key in self._nodes(job):
            self._gone(key)
        send(found, signal.SIGSTOP)
        return send(found, signal.SIGKILL)

    # ---- the whole

    def run(self, faults: int) -> None:
        """Has so many faults happen, and waits after each until the training goes on. Raises TrainingStuck."""
        while self.count() < faults:
            spared = self.random.choice(sorted(self.team))
            at = time.time()
            self.strike(spared)
            while self.random.random() < AGAIN_P and self.count() < faults:
                time.sleep(self.random.random() * AGAIN_S)  # the moment is the point, nothing waits for it
                self.done.append(MEANWHILE)
                at = time.time()
                self.strike(spared)
            began_s = time.monotonic()
            self.settle(at)
            self.waits_s.append(time.monotonic() - began_s)

    def cut_once(self) -> None:
        """Has a cut happen, and mends it when the training goes on. Raises TrainingStuck."""
        kinds = self._cuts(self.random.choice(sorted(self.team)))
        kind = self.random.choice(sorted(kinds))
        at = time.time()
        kinds[kind]()
        self.done.append(kind)
        self.settle(at)
        at = time.time()
        self._mend()
        self.settle(at)

    def count(self) -> int:
        """Returns the number of faults so far: that a frozen node goes on, or a cut is mended, is none."""
        return sum(kind not in NO_FAULTS for kind in self.done)

    def end(self) -> dict[str, int]:
        """Lets the training come to its end, and returns the exit codes of the jobs that had a part in that. Raises
        TrainingStuck."""
        for key in [key for key, state in self.states.items() if state == "frozen"]:
            self._go_on(key)
        while self.networks and self.networks.damages:
            self._mend()
        self.settle(time.time())
        (self.work / "stop").touch()
        try:
            codes = {job: process.wait(END_S) for job, process in self.jobs.items()}
        except subprocess.TimeoutExpired as error:
            raise TrainingStuck(f"no end after {self.done[-5:]}: {self.states}\n{self.said()}") from error
        return {job: codes[job] for job in sorted({key[0] for key in self.states})}

    def proven(self) -> dict[str, Any]:
        """Returns what the ledger and the weights say."""
        import torch

        from benchmarks.workload.elastic_chaos import Files, follow
        from hpcstage.elastic.sampleledger import check

        data = Files(self.data)
        found = check(self.agreed(), len(data))
        models = [torch.load(self.work / f"model-{rank}.pt") for rank in range(len(self.team))]
        followed = follow(self.agreed(), data)
        return {
            "steps": found.steps,
            "epochs": found.epochs,
            "memberships": found.generations,
            "rolled_back": found.rolled_back,
            "wrong_epochs": len(found.wrong),
            "ranks_differ": sum(not torch.equal(one[name], models[0][name]) for one in models for name in followed),
            "weights_off": max(float((models[0][name] - tensor).abs().max()) for name, tensor in followed.items()),
        }

    def left(self) -> list[str]:
        """Returns what is left when all is over: processes, and directories of nodes after `hpcstage clean`."""
        limit_s = time.monotonic() + GONE_S
        while (processes := self._all()) and time.monotonic() < limit_s:
            time.sleep(0.1)
        words = [sys.executable, "-m", "hpcstage", "clean"]
        subprocess.run(words, cwd=self.work, env=self.env, capture_output=True, timeout=60, check=False)
        nodes = [os.fspath(path) for path in self.local.glob("hpcstage-*/*/")]
        return [*(f"{process.pid} {process.cmdline()[:6]}" for process in processes), *nodes]

    def _all(self) -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get("CHAOS") == os.fspath(self.work):
                    found.append(process)
        return found

    def said(self) -> str:
        """Returns what the jobs said last."""
        texts = {path.stem: path.read_text(errors="replace") for path in sorted(self.work.glob("*.log"))}
        return "\n".join(f"--- {job}\n{text[-3000:]}" for job, text in texts.items())

    def close(self) -> None:
        """Kills what is there."""
        send(self._all(), signal.SIGKILL)
        for process in self.jobs.values():
            process.wait()
        if self.networks:
            self.networks.close()


def send(processes: list[psutil.Process], signum: int) -> bool:
    """Sends a signal to processes, and returns whether one of them was there."""
    return sum([_signal(process.pid, signum) for process in processes]) > 0


def _signal(pid: int, signum: int) -> bool:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signum)
        return True
    return False


@contextlib.contextmanager
def chaos(options: Options, seed: int) -> Iterator[Chaos]:
    """Gives a training that has not begun, and ends it."""
    work = Path(tempfile.mkdtemp(prefix="hpcstage-bench-elastic-", dir=options.work_dir))
    local = Path(tempfile.mkdtemp(prefix="hpcstage-bench-elastic-", dir=options.memory_dir or "/dev/shm"))
    made = Chaos(work, local, seed, apart=has_networks())
    try:
        yield made
    finally:
        made.close()
        for path in (work, local):
            shutil.rmtree(path, ignore_errors=True)


def sample(options: Options, bench: Bench) -> dict[str, Any]:
    """One training with its faults; the seed is the number of the round."""
    seed = len(bench.select(CELL, ARM)) + 1
    began_s = time.monotonic()
    with chaos(options, seed) as made:
        made.begin()
        if made.networks:
            made.cut_once()
        made.run(QUICK_FAULTS if options.quick else FAULTS)
        codes = made.end()
        proven = made.proven()
        return {
            "seconds": time.monotonic() - began_s,
            "seed": seed,
            "faults": made.count(),
            "meanwhile": made.done.count(MEANWHILE),
            "kinds": dict(Counter(kind for kind in made.done if kind != MEANWHILE)),
            "median_wait_s": statistics.median(made.waits_s),
            "longest_wait_s": max(made.waits_s),
            "codes": codes,
            **proven,
            "left": made.left(),
        }


def show(bench: Bench) -> list[Figure]:
    """Returns the figures."""
    found = bench.select(CELL, ARM)
    if not found:
        return []
    kinds: Counter[str] = Counter()
    for one in found:
        kinds.update(one["kinds"])
    asked, cuts = (QUICK_FAULTS, QUICK_CUTS) if bench.options.quick else (FAULTS, LEAST_CUTS)
    wrong, differ, left = (
        float(sum(count(one) for one in found))
        for count in (lambda one: one["wrong_epochs"], lambda one: one["ranks_differ"], lambda one: len(one["left"]))
    )
    off = max(one["weights_off"] for one in found)
    failed = any(any(one["codes"].values()) for one in found)
    return [
        at_least("random faults after which training went on", float(sum(one["faults"] for one in found)), asked),
        at_least("random faults: most in one training", float(max(one["faults"] for one in found)), asked),
        at_least("random faults: cuts of a network among them", float(sum(kinds[kind] for kind in CUTS)), cuts),
        at_most("random faults: epochs in which a sample did not count once", wrong, 0),
        at_most("random faults: weights off those of a training without faults", off, MOST_OFF),
        at_most("random faults: ranks whose weights differ", differ, 0),
        holds("random faults: all jobs that trained in the end ended with 0", not failed),
        at_most("random faults: processes and directories left behind", left, 0),
    ]
