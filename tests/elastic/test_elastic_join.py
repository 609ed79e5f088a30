"""`hpcstage run --join`: nodes of other jobs come into a training and go, killed or told to, and it goes on."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from conftest import GLOO, Hpcstage, wait_for
from programs import LINEAR

pytest.importorskip("torch")

from hpcstage.elastic.membership.arbiter import BEAT, OFFER
from hpcstage.elastic.sampleledger import check

pytestmark = [pytest.mark.torch, pytest.mark.slow]
SAMPLES = 60
RESTARTED = """
import os, sys, time
import torch, torch.distributed as dist
data, = sys.argv[1:]
read = [open(os.path.join(folder, name), "rb").read() for folder, _, names in os.walk(data) for name in names]
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
weights, step = torch.load("snapshot") if os.path.exists("snapshot") else (torch.zeros(1), 0)
stop = torch.zeros(1)
while not stop.item():
    gradient = torch.ones(1)
    dist.all_reduce(gradient)
    weights, step = weights + gradient / world, step + 1
    if rank == 0:
        torch.save((weights, step), "snapshot.new")
        os.replace("snapshot.new", "snapshot")
    with open("steps", "a") as file:
        file.write(f"{os.environ['JOB']} {os.getpid()} {world} {step} {weights.item():g}\\n")
    stop[0] = float(os.path.exists("stop"))
    dist.all_reduce(stop, dist.ReduceOp.MAX)
    time.sleep(0.05)
dist.destroy_process_group()
"""
KEPT = (
    LINEAR
    + """
elastic = Elastic(model, optimizer, sampler)

def train(net):
    stop = torch.zeros(1)
    while not stop.item() or elastic.epoch < 2:
        for _ in elastic.epochs(elastic.epoch + 1):
            for x, y in DataLoader(data, batch_sampler=sampler):
                optimizer.zero_grad()
                torch.nn.functional.mse_loss(net(x), y).backward()
                optimizer.step()
                elastic.commit()
                with open("steps", "a") as file:
                    file.write(f"{os.environ['JOB']} {os.getpid()} {elastic.world} {elastic.step} {elastic.step}\\n")
                time.sleep(0.03)
        stop[0] = float(os.path.exists("stop"))
        torch.distributed.all_reduce(stop, torch.distributed.ReduceOp.MAX)

elastic.run(train)
"""
)
LONELY = """
class Lonely:
    def ok2run(self, hosts, initial):
        return "ok" if len(hosts) == 1 else "wait"
