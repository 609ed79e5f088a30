"""Processes of hpcstage are killed at random moments while several nodes train: does the training notice?

Each try runs a training of PyTorch on virtual nodes and ends, with SIGKILL, one daemon, the MPI launcher, one exchange,
all processes of one virtual node, or the lead. It counts as passed if the training ends with 0, with the same losses
and weights bit by bit as without hpcstage, and if no process and no node directory is left.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from benchmarks.files import Place, empty, make_files, place
from benchmarks.harness import Bench, Figure, Options, at_least, holds, options_of, parser
from benchmarks.nodes import RANKS
from benchmarks.programs import environment, hpcstage_command, ranks_command, run
from benchmarks.storage import Storage
from hpcstage.emulator import Settings

VICTIMS = ("daemon", "node", "mpi", "exchange", "lead")
TRIES, QUICK_TRIES = 50, 2
"""So many that killed somebody."""
MOST_PER_KILL = 2
"""A victim may not be there yet: then another moment is tried."""
NODES, EPOCHS, BATCH = 2, 2, 2
FILES, QUICK_FILES, FILE_BYTES = 200, 60, 60_000
STEP_S = 0.05
SETTINGS = Settings(bandwidth_bytes_per_s=10e6, metadata_latency_s=0.002, data_latency_s=0.002)
LIMIT_S = 120.0
GONE_S = 10.0
START_S = 2.0
STARTS = 0.3
"""So many of the moments, as a share of the steps, come before the first step."""
LAST = 0.8
"""No moment is after this share of the steps: all that may be killed is still there."""


class Tries:
    """One dataset, one program, and what it must give."""

    def __init__(self, where: Place, options: Options) -> None:
        self.where = where
        self.options = options
        self.data = where.memory / "data"
        make_files(self.data, QUICK_FILES if options.quick else FILES, FILE_BYTES)
        self.timings, self.progress = where.disk / "timings.json", where.disk / "progress"

    def plain(self) -> dict[str, Any]:
        """Without hpcstage: the digest that all must have, and how many steps it takes."""
        with self._storage() as storage:
            done = run(self._command(storage.path), self.where.disk, limit_s=LIMIT_S)
        return {"seconds": done.seconds, "steps": self._steps(), "digest": self._digest()}

    def one(self, number: int, steps: int, digest: str) -> dict[str, Any]:
        """One try; everything about it follows from its number but the machine's mood."""
        rng = random.Random(number)
        victim, node, step = (
            VICTIMS[number % len(VICTIMS)],
            rng.randrange(NODES),
            int(rng.uniform(-STARTS, LAST) * steps),
        )
        placement, delay_s = rng.choice(("replicate", "partition")), rng.uniform(0, START_S) if step <= 0 else 0.0
        local, run_dir = self.where.local.renew(), empty(self.where.disk / "run")
        empty(self.where.disk / "state")
        for left_over in (self.timings, self.progress):
            left_over.unlink(missing_ok=True)
        with self._storage() as storage:
            options = ("--nodes", str(NODES), "--placement", placement)
            head = hpcstage_command("runtime", run_dir, local, str(storage.path), options)
            began = time.monotonic()
            with started([*head, *self._command(storage.path)], self.where.disk) as process:
                assert process.stdout is not None
                process.stdout.readline()
                while self._steps() < step and process.poll() is None and time.monotonic() - began < LIMIT_S:
                    time.sleep(0.005)
                time.sleep(delay_s)  # the moment is the point, nothing waits for it
                ours = below(process.pid)
                killed = kill(chosen(ours, victim, node))
                out, err = process.communicate(timeout=LIMIT_S)
                seconds = time.monotonic() - began
                left = psutil.wait_procs(ours, timeout=GONE_S)[1]
        directories = [path.name for path in local.glob("hpcstage-*/*/")]
        same = self._digest() == digest
        return {
            "victim": victim, "node": node, "step": step, "delay_s": delay_s, "placement": placement, "killed": killed,
            "seconds": seconds, "code": process.returncode, "same": same, "processes_left": len(left),
            "directories_left": directories, "stderr": err.decode(errors="replace")[-1500:], "out": out.decode()[-200:],
            "passed": process.returncode == 0 and same and not left and not directories,
        }  # fmt: skip

    def _command(self, data: Path) -> list[str]:
        words = ["--data", data, "--epochs", EPOCHS, "--batch", BATCH, "--step-s", STEP_S]
        return ranks_command(NODES, RANKS, [*words, "--timings", self.timings, "--progress", self.progress])

    def _storage(self) -> Storage:
        return Storage(self.data, SETTINGS, self.where.memory)

    def _steps(self) -> int:
        """So many has the training done."""
        return self.progress.stat().st_size if self.progress.exists() else 0

    def _digest(self) -> str | None:
        try:
            found: str = json.loads(self.timings.read_text())["digest"]
        except (OSError, ValueError):
            return None
        return found


