"""`hpcstage run --elastic` on virtual nodes: a script with snapshots goes on when processes and nodes are lost, and a
policy that fails ends everything."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from conftest import GLOO, Hpcstage, wait_for
from programs import node

pytest.importorskip("torch")

pytestmark = [pytest.mark.torch, pytest.mark.slow, pytest.mark.timeout(240)]

TRAIN = """
import os, sys, time
import torch, torch.distributed as dist
work = sys.argv[1]
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
weights, step, snapshot = torch.zeros(1), 0, os.path.join(work, "snapshot")
if os.path.exists(snapshot):
    weights, step = torch.load(snapshot)
stop = torch.zeros(1)
while not stop.item():
    gradient = torch.ones(1)
    dist.all_reduce(gradient)
    weights, step = weights + gradient / world, step + 1
    if rank == 0:
        torch.save((weights, step), snapshot + ".new")
        os.replace(snapshot + ".new", snapshot)
    with open(os.path.join(work, "steps"), "a") as file:
        file.write(f"{os.environ['HPCSTAGE_VIRTUAL_NODE']} {os.getpid()} {rank} {world} {step} {weights.item():g}\\n")
    stop[0] = float(os.path.exists(os.path.join(work, "stop")))
    dist.all_reduce(stop, dist.ReduceOp.MAX)
    time.sleep(0.05)
