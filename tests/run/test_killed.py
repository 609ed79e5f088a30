"""kill -9 of the program's own processes: a loader's worker, and the one that trains. All goes as it does alone."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from conftest import Hpcstage, problems

pytest.importorskip("torch")
pytestmark = pytest.mark.torch

Tree = Callable[..., Path]
ORPHANS_S = 120.0
"""PyTorch's workers look every five seconds whether they still have a parent."""
TRAIN = """
import os, signal, sys, time
import torch
from torch.utils.data import DataLoader, Dataset

class Files(Dataset):
    def __init__(self, root):
        self.paths = sorted(os.path.join(d, f) for d, _, files in os.walk(root) for f in files)
    def __len__(self):
        return len(self.paths)
    def __getitem__(self, index):
        with open(self.paths[index], "rb") as file:
            return torch.tensor(list(file.read(64)))

root, victim, pids = sys.argv[1:]
torch.manual_seed(7)
loader = DataLoader(Files(root), batch_size=4, shuffle=True, num_workers=2)
batches = iter(loader)
with open(pids, "w") as file:
    file.write(" ".join(str(worker.pid) for worker in batches._workers))
for number, batch in enumerate(batches):
    print(number, int(batch.sum()), flush=True)
    if number == 4:
        os.kill(os.getpid() if victim == "main" else batches._workers[1].pid, signal.SIGKILL)
        while True:
            time.sleep(0.01)  # a worker's death is told by a signal, whose handler raises
"""


def run(call: Callable[..., Any], root: Path, victim: str, pids: Path) -> tuple[int, bytes, str]:
    """Exit code, standard output, and the error, without numbers."""
    done = call(sys.executable, "-c", TRAIN, os.fspath(root), victim, os.fspath(pids))
    errors = [line for line in done.stderr.decode().splitlines() if "Error" in line]
    workers = [psutil.Process(int(pid)) for pid in pids.read_text().split() if psutil.pid_exists(int(pid))]
    assert psutil.wait_procs(workers, timeout=ORPHANS_S)[1] == []
    return done.returncode, done.stdout, re.sub(r"\d+", "N", errors[-1]) if errors else ""


def alone(*command: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(command, capture_output=True, timeout=300, check=False)


@pytest.mark.parametrize("victim", ["worker", "main"])
def test_as_alone(hpcstage: Hpcstage, make_tree: Tree, local_dir: Path, tmp_path: Path, victim: str) -> None:
    root = make_tree(files=80, size_bytes=2000)
    options = ("--max-rate", "100kB", "--data", root, "--")

    def behind(*command: str) -> subprocess.CompletedProcess[bytes]:
        return hpcstage("run", *options, *command)

    code, output, error = run(behind, root, victim, tmp_path / "pids")
    plain = run(alone, root, victim, tmp_path / "pids")
    assert (code, output, error) == plain
    assert len(output.splitlines()) == 5
    assert (code, bool(error)) == ((1, True) if victim == "worker" else (-signal.SIGKILL, False))
    record = json.loads(hpcstage.records()[-1].read_text())
    assert record["complete"] is True
    assert problems(record) == []
    assert record["order"]["provenance"] == "sampler"
    assert not list(local_dir.glob("hpcstage-*/*/")), "the daemon has ended and cleaned up"
