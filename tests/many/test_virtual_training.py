"""A real training on virtual nodes: PyTorch, torchrun, gloo, DistributedSampler. Same weights as without hpcstage."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import manylab
import pytest
from conftest import GLOO, Hpcstage, torchrun

Tree = Callable[..., Path]
PROGRAM = Path(__file__).parent / "train_ddp.py"
torch = pytest.importorskip("torch")


def command(data: Path, out: Path, *, ranks: int = 2, epochs: int = 2, workers: int = 0) -> list[str]:
    return torchrun(ranks, PROGRAM, data, epochs, workers, out)


@pytest.mark.torch
@pytest.mark.slow
@manylab.needs_mpi
def test_the_same_weights_and_losses(hpcstage: Hpcstage, make_tree: Tree, local_dir: Path) -> None:
    data = make_tree(files=96, size_bytes=20_000)
    plain, staged = hpcstage.cwd / "plain.pt", hpcstage.cwd / "staged.pt"
    alone = subprocess.run(command(data, plain), env={**os.environ, **GLOO}, capture_output=True, text=True,
                           check=False, timeout=300)  # fmt: skip
    assert alone.returncode == 0, alone.stderr
    words = ("run", "--nodes", "2", "--placement", "partition", "--data", data, "--", *command(data, staged))
    done = hpcstage(*words, env=GLOO, timeout_s=400)
    assert done.returncode == 0, done.stderr
    first, second = torch.load(plain), torch.load(staged)
    assert first["losses"] == second["losses"]
    assert first["weights"].keys() == second["weights"].keys()
    assert all(torch.equal(first["weights"][name], second["weights"][name]) for name in first["weights"])
    parts = manylab.parts_of(hpcstage)
    assert [part["complete"] for part in parts] == [True, True]
    assert all(part["processes"] for part in parts), "a rank of each node"
    assert not list(local_dir.glob("hpcstage-*/*/"))
