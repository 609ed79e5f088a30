"""Distributed training as it is: torchrun, gloo, DistributedDataParallel and DistributedSampler, behind one word."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import GLOO, Hpcstage, torchrun

pytest.importorskip("torch.distributed")
pytestmark = [pytest.mark.torch, pytest.mark.slow]

RANKS, EPOCHS, FILES, WORKERS = 2, 2, 90, 2
TRAIN = """
import hashlib, json, os, random, sys
import numpy, torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

class Files(Dataset):
    def __init__(self, root):
        self.paths = sorted(os.path.join(d, f) for d, _, files in os.walk(root) for f in files)
    def __len__(self):
        return len(self.paths)
    def __getitem__(self, index):
        with open(self.paths[index], "rb") as file:
            data = file.read(64)
        return torch.tensor(list(data), dtype=torch.float32) / 255 + torch.rand(64) / 100

root, result, workers, epochs = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
torch.set_num_threads(1)
dist.init_process_group("gloo")
torch.manual_seed(7); random.seed(7); numpy.random.seed(7)
data = Files(root)
sampler = DistributedSampler(data, seed=3)
loader = DataLoader(data, batch_size=8, sampler=sampler, num_workers=workers)
model = DistributedDataParallel(torch.nn.Linear(64, 1))
step = torch.optim.SGD(model.parameters(), lr=0.1)
losses = []
for epoch in range(epochs):
    sampler.set_epoch(epoch)
    for batch in loader:
        loss = (model(batch) ** 2).mean()
        step.zero_grad(); loss.backward(); step.step()
        losses.append(loss.item().hex())
states = torch.get_rng_state().tolist(), random.getstate(), numpy.random.get_state()[1].tolist()
with open(os.path.join(result, "rank%d.json" % dist.get_rank()), "w") as file:
    json.dump({"losses": losses, "weights": [value.hex() for value in model.module.weight.flatten().tolist()],
               "states": hashlib.sha256(repr(states).encode()).hexdigest()}, file)
# Python ends while gloo's thread still lets go of the last gradients: PyTorch then aborts. The barrier comes after.
dist.barrier()
dist.destroy_process_group()
"""


def command(script: Path, root: Path, result: Path) -> list[str]:
    return torchrun(RANKS, script, root, result, WORKERS, EPOCHS)


def results(directory: Path) -> list[Any]:
    return [json.loads((directory / f"rank{rank}.json").read_text()) for rank in range(RANKS)]


def test_torchrun(hpcstage: Hpcstage, make_tree: Callable[..., Path], tmp_path: Path) -> None:
    root = make_tree(files=FILES, size_bytes=2000)
    script = tmp_path / "train.py"
    script.write_text(TRAIN)
    with_us, alone = tmp_path / "with", tmp_path / "alone"
    with_us.mkdir(), alone.mkdir()
    done = hpcstage("run", "--max-rate", "300kB", "--data", root, "--", *command(script, root, with_us),
                    env=GLOO, timeout_s=400)  # fmt: skip
    assert done.returncode == 0, done.stderr
    plain = subprocess.run(command(script, root, alone), env={**os.environ, **GLOO}, capture_output=True,
                           text=True, check=False, timeout=300)  # fmt: skip
    assert plain.returncode == 0, plain.stderr
    assert results(with_us) == results(alone), "losses, weights and random states of every rank"
    order = json.loads(hpcstage.records()[-1].read_text())["order"]
    assert order["provenance"] == "sampler"
    assert RANKS <= order["announcements"] <= RANKS * EPOCHS, "none is needed once all is staged"