@contextlib.contextmanager
def started(command: Sequence[str], cwd: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A command that is ended, with all that it started, if it has not by then."""
    process = subprocess.Popen(
        command,
        cwd=cwd,
        env=environment(cwd),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            everything = psutil.Process(process.pid).children(recursive=True)
            process.kill()
            kill(everything)
            process.communicate()


def below(pid: int) -> list[psutil.Process]:
    """Processes of hpcstage below a wrapper: its daemons and copiers, the lead, MPI's, the exchanges."""
    found = []
    for child in psutil.Process(pid).children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if role(child):
                found.append(child)
    return found


def role(process: psutil.Process) -> str:
    """What a process is; empty: the user's."""
    words = process.cmdline()
    for module, name in (
        ("hpcstage.daemon", "daemon"),
        ("hpcstage.lead", "lead"),
        ("hpcstage.exchange", "exchange"),
    ):
        if module in words:
            return name
    head = os.path.basename(words[0]) if words else ""
    return "mpi" if head.startswith(("mpiexec", "mpirun", "hydra_pmi")) else ""


def node_of(process: psutil.Process) -> int:
    """The virtual node of a daemon, a copier or an exchange; -1: of none."""
    for word in process.cmdline():
        name = Path(word).parent.suffix
        if word.endswith("spec.json") and name.startswith(".v"):
            return int(name[2:])
    rank = process.environ().get("PMI_RANK") or process.environ().get("OMPI_COMM_WORLD_RANK")
    return int(rank) if rank is not None else -1


def chosen(ours: Sequence[psutil.Process], victim: str, node: int) -> list[psutil.Process]:
    """Whom to kill: one process, or all of a node."""
    known = []
    for process in ours:
        with contextlib.suppress(psutil.Error):
            known.append((role(process), node_of(process), process.create_time(), process))
    of_node = sorted((one for one in known if one[1] == node), key=lambda one: one[2])
    if victim == "node":
        return [one[3] for one in of_node if one[0] in ("daemon", "exchange")]
    pool = of_node if victim in ("daemon", "exchange") else known
    return [one[3] for one in pool if one[0] == victim][:1]


def kill(processes: Sequence[psutil.Process]) -> int:
    """All stopped, then all killed, as if at once; how many there were."""
    count = 0
    for act in (psutil.Process.suspend, psutil.Process.kill):
        count = 0
        for process in processes:
            with contextlib.suppress(psutil.Error):
                act(process)
                count += 1
    return count


def measure(bench: Bench, options: Options) -> None:
    """The tries, each once."""
    tries = options.reps or (QUICK_TRIES if options.quick else TRIES)
    with place(options) as where:
        runs = Tries(where, options)
        bench.measure("plain", {"plain": runs.plain}, 1, needed=True)
        plain = bench.select("plain", "plain")[0]
        done = {sample["round"] for sample in bench.select("tries", "try")}
        for number in range(MOST_PER_KILL * tries):
            if number not in done and sum(map(_hit, bench.select("tries", "try"))) < tries:
                bench.add("tries", "try", runs.one(number, plain["steps"], plain["digest"]), number)


def _hit(sample: Mapping[str, Any]) -> bool:
    """Whether its victim was there at that moment."""
    return bool(sample["killed"])


def figures(bench: Bench, tries: int) -> list[Figure]:
    """All must pass; only those that killed somebody count."""
    samples = bench.select("tries", "try")
    return [
        at_least(
            "kills after which all ended as without hpcstage", sum(_hit(s) and s["passed"] for s in samples), tries
        ),
        holds("all tries ended as without hpcstage", all(s["passed"] for s in samples) if samples else None),
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """The command."""
    options = options_of(parser(__doc__).parse_args(argv))
    bench = Bench("faults", options, {"nodes": NODES, "epochs": EPOCHS, "batch": BATCH})
    measure(bench, options)
    return bench.finish(figures(bench, options.reps or (QUICK_TRIES if options.quick else TRIES)))


if __name__ == "__main__":
    sys.exit(main())
