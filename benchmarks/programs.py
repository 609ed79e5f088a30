"""The programs that are measured, as a user types them: the training, hpcstage in front of it, cp, the flat-out reader.

Owns: command lines and their wall time. Each command is a process group of its own and is ended at a time limit.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hpcstage.emulator.build import cached_binary, compile_c

_HERE = Path(__file__).resolve().parent
_ROOT = _HERE.parent
TRAIN = _HERE / "workload" / "train.py"
_STARTED = _HERE / "workload" / "started.py"
_FLATOUT = _HERE / "flatout.c"
_LIMIT_S = 900.0
_SCHEDULERS = ("SLURM", "PBS", "SGE", "PE_HOSTFILE", "JOB_ID", "PJM", "LSB", "FLUX", "HPCSTAGE")


@dataclass(frozen=True)
class Done:
    """A command that ended."""

    seconds: float
    code: int
    stdout: str
    stderr: str


@dataclass(frozen=True)
class Training:
    """What the training program is told."""

    data: Path
    names: Path
    epochs: int = 1
    net: str = "cnn"
    workers: int = 2
    start_method: str = "fork"
    prefetch: bool = True
    compute_only: bool = False
    step_s: float = 0.0
    timings: Path | None = None
    weights: Path | None = None
    turns: tuple[Path, Path] | None = None

    def command(self) -> list[str]:
        """The command line."""
        words = [sys.executable, str(TRAIN), "--data", str(self.data), "--list", str(self.names)]
        words += ["--epochs", str(self.epochs), "--net", self.net, "--workers", str(self.workers)]
        words += ["--start-method", self.start_method, "--step", str(self.step_s)]
        words += ["--no-prefetch"] * (not self.prefetch) + ["--compute-only"] * self.compute_only
        words += ["--turns", *map(str, self.turns)] if self.turns else []
        for option, path in (("--timings", self.timings), ("--weights", self.weights)):
            words += [option, str(path)] if path else []
        return words

    def at(self, data: Path) -> Training:
        """The same training on other data."""
        return replace(self, data=data)


class CommandFailed(RuntimeError):
    """A measured command did not end with 0: its sample would mean nothing."""


def environment(cwd: Path | None = None) -> dict[str, str]:
    """A job's environment without a scheduler; hpcstage is found where this checkout has it.

    Memory comes in huge pages: with small ones the same program computes up to 20 % slower in one process than in the
    next, as its pages happen to fall into the cache, and that would drown what is measured.
    """
    kept = {name: value for name, value in os.environ.items() if not name.startswith(_SCHEDULERS)}
    path = [str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    state = {"XDG_STATE_HOME": str(cwd / "state"), "XDG_CONFIG_HOME": str(cwd / "config")} if cwd else {}
    return {**kept, "PYTHONPATH": os.pathsep.join(path), "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1", **state}


def run(command: Sequence[str | Path], cwd: Path, *, limit_s: float = _LIMIT_S, check: bool = True) -> Done:
    """Runs a command to its end and times it. Raises CommandFailed."""
    started_s = time.monotonic()
    process = subprocess.Popen(
        [os.fspath(word) for word in command],
        cwd=cwd,
        env=environment(cwd),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        stdout, stderr = process.communicate(timeout=limit_s)
    finally:
        if process.returncode is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    done = Done(time.monotonic() - started_s, process.returncode, stdout.decode(), stderr.decode(errors="replace"))
    if check and done.code:
        raise CommandFailed(f"{' '.join(map(str, command))} ended with {done.code}: {done.stderr[-2000:]}")
    return done


def hpcstage_command(mode: str, run_dir: Path, local_dir: Path, data: str, options: Sequence[str] = ()) -> list[str]:
    """`hpcstage run` up to the two dashes."""
    words = [sys.executable, "-m", "hpcstage", "run", "--mode", mode, "--data", data]
    return [*words, "--run-dir", str(run_dir), "--local-dir", str(local_dir), *options, "--"]


def ranks_command(ranks: int, program: Path, words: Sequence[object]) -> list[str]:
    """As many processes of a program as ranks, started as torchrun does."""
    return [str(word) for word in (sys.executable, _STARTED, ranks, program, *words)]


def record(run_dir: Path) -> dict[str, Any]:
    """The record that a run left."""
    loaded: dict[str, Any] = json.loads((run_dir / "run.json").read_text(encoding="utf-8"))
    return loaded


def flatout() -> Path:
    """The flat-out reader, compiled once."""
    binary = cached_binary(_FLATOUT)
    if not binary.exists():
        compile_c(_FLATOUT, binary, ["-lpthread"])
    return binary


def read_flat_out(
    paths: Sequence[Path], scratch: Path, threads: int, *, request_bytes: int = 1 << 20
) -> dict[str, float]:
    """Reads files once with so many threads of a C program; gives files, bytes and seconds."""
    names = scratch / "flatout.list"
    names.write_bytes(b"".join(os.fsencode(path) + b"\0" for path in paths))
    done = run([flatout(), "-t", str(threads), "-r", str(request_bytes), names], scratch)
    result: dict[str, float] = json.loads(done.stdout)
    return result