"""


class Jobs:
    """A training and the jobs that join it."""

    def __init__(self, hpcstage: Hpcstage) -> None:
        self.hpcstage = hpcstage
        self.work = hpcstage.cwd
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, job: str, *words: str) -> subprocess.Popen[bytes]:
        with (self.work / f"{job}.said").open("wb") as said:
            self.processes[job] = subprocess.Popen(
                self.hpcstage.command("run", *words),
                cwd=self.work,
                env={**self.hpcstage.env, **GLOO, "JOB": job},
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=said,
            )
        return self.processes[job]

    def train(self, program: str, *words: str, arguments: tuple[str, ...] = ()) -> None:
        (self.work / "train.py").write_text(program)
        self.start("first", *words, "--name", "night", "--", sys.executable, "train.py", *arguments)

    def join(self, job: str, *words: str) -> subprocess.Popen[bytes]:
        return self.start(job, "--join", "night", *words)

    def text(self, job: str = "") -> str:
        return "".join(
            f"--- {name}\n{(self.work / f'{name}.said').read_text(errors='replace')}"
            for name in self.processes
            if job in ("", name)
        )

    def steps(self) -> list[list[str]]:
        path = self.work / "steps"
        return [line.split() for line in path.read_text().splitlines()] if path.exists() else []

    def wait(self, *jobs: str) -> dict[str, str]:
        """Waits until from now on these jobs train together, and returns their processes."""
        after = len(self.steps())

        def found() -> dict[str, str]:
            return {step[0]: step[1] for step in self.steps()[after:] if step[2] == str(len(jobs))}

        def is_there() -> bool:
            assert all(self.processes[job].poll() is None for job in jobs), self.text()
            return set(found()) == {*jobs}

        wait_for(is_there, 300, f"steps of {jobs}: {self.text()}")
        return found()

    def said(self, job: str, what: str) -> None:
        wait_for(lambda: what in self.text(job), 300, f"{what}: {self.text()}")

    def kill(self, job: str) -> None:
        """Kills a job as a node does that is lost."""
        root = psutil.Process(self.processes[job].pid)
        processes = [root, *root.children(recursive=True)]
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.suspend()
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.processes[job].wait(300)

    def stop(self) -> None:
        (self.work / "stop").touch()

    def agreed(self) -> Path:
        return Path(json.loads((self.work / "hpcstage-runs" / "night.training").read_text())["directory"])


@pytest.fixture
def jobs(hpcstage: Hpcstage) -> Iterator[Jobs]:
    made = Jobs(hpcstage)
    yield made
    for process in made.processes.values():
        if process.poll() is None:
            process.terminate()
    for process in made.processes.values():
        try:
            process.wait(300)
        except subprocess.TimeoutExpired:
            process.kill()
    hpcstage("clean")  # what the jobs that were killed left


def test_jobs_come_and_go(jobs: Jobs, make_tree: Callable[..., Path]) -> None:
    """A training that begins when another job has joined is joined by one that is killed, by one without a local disk
    that is told to end, and by one that stays; it goes on without the job that began it."""
    data = os.fspath(make_tree(files=30))
    jobs.train(RESTARTED, "--elastic", "2:3", "--nodes", "1", "--data", data, arguments=(data,))
    jobs.said("first", "begins when 1 more join by `hpcstage run --join night`")
    second = jobs.join("second")
    jobs.wait("first", "second")
    jobs.join("third")
    jobs.wait("first", "second", "third")
    jobs.kill("third")
    jobs.wait("first", "second")
    fourth = jobs.join("fourth", "--local-dir", "none")
    jobs.wait("first", "second", "fourth")
    fourth.terminate()
    assert fourth.wait(300) == 128 + signal.SIGTERM, jobs.text()
    assert "training night: it goes on without this job" in jobs.text("fourth")
    fifth = jobs.join("fifth")
    jobs.wait("first", "second", "fifth")
    jobs.kill("first")
    jobs.wait("second", "fifth")
    jobs.stop()
    for process in (second, fifth):
        assert process.wait(300) == 0, jobs.text()
    assert "training night: the training is complete" in jobs.text("fifth")
    assert all(step[3] == step[4] for step in jobs.steps()), "the weights count the steps"
    late = jobs.join("late")
    assert late.wait(300) == 0
    (line,) = jobs.text("late").splitlines()[1:]
    assert line == "hpcstage: training night is over: the training is complete"


def test_processes_that_go_on(jobs: Jobs) -> None:
    """With `Elastic` the processes of the training go on when others join and are lost, and each sample counts once."""
    jobs.train(KEPT, "--elastic", "1:3", "--nodes", "1", "--survivors", "keep")
    first = jobs.wait("first")
    jobs.join("second", "--nodes", "2")
    together = wait_together(jobs)
    assert together["first"] == first["first"]
    jobs.kill("second")
    assert jobs.wait("first") == first
    jobs.stop()
    assert jobs.processes["first"].wait(300) == 0, jobs.text()
    found = check(jobs.agreed(), SAMPLES)
    assert not found.wrong, found


def wait_together(jobs: Jobs) -> dict[str, str]:
    """Waits until the training has the two nodes of the second job, and returns a process of each job."""

    def found() -> dict[str, str]:
        return {step[0]: step[1] for step in jobs.steps() if step[2] == "3"}

    wait_for(lambda: len(found()) == 2, 300, f"three ranks: {jobs.text()}")
    return found()


def test_a_policy_that_takes_nobody(jobs: Jobs) -> None:
    """Who joins waits, and ends with the training."""
    (jobs.work / "mine.py").write_text(LONELY)
    jobs.train(RESTARTED, "--elastic", "1:2", "--nodes", "1", "--policy", "mine.py:Lonely", arguments=("/dev/null",))
    jobs.wait("first")
    second = jobs.join("second")
    jobs.said("second", "has come to the training and waits to be taken")
    jobs.wait("first")
    jobs.stop()
    assert jobs.processes["first"].wait(300) == 0, jobs.text()
    assert second.wait(300) == 0, jobs.text()
    assert "training night: the training is complete" in jobs.text("second")
    assert {step[0] for step in jobs.steps()} == {"first"}


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--join", "day"], "there is no training day in"),
        (["--join", "a/b"], "'a/b' is no name"),
        (["--join", "day", "--", "python", "train.py"], "--join starts the command of the training"),
        (["--name", "day", "--data", ".", "--", "true"], "--name is for --elastic"),
        ([], "no command is given"),
    ],
)
def test_bad_input(hpcstage: Hpcstage, words: list[str], says: str) -> None:
    done = hpcstage("run", *words)
    assert done.returncode == 2
    (line,) = done.stderr.decode().splitlines()
    assert says in line


def test_what_cannot_be_joined(jobs: Jobs) -> None:
    """A training that goes on has its name for itself. Nobody joins what is another user's, what others could have
    changed, and what was killed."""
    jobs.train(RESTARTED, "--elastic", "1:2", "--nodes", "1", arguments=("/dev/null",))
    jobs.wait("first")
    name, agreed = jobs.work / "hpcstage-runs" / "night.training", jobs.agreed()

    def refused(*words: str) -> str:
        done = jobs.hpcstage("run", *words, env=GLOO)
        assert done.returncode == 2, done.stderr
        (line,) = done.stderr.decode().splitlines()
        return line

    again = ("--elastic", "1", "--name", "night", "--", sys.executable, "train.py", "/dev/null")
    assert "a training goes on under the name night" in refused(*again)
    assert "--policy is the training's" in refused("--join", "night", "--policy", "failstop")
    agreed.chmod(0o750)
    assert "others have access" in refused("--join", "night")
    agreed.chmod(0o700)
    (agreed / "key").chmod(0o640)
    assert "can be read by others" in refused("--join", "night")
    (agreed / "key").chmod(0o600)
    if os.geteuid() == 0:
        for path in (name, agreed):
            os.chown(path, 12345, -1)
            assert f"{path} belongs to user 12345" in refused("--join", "night")
            os.chown(path, 0, -1)
    signed = (agreed / OFFER).read_bytes()
    (agreed / OFFER).write_bytes(signed.replace(b"night", b"knife"))
    assert "not signed with the key" in refused("--join", "night")
    (agreed / OFFER).write_bytes(signed)
    led = name.read_bytes()
    name.write_text('["night"]')
    assert "leads to no training" in refused("--join", "night")
    name.write_bytes(led)
    jobs.kill("first")
    for path in (agreed / OFFER, agreed / BEAT):
        os.utime(path, (time.time() - 100,) * 2)
    done = jobs.hpcstage("run", "--join", "night", env=GLOO)
    assert done.returncode == 1
    assert b"nobody leads training night any more" in done.stderr