dist.destroy_process_group()
"""


class Training:
    """A training on virtual nodes."""

    def __init__(self, hpcstage: Hpcstage, *options: str) -> None:
        self.work = hpcstage.cwd
        (self.work / "train.py").write_text(TRAIN)
        command = ["run", *options, "--", sys.executable, "train.py", os.fspath(self.work)]
        self.said = self.work / "said"
        with self.said.open("wb") as said:
            self.process = subprocess.Popen(
                hpcstage.command(*command), cwd=self.work, env={**hpcstage.env, **GLOO}, stdin=subprocess.DEVNULL,
                stdout=said, stderr=said,
            )  # fmt: skip

    def steps(self) -> list[tuple[int, ...]]:
        """Node, process, rank, world, step, weights."""
        path = self.work / "steps"
        return [tuple(map(int, line.split())) for line in path.read_text().splitlines()] if path.exists() else []

    def wait(self, world: int, after: int = 0) -> list[tuple[int, ...]]:
        """Waits until so many train, not counting the first steps that were written; returns who they are."""

        def now() -> list[tuple[int, ...]]:
            assert self.process.poll() is None, self.text()
            return [row for row in self.steps()[after:] if row[3] == world]

        wait_for(lambda: len({row[0] for row in now()}) == world, 90, f"training on {world}: {self.text()}")
        return sorted({row[:2] for row in now()})

    def text(self) -> str:
        return self.said.read_text(errors="replace")

    def whole_node(self, index: int) -> list[psutil.Process]:
        """All processes of a virtual node, with what stages there."""
        found = node(self.process, index)
        for process in psutil.Process(self.process.pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                words = process.cmdline()
                is_exchange = "hpcstage.exchange" in words and process.environ().get("PMI_RANK") == str(index)
                if is_exchange or any(word.endswith(f".v{index}/spec.json") for word in words):
                    found.append(process)
        return found

    def kill(self, processes: list[psutil.Process]) -> int:
        """Returns how many steps had been written before."""
        for process in processes:
            process.suspend()
        count = len(self.steps())
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):  # one may go with another
                process.kill()
        return count

    def end(self) -> int:
        (self.work / "stop").touch()
        return self.process.wait(90)


@pytest.fixture
def train(hpcstage: Hpcstage) -> Callable[..., Training]:
    started: list[Training] = []

    def start(*options: str) -> Training:
        started.append(Training(hpcstage, *options))
        return started[-1]

    yield start  # type: ignore[misc]
    for training in started:
        if training.process.poll() is None:
            training.process.terminate()
            training.process.wait(60)


def test_it_goes_on_without_a_worker_and_without_a_node(
    train: Callable[..., Training], hpcstage: Hpcstage, make_tree: Callable[..., Path]
) -> None:
    training = train("--elastic", "2:3", "--data", os.fspath(make_tree(files=30)))
    first = dict(training.wait(3))
    count = training.kill([psutil.Process(first[1])])
    second = dict(training.wait(3, count))
    assert not set(first.values()) & set(second.values()), "all processes are restarted"
    lost = training.whole_node(0)
    assert any("hpcstage.daemon" in process.cmdline() for process in lost)
    count = training.kill(lost)
    third = dict(training.wait(2, count))
    assert set(third) == {1, 2}
    assert training.end() == 0, training.text()
    steps = training.steps()
    assert all(row[4] == row[5] for row in steps), "the weights count the steps"
    assert steps[-1][4] >= max(row[4] for row in steps[:count]) - 1, "it went on from the snapshot"
    assert training.text().count("torchrun is put in between") == 1
    (agreed,) = hpcstage.cwd.glob("hpcstage-runs/*/elastic-*")
    assert len(list(agreed.glob("generation-*"))) >= 3
    assert "never attached" not in training.text(), "what ran on the lost node had attached to its daemon"


def test_a_policy_s_fail_ends_all(train: Callable[..., Training]) -> None:
    """The agent of one node is killed alone: what it started does not outlive it."""
    training = train("--elastic", "2", "--policy", "failstop")
    workers = dict(training.wait(2))
    _, agent, *_ = node(training.process, 1)
    agent.kill()
    assert training.process.wait(90) == 75, training.text()
    assert "policy failstop said fail" in training.text()
    assert not psutil.pid_exists(workers[1])


def test_sigterm_ends_all(train: Callable[..., Training]) -> None:
    training = train("--elastic", "1:2")
    training.wait(2)
    training.process.terminate()
    assert training.process.wait(60) != 0


@pytest.mark.parametrize(
    ("options", "command", "says"),
    [
        (["--elastic", "3:4", "--nodes", "2"], "python", "needs 3 nodes and there are 2"),
        (["--elastic", "2", "--policy", "mine.py:Mine"], "python", "mine.py is not a file"),
        (["--policy", "failstop"], "python", "--policy is for --elastic"),
        (["--elastic", "2"], "sh", "neither torchrun nor Python"),
        (["--elastic", "2"], "torchrun --nnodes=2", "--nnodes=2: --elastic sets this option"),
        (["--elastic", "2"], "pythonless", "it is not there"),
    ],
)
def test_bad_input_starts_nothing(hpcstage: Hpcstage, options: list[str], command: str, says: str) -> None:
    words = {"python": [sys.executable]}.get(command, command.split())
    program = hpcstage.cwd / "program"
    program.write_text(f"open({os.fspath(hpcstage.cwd / 'ran')!r}, 'w')\n")
    done = hpcstage(
        "run", *options, "--", *words, program, env={"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin"}
    )
    assert done.returncode == 2, done.stderr
    (line,) = done.stderr.decode().splitlines()
    assert says in line
    assert not (hpcstage.cwd / "ran").exists()
    assert not list(hpcstage.cwd.glob("hpcstage-runs/*"))


def test_processes_know_where_checkpoints_are_copied_to(hpcstage: Hpcstage) -> None:
    pytest.importorskip("xxhash")
    (hpcstage.cwd / "train.py").write_text("import os; print(os.environ['HPCSTAGE_ELASTIC_DRAINED'])\n")
    done = hpcstage("run", "--elastic", "1", "--checkpoint", "saves", "--", sys.executable, "train.py", env=GLOO,
                    timeout_s=120)  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.decode().split() == [os.path.realpath(hpcstage.cwd / "saves")]


def test_without_a_local_disk_it_trains_all_the_same(hpcstage: Hpcstage) -> None:
    (hpcstage.cwd / "train.py").write_text("print('here')\n")
    done = hpcstage("run", "--elastic", "2", "--local-dir", "none", "--", sys.executable, "train.py", env=GLOO,
                    timeout_s=120)  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(b"here") == 2
