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


def assert_same(one: Path, other: Path) -> None:
    first, second = torch.load(one), torch.load(other)
    assert first["losses"] == second["losses"]
    assert first["weights"].keys() == second["weights"].keys()
    assert all(torch.equal(first["weights"][name], second["weights"][name]) for name in first["weights"])


@pytest.mark.torch
@pytest.mark.slow
@pytest.mark.timeout(240)
@manylab.needs_mpi
def test_the_same_weights_and_losses(hpcstage: Hpcstage, make_tree: Tree, local_dir: Path) -> None:
    data = make_tree(files=96, size_bytes=20_000)
    plain, staged = hpcstage.cwd / "plain.pt", hpcstage.cwd / "staged.pt"
    alone = subprocess.run(command(data, plain), env={**os.environ, **GLOO}, capture_output=True, text=True,
                           check=False, timeout=120)  # fmt: skip
    assert alone.returncode == 0, alone.stderr
    for placement in ("replicate", "partition"):
        words = ("run", "--nodes", "2", "--placement", placement, "--data", data, "--", *command(data, staged))
        done = hpcstage(*words, env=GLOO, timeout_s=120)
        assert done.returncode == 0, done.stderr
        assert_same(plain, staged)
        staged.unlink()
        parts = manylab.parts_of(hpcstage)
        assert [part["complete"] for part in parts] == [True, True]
        assert all(part["processes"] for part in parts), "a rank of each node"
        assert not list(local_dir.glob("hpcstage-*/*/"))
