"""Programs of several ranks, and what they must give, for tests of runs on several nodes."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import conftest
import psutil
import pytest
from conftest import Hpcstage, wait_for

needs_mpi = pytest.mark.skipif(importlib.util.find_spec("mpi4py") is None, reason="needs mpi4py and an MPI")

READER = """
import hashlib, os, sys, time
root, epochs, pause_s = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
total = hashlib.sha256()
names = sorted(os.path.join(d, f) for d, _, files in os.walk(root) for f in files)
for epoch in range(epochs):
    for name in names[(rank + epoch) % size :: size]:
        with open(name, "rb") as file:
            total.update(file.read())
        time.sleep(pause_s)
with open(f"out.{rank}", "w") as file:
    file.write(total.hexdigest() + " " + os.environ.get("HPCSTAGE_NODE_DIR", ""))
"""
"""One rank: reads its share of the files, another one in each epoch."""

RANKS = """
import os, subprocess, sys
size = int(sys.argv[1])
started = [
    subprocess.Popen([sys.executable, *sys.argv[2:]], env={**os.environ, "RANK": str(r), "WORLD_SIZE": str(size)})
    for r in range(size)
]
print("started", flush=True)
sys.exit(max(process.wait() for process in started))
"""
"""A launcher: as many processes with a rank each."""


def write_programs(directory: Path) -> tuple[Path, Path]:
    """(launcher, reader)."""
    ranks, reader = directory / "ranks.py", directory / "reader.py"
    ranks.write_text(RANKS)
    reader.write_text(READER)
    return ranks, reader


def reader_command(directory: Path, data: Path, size: int, epochs: int = 2, pause_s: float = 0.0) -> list[str]:
    """A command of `size` ranks that reads all of `data` in each epoch."""
    ranks, reader = write_programs(directory)
    return [sys.executable, str(ranks), str(size), str(reader), str(data), str(epochs), str(pause_s)]


def expected(data: Path, size: int, epochs: int = 2) -> list[str]:
    """What the ranks must write."""
    names = sorted(os.path.join(d, f) for d, _, files in os.walk(data) for f in files)
    found = []
    for rank in range(size):
        total = hashlib.sha256()
        for epoch in range(epochs):
            for name in names[(rank + epoch) % size :: size]:
                total.update(Path(name).read_bytes())
        found.append(total.hexdigest())
    return found


def written(directory: Path, size: int) -> tuple[list[str], list[str]]:
    """(digests, node directories) that the ranks wrote."""
    lines = [(directory / f"out.{rank}").read_text().split(" ", 1) for rank in range(size)]
    return [line[0] for line in lines], [line[1] for line in lines]


def record_of(hpcstage: Hpcstage) -> dict[str, Any]:
    """The last run's record."""
    data: dict[str, Any] = json.loads(hpcstage.records()[-1].read_text())
    return data


def parts_of(hpcstage: Hpcstage) -> list[dict[str, Any]]:
    """The nodes' parts of the last run, by node index."""
    run_dir = max(hpcstage.cwd.glob("hpcstage-runs/*"), key=lambda path: path.stat().st_mtime_ns)
    parts = [json.loads(path.read_text()) for path in (run_dir / "nodes").glob("*.json")]
    return sorted(parts, key=lambda part: part["node_index"])


def run_past_half(
    hpcstage: Hpcstage,
    nodes: int,
    readers: int,
    words: Sequence[str | os.PathLike[str]],
    at_half: Callable[[Any], object],
    limit_s: float,
) -> None:
    """Runs a command of hpcstage. Each of its ranks that reads says that it is in the middle by a file `half.RANK`, and
    goes on once there is `go`; `at_half` is done between."""
    process = hpcstage.start("run", "--nodes", str(nodes), *words)
    halves = [hpcstage.cwd / f"half.{rank}" for rank in range(readers)]
    wait_for(lambda: all(half.exists() for half in halves) or process.poll() is not None, limit_s)
    at_half(process)
    (hpcstage.cwd / "go").touch()
    _, errors = process.communicate(timeout=limit_s)
    assert process.returncode == 0, errors


def below(process: subprocess.Popen[bytes], word: str) -> list[psutil.Process]:
    """Processes below a wrapper, wherever in the tree, that run this module or program; the oldest first."""
    all_ = conftest.below(process.pid)
    found = [child for child, words in all_ if word in words or (words and os.path.basename(words[0]) == word)]
    return sorted(found, key=lambda one: one.create_time())


def of_nodes(process: subprocess.Popen[bytes], *nodes: int) -> list[psutil.Process]:
    """Processes of virtual nodes below a wrapper, daemons and theirs, the oldest first."""
    ends = tuple(f".v{node}/spec.json" for node in nodes)
    found = [child for child, words in conftest.below(process.pid) if any(word.endswith(ends) for word in words)]
    return sorted(found, key=lambda one: one.create_time())


def kill(processes: list[psutil.Process]) -> None:
    """All at once, as a node's death would."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.suspend()
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
