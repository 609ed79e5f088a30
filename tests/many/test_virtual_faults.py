"""Any process of ours killed at a random moment, on several nodes: the program reads the same and ends in order."""

from __future__ import annotations

import contextlib
import json
import random
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import manylab
import psutil
import pytest
from conftest import Hpcstage, wait_for

from hpcstage.node import mpifiles

Tree = Callable[..., Path]
pytestmark = manylab.needs_mpi


def victims(process: subprocess.Popen[bytes], kind: str, node: int) -> list[psutil.Process]:
    """Processes of one kind, or all of a virtual node."""
    staging, exchanging = manylab.of_nodes(process, node), ranks(process).get(node, [])
    return {
        "daemon": staging[:1],
        "exchange": exchanging,
        "node": [*staging, *exchanging],
        "mpi": [*manylab.below(process, "mpiexec"), *manylab.below(process, "mpiexec.hydra")],
        "lead": manylab.below(process, "hpcstage.lead"),
    }[kind]


def stored(local_dir: Path) -> list[int]:
    """Files in the stores of two virtual nodes."""
    return [len(list(local_dir.glob(f"hpcstage-*/*.v{node}/store/**/*.bin"))) for node in (0, 1)]


def ranks(process: subprocess.Popen[bytes]) -> dict[int, list[psutil.Process]]:
    """The exchanges, by node."""
    found: dict[int, list[psutil.Process]] = {}
    for one in manylab.below(process, "hpcstage.exchange"):
        with contextlib.suppress(psutil.Error, KeyError):  # mpiexec has no rank
            found.setdefault(int(one.environ()["PMI_RANK"]), []).append(one)
    return found


def exchanges(process: subprocess.Popen[bytes]) -> set[int]:
    """Pids."""
    return {one.pid for of_node in ranks(process).values() for one in of_node}


@pytest.mark.parametrize(
    ("kind", "node"),
    [("daemon", 0), ("daemon", 1), ("mpi", 0), ("exchange", 1), ("node", 0), ("node", 1), ("lead", 0)],
)
def test_the_program_does_not_notice(
    hpcstage: Hpcstage, make_tree: Tree, local_dir: Path, kind: str, node: int
) -> None:
    data = make_tree(files=120, size_bytes=40_000)
    command = manylab.reader_command(hpcstage.cwd, data, 4, epochs=3, pause_s=0.01)
    process = hpcstage.start("run", "--nodes", "2", "--data", data, "--", *command)
    assert process.stdout is not None
    assert process.stdout.readline() == b"started\n"
    ours = psutil.Process(process.pid).children(recursive=True)
    time.sleep(random.Random(f"{kind}{node}").uniform(0, 1))  # the moment is the point, nothing waits for it
    manylab.kill(victims(process, kind, node))
    _, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    assert manylab.written(hpcstage.cwd, 4)[0] == manylab.expected(data, 4, 3)
    assert not psutil.wait_procs(ours, timeout=300)[1]
    wait_for(lambda: not list(local_dir.glob("hpcstage-*/*/")), 120, "the removal of node directories")
    json.loads(hpcstage.records()[-1].read_text())


def test_the_wrapper_is_killed(hpcstage: Hpcstage, make_tree: Tree, local_dir: Path) -> None:
    data = make_tree(files=60)
    command = manylab.reader_command(hpcstage.cwd, data, 2, epochs=3, pause_s=0.01)
    process = hpcstage.start("run", "--nodes", "2", "--data", data, "--", *command)
    assert process.stdout is not None
    assert process.stdout.readline() == b"started\n"
    ours = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    process.communicate(timeout=300)
    assert not psutil.wait_procs(ours, timeout=300)[1]
    assert manylab.written(hpcstage.cwd, 2)[0] == manylab.expected(data, 2, 3)
    wait_for(lambda: not list(local_dir.glob("hpcstage-*/*/")), 120, "the removal of node directories")


def test_a_world_that_dies_is_started_anew(hpcstage: Hpcstage, make_tree: Tree, local_dir: Path) -> None:
    data = make_tree(files=60)
    command = manylab.reader_command(hpcstage.cwd, data, 2, epochs=30, pause_s=0.01)
    process = hpcstage.start("run", "--nodes", "2", "--placement", "replicate", "--data", data, "--", *command)
    wait_for(lambda: stored(local_dir) == [60, 60], 120, "all files on both nodes")
    first = exchanges(process)
    manylab.kill(victims(process, "mpi", 0))
    wait_for(lambda: len(exchanges(process) - first) >= 2, 120, "new exchanges")
    _, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    assert manylab.written(hpcstage.cwd, 2)[0] == manylab.expected(data, 2, 30)
    assert [part["group"]["generations"] for part in manylab.parts_of(hpcstage)] == [2, 2]


def test_mpi_leaves_no_memory_behind_whoever_is_killed(hpcstage: Hpcstage, make_tree: Tree, local_dir: Path) -> None:
    data = make_tree(files=60)
    command = manylab.reader_command(hpcstage.cwd, data, 2, epochs=10, pause_s=0.01)
    process = hpcstage.start("run", "--nodes", "2", "--placement", "replicate", "--data", data, "--", *command)
    wait_for(lambda: stored(local_dir) == [60, 60], 120, "all files on both nodes")
    running = exchanges(process)
    assert len(running) == 2
    assert [mpifiles.mapped(pid) for pid in running] == [[], []], "what has no name is gone with its process"
    _, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
