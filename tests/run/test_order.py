"""An unmodified shuffling PyTorch program: its order is known before its first batch, and nothing else changes."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import Hpcstage

pytest.importorskip("torch")

Tree = Callable[..., Path]

TRAIN = """
import os, random, sys
import torch
from torch.utils.data import DataLoader, Dataset

torch.set_num_threads(1)
torch.manual_seed(7)
random.seed(7)

class Files(Dataset):
    def __init__(self, root, listed):
        names = sorted(os.path.join(d, f) for d, _, files in os.walk(root) for f in files)
        self.count = len(names)
        if listed:
            self.samples = names
        else:
            self.name = names.__getitem__
    def __len__(self):
        return self.count
    def __getitem__(self, index):
        name = self.samples[index] if hasattr(self, "samples") else self.name(index)
        with open(name, "rb") as file:
            data = file.read(64)
        return torch.tensor(list(data), dtype=torch.float32) / 255

root, workers, epochs, listed = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4] == "listed"
data = Files(root, listed)
loader = DataLoader(data, batch_size=8, shuffle=True, num_workers=workers)
held = DataLoader(torch.utils.data.Subset(data, range(0, data.count, 4)), batch_size=8, num_workers=workers)
model = torch.nn.Linear(64, 1)
step = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(epochs):
    for batch in loader:
        loss = (model(batch) ** 2).mean()
        step.zero_grad(); loss.backward(); step.step()
    with torch.no_grad():
        print(epoch, sum(float(model(batch).sum()) for batch in held))
print(model.weight.sum().item().hex(), torch.rand(1).item().hex(), random.random().hex())
"""


def command(root: Path, workers: int, epochs: int = 2, table: str = "listed") -> list[str]:
    return [sys.executable, "-c", TRAIN, os.fspath(root), str(workers), str(epochs), table]


def run(hpcstage: Hpcstage, root: Path, *options: str, **program: Any) -> tuple[bytes, dict[str, Any]]:
    done = hpcstage("run", *options, "--data", root, "--", *command(root, **program), timeout_s=400)
    assert done.returncode == 0, done.stderr
    return done.stdout, json.loads(hpcstage.records()[-1].read_text())


def alone(root: Path, **program: Any) -> bytes:
    import subprocess

    return subprocess.run(command(root, **program), capture_output=True, check=True, timeout=300).stdout


def test_a_shuffling_program(hpcstage: Hpcstage, make_tree: Tree) -> None:
    root = make_tree(files=200, size_bytes=2000)
    output, record = run(hpcstage, root, "--max-rate", "400kB", workers=2)
    assert output == alone(root, workers=2), "the same losses, weights and random states"
    order = record["order"]
    assert order["provenance"] == "sampler"
    assert order["announcements"] >= 1


def test_a_dataset_that_shows_no_table(hpcstage: Hpcstage, make_tree: Tree) -> None:
    """The first run goes by path, the second by the first opens of the first."""
    root = make_tree(files=60, size_bytes=2000)
    output, record = run(hpcstage, root, workers=2, table="hidden")
    assert output == alone(root, workers=2, table="hidden")
    assert record["order"]["provenance"] == "manifest"
    again, record = run(hpcstage, root, workers=2, table="hidden")
    assert again == output
    assert record["order"]["provenance"] == "trace"
