"""`hpcstage.torch.Elastic` with `--checkpoint` on several nodes: whoever is the first rank saves, a lost node takes
nothing with it, and the next run goes on where this one was."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator

import psutil
import pytest
from conftest import GLOO, Hpcstage, wait_for
from programs import LINEAR, node

pytest.importorskip("torch")
pytest.importorskip("xxhash")

pytestmark = [pytest.mark.torch, pytest.mark.slow]
TRAIN = (
    LINEAR
    + """
elastic = Elastic(model, optimizer, sampler, checkpointer=Checkpointer(every=5))

def train(net):
    stop = torch.zeros(1)
    while not stop.item():
        for _ in elastic.epochs(elastic.epoch + 1):
            for x, y in DataLoader(data, batch_sampler=sampler):
                optimizer.zero_grad()
                torch.nn.functional.mse_loss(net(x), y).backward()
                optimizer.step()
                elastic.commit()
                with open("steps", "a") as file:
                    print(os.environ["HPCSTAGE_VIRTUAL_NODE"], elastic.rank, elastic.world, elastic.step, file=file)
                time.sleep(0.03)
        stop[0] = float(os.path.exists("stop"))
        torch.distributed.all_reduce(stop, torch.distributed.ReduceOp.MAX)

elastic.run(train)
"""
)
Start = Callable[[], "subprocess.Popen[bytes]"]


@pytest.fixture
def start(hpcstage: Hpcstage) -> Iterator[Start]:
    (hpcstage.cwd / "train.py").write_text(TRAIN)
    started: list[subprocess.Popen[bytes]] = []

    def run() -> subprocess.Popen[bytes]:
        options = ("--elastic", "1:2", "--survivors", "keep", "--checkpoint", "saves")
        with (hpcstage.cwd / "said").open("ab") as said:
            process = subprocess.Popen(
                hpcstage.command("run", *options, "--", sys.executable, "train.py"),
                cwd=hpcstage.cwd, env={**hpcstage.env, **GLOO}, stdin=subprocess.DEVNULL, stdout=said, stderr=said,
            )  # fmt: skip
        started.append(process)
        return process

    yield run
    for process in started:
        if process.poll() is None:
            process.terminate()
            process.wait(300)


def test_the_next_run_goes_on_though_the_node_that_saved_was_lost(start: Start, hpcstage: Hpcstage) -> None:
    def said() -> str:
        return (hpcstage.cwd / "said").read_text(errors="replace")

    def steps(after: int = 0) -> list[list[int]]:
        path = hpcstage.cwd / "steps"
        lines = path.read_text().splitlines() if path.exists() else []
        return [list(map(int, line.split())) for line in lines[after:]]

    def wait(what: Callable[[], bool], why: str) -> None:
        wait_for(lambda: what() or run.poll() is not None, 300, why)
        assert what(), said()

    run = start()
    wait(lambda: any(step[2] == 2 and step[3] > 12 for step in steps()), "steps of two nodes")
    saver = next(step[0] for step in steps() if step[1] == 0)
    count = len(steps())
    for process in node(run, saver):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    wait(lambda: any(step[2] == 1 for step in steps(count)), "steps of the other node")
    alone = next(step for step in steps(count) if step[2] == 1)
    assert alone[0] != saver
    assert alone[3] > 12, "it went on from the memory of its process"
    (hpcstage.cwd / "stop").touch()
    assert run.wait(300) == 0, said()
    last, count = max(step[3] for step in steps()), len(steps())
    assert any(str(last) in name for name in os.listdir(hpcstage.cwd / "saves")), said()
    run = start()
    assert run.wait(300) == 0, said()
    assert min(step[3] for step in steps(count)) == last + 1, said()
