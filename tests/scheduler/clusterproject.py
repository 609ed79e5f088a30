"""What a user has on a cluster: a home and a project on the shared file system, a dataset, a training program.

The virtual environment of the project is the one that the tests run in: the nodes see it under its own name.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from conftest import REPO, content
from nodeslab import HOME, SHARED, UID, Nodes, until

NODES = 4
FILES = 60
FILE_BYTES = 20_000
DATA_BYTES = FILES * FILE_BYTES
PROGRAMS = Path(__file__).parent / "programs"
DATA = SHARED / "data" / "train"
READABLE = [Path(sys.prefix), Path(sys.base_prefix), REPO]
ACTIVATE = f"""
export VIRTUAL_ENV="{sys.prefix}" PATH="{sys.prefix}/bin:$PATH" PYTHONPATH="{REPO}"
export PYTHONDONTWRITEBYTECODE=1
"""
PROJECT = "HPCSTAGE_TEST_WHOSE"
"""A variable that tells whose a process is."""
SCRIPT = """#!/bin/bash
set -eu
. .venv/bin/activate
exec {behind}hpcstage run --data {data} -- {front}python train.py --data {data} {options}
"""


def needs_checkpoints(*, of_nodes: bool = False) -> None:
    """Skips a test, or a module that calls it at its top, where what checkpoints need is missing."""
    pytest.importorskip("xxhash", reason="needs the extra `checkpoint`")
    if of_nodes:
        pytest.importorskip("mpi4py", reason="needs mpi4py and an MPI")


class Project:
    """A project directory of the user, as the job scripts expect one. Paths without `outside` are those on nodes."""

    def __init__(self, nodes: Nodes, name: str) -> None:
        self.nodes = nodes
        self.name = name
        self.path = HOME / name
        self.env = {PROJECT: name, "XDG_STATE_HOME": f"{self.path}/state"}
        self.outside = outside(nodes, self.path)
        (self.outside / ".venv" / "bin").mkdir(parents=True)
        (self.outside / ".venv" / "bin" / "activate").write_text(ACTIVATE)
        for source in (*PROGRAMS.iterdir(), *(REPO / "jobscripts").iterdir()):
            if source.is_file():
                shutil.copy2(source, self.outside / source.name)
        subprocess.run(["chown", "-R", f"{UID}:{UID}", self.outside], check=True)

    def run_dirs(self) -> list[Path]:
        """The run directories of the project, oldest first, as seen from outside."""
        return sorted(self.outside.glob("hpcstage-runs/*"))

    def record(self, run_dir: str | None = None) -> dict[str, Any]:
        """The record of the project's only run, or of the run directory named."""
        (found,) = [self.outside / run_dir] if run_dir else self.run_dirs()
        return json.loads((found / "run.json").read_text())  # type: ignore[no-any-return]

    def report(self) -> str:
        """What `hpcstage report` shows to the user of the last run."""
        line = ". .venv/bin/activate && hpcstage report"
        return self.nodes.run(1, "bash", "-c", line, user=True, cwd=self.path, env=self.env).stdout

    def said(self, pattern: str) -> list[dict[str, Any]]:
        """What the program's processes said, each in a file of its own, whose names match the pattern."""
        return [
            json.loads(line) for path in sorted(self.outside.glob(pattern)) for line in path.read_text().splitlines()
        ]

    def log(self) -> str:
        """All that the project's jobs printed, and logs of daemons that did not end in order, for failing tests."""
        found = [*sorted(self.outside.glob("*.out")), *sorted(self.outside.glob("hpcstage-runs/*/nodes/*.log"))]
        return "\n".join(f"--- {path.name}\n{path.read_text()}" for path in found)


@dataclass(frozen=True)
class Limited:
    """Jobs that run into a time limit of a minute, the shortest that Slurm knows: tests ask for them last."""

    warned: tuple[Project, int]
    """One node, `--signal=B:USR1@20`."""
    ranks_warned: tuple[Project, int]
    """Ranks behind srun on two nodes, `--signal=USR1@20`."""
    unwarned: tuple[Project, int]
    """One node, nothing but the limit."""
    resumed: tuple[Project, int]
    """One node, with checkpoints and outputs; the next job goes on."""


def batch(options: str = "") -> str:
    """A batch script with hpcstage as its own process."""
    return SCRIPT.format(behind="", front="", data=DATA, options=options)


def behind(options: str = "", launcher: str = "srun") -> str:
    """A batch script with hpcstage behind a launcher, once per rank."""
    return SCRIPT.format(behind=f"{launcher} ", front="", data=DATA, options=options)


def front(options: str = "", launcher: str = "srun") -> str:
    """A batch script with one hpcstage in front of a launcher."""
    return SCRIPT.format(behind="", front=f"{launcher} ", data=DATA, options=options)


def ranks_wait(project: Project, ranks: int = 1) -> None:
    """Until all ranks have read the dataset and wait for a signal."""
    until(lambda: sum("digest" in line for line in project.said("rank-*.said")) == ranks, 120, f"{ranks} ranks")


def heard(project: Project) -> dict[int, list[int]]:
    """The signals that each rank got, but for CONT, which schedulers send along."""
    numbers: dict[int, list[int]] = {}
    for line in project.said("rank-*.said"):
        if line.get("signal") not in (None, signal.SIGCONT):
            numbers.setdefault(line["rank"], []).append(line["signal"])
    return numbers


def processes_of(nodes: Nodes, *, but: set[str]) -> list[psutil.Process]:
    """The user's processes on all nodes, without those of some projects."""
    found = []
    for process in nodes.processes(uid=UID):
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.environ().get(PROJECT) not in but:
                found.append(process)
    return found


def staging_of(project: Project, index: int | None = None) -> list[psutil.Process]:
    """A project's processes of hpcstage but for the wrappers, on all nodes or on one."""
    found = []
    for process in project.nodes.processes(uid=UID, index=index):
        with contextlib.suppress(psutil.NoSuchProcess):
            ours = any(word.startswith("hpcstage.") for word in process.cmdline())
            if ours and process.environ().get(PROJECT) == project.name:
                found.append(process)
    return found


def kill_daemons(project: Project, index: int) -> int:
    """Kills a project's staging daemon on a node, copiers included, and no other's; how many processes that were."""
    killed = 0
    for process in staging_of(project, index):
        with contextlib.suppress(psutil.NoSuchProcess):
            if "hpcstage.daemon" in process.cmdline():
                process.kill()
                killed += 1
    return killed


def outside(nodes: Nodes, path: Path) -> Path:
    """Where a path on the shared file system lies outside of the nodes."""
    return nodes.shared / path.relative_to(SHARED)


@functools.cache
def digest(epochs: int = 1) -> str:
    """What the training program prints if it has read the whole dataset right."""
    total = hashlib.sha256()
    for _ in range(epochs):
        for index in sorted(range(FILES), key=lambda number: f"class{number % 3}/file{number:05d}"):
            total.update(content(index, FILE_BYTES))
    return total.hexdigest()


def write_dataset(nodes: Nodes) -> None:
    """Puts the dataset on the shared file system."""
    for index in range(FILES):
        path = outside(nodes, DATA) / f"class{index % 3}" / f"file{index:05d}.bin"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content(index, FILE_BYTES))
