"""Under `hpcstage run`, what our loader will read is known before its first batch, and results stay the same."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import Hpcstage

pytest.importorskip("torch")
pytestmark = pytest.mark.torch

TRAIN = """
import os, random, sys
import torch
from torch.utils.data import Dataset
from hpcstage.torch.loader.dataloader import DataLoader

torch.set_num_threads(1)
torch.manual_seed(7)
random.seed(7)

class Files(Dataset):
    def __init__(self, root):
        self.samples = sorted(os.path.join(d, f) for d, _, files in os.walk(root) for f in files)
    def __len__(self):
        return len(self.samples)
    def __getitem__(self, index):
        with open(self.samples[index], "rb") as file:
            data = file.read(64)
        return torch.tensor(list(data), dtype=torch.float32) / 255 + random.random()

root, workers, threads = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
loader = DataLoader(Files(root), batch_size=8, shuffle=True, num_workers=workers, threads_per_worker=threads)
total = 0.0
for epoch in range(2):
    for batch in loader:
        total += float(batch.double().sum()) * float(torch.rand(()))
print(total.hex(), torch.rand(1).item().hex(), random.random().hex())
"""


def command(root: Path, workers: int, threads: int) -> list[str]:
    return [sys.executable, "-c", TRAIN, os.fspath(root), str(workers), str(threads)]


def test_the_order_is_announced(hpcstage: Hpcstage, make_tree: Callable[..., Path]) -> None:
    root = make_tree(files=120, size_bytes=2000)
    plain = subprocess.run(command(root, 2, 1), capture_output=True, check=True, timeout=300).stdout
    done = hpcstage("run", "--max-rate", "400kB", "--data", root, "--", *command(root, 2, 4), timeout_s=400)
    assert done.returncode == 0, done.stderr
    assert done.stdout == plain
    record = json.loads(hpcstage.records()[-1].read_text())
    order = record["order"]
    assert order["provenance"] == "sampler"
    assert order["announcements"] >= 1
