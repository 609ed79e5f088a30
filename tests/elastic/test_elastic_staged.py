"""`hpcstage.torch.Elastic` with data that is staged: what is announced, and which rank reads what, follow the
membership."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from conftest import GLOO, Hpcstage, wait_for

pytest.importorskip("torch")

from hpcstage.elastic.sampleledger import check

pytestmark = [pytest.mark.torch, pytest.mark.slow]
FILES = 120
TRAIN = """
import json, os, sys, time
import torch
from torch.utils.data import DataLoader, Dataset
from hpcstage.torch import Elastic, ElasticSampler

data_dir, work = sys.argv[1:]
torch.set_num_threads(1)

class Files(Dataset):
    def __init__(self):
        found = sorted(os.path.join(at, name) for at, _, names in os.walk(data_dir) for name in names)
        self.samples = [path for path in found if not path.endswith("unread")]
    def __len__(self):
        return len(self.samples)
    def __getitem__(self, index):
        with open(self.samples[index], "rb") as file:
            return torch.tensor([float(len(file.read()))]), index

data = Files()
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
sampler = ElasticSampler(data, 4, seed=3, locality=True)
elastic = Elastic(model, optimizer, sampler)

def train(net):
    for epoch in elastic.epochs(4):
        for x, ids in DataLoader(data, batch_sampler=sampler):
            optimizer.zero_grad()
            net(x).mean().backward()
            optimizer.step()
            elastic.commit()
            said = {"node": int(os.environ["HPCSTAGE_VIRTUAL_NODE"]), "pid": os.getpid(), "world": elastic.world}
            with open(os.path.join(work, f"steps-{os.getpid()}"), "a") as file:
                file.write(json.dumps({**said, "epoch": epoch, "ids": ids.tolist()}) + "\\n")
            if epoch == 1 and elastic.world == 2 and elastic.step % 5 == 0:
                while not os.path.exists(os.path.join(work, "go")):
                    time.sleep(0.02)
                    elastic.alive()
            time.sleep(0.01)

elastic.run(train)
"""


def steps(work: Path) -> list[dict[str, Any]]:
    lines = [line for path in work.glob("steps-*") for line in path.read_text().splitlines(keepends=True)]
    return [json.loads(line) for line in lines if line.endswith("\n")]


def test_orders_are_announced_anew_after_a_change(
    hpcstage: Hpcstage, tmp_path: Path, make_tree: Callable[..., Path]
) -> None:
    data, run_dir = make_tree(files=FILES, size_bytes=600), tmp_path / "run"
    (data / "unread").touch()  # a node that has opened everything and holds all copies is told of no more epochs
    (tmp_path / "train.py").write_text(TRAIN)
    words = ["run", "--elastic", "1:2", "--survivors", "keep", "--data", data, "--run-dir", run_dir, "--"]
    words += [sys.executable, tmp_path / "train.py", data, tmp_path]
    process = subprocess.Popen(
        hpcstage.command(*words), cwd=hpcstage.cwd, env={**hpcstage.env, **GLOO}, stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        wait_for(
            lambda: any(one["epoch"] == 1 and one["node"] == 1 for one in steps(tmp_path)), 120, "the second epoch"
        )
        killed = next(one["pid"] for one in steps(tmp_path) if one["node"] == 1)
        worker = psutil.Process(killed)
        for lost in [*worker.parents()[:2][::-1], worker]:
            with contextlib.suppress(psutil.NoSuchProcess):  # one may go with another
                lost.send_signal(signal.SIGKILL)
        wait_for(lambda: any(one["world"] == 1 for one in steps(tmp_path)), 300, "steps of the node that is left")
        (tmp_path / "go").touch()
        _, said = process.communicate(timeout=300)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0, said
    (agreed,) = run_dir.glob("elastic-*")
    found = check(agreed, FILES)
    assert not found.wrong, found
    assert found.epochs == 4
    parts = [json.loads(path.read_text()) for path in sorted((run_dir / "nodes").glob("*.json"))]
    assert sum(part["totals"]["copied_files"] for part in parts) == FILES + 1, "each file is read once from the source"
    orders = [part["order"] for part in parts]
    assert [order["announcements"] for order in orders] == [5, 2], "four epochs, and the rest of one after the change"
    for order in orders:
        assert order["provenance"] == "sampler"
