"""LocalityAwareSampler under `hpcstage run`: its order is announced, and ranks read what their node holds."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import REPO, Hpcstage

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.torch,
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("mpi4py") is None, reason="needs mpi4py and an MPI"),
]
STARTED, PROGRAM = (REPO / "benchmarks" / "workload" / name for name in ("started.py", "locality.py"))
FILES, EPOCHS, RANKS = 240, 3, 4


def run(
    hpcstage: Hpcstage, data: Path, nodes: int, sampler: str = "locality", workers: int = 0
) -> list[dict[str, Any]]:
    """The nodes' parts of the record."""
    out, run_dir = hpcstage.cwd / "out.pt", hpcstage.cwd / sampler
    words = ["--data", data, "--sampler", sampler, "--epochs", str(EPOCHS), "--workers", str(workers), "--out", out]
    done = hpcstage(
        "run", "--nodes", str(nodes), "--placement", "partition" if nodes > 1 else "replicate", "--run-dir", run_dir,
        "--data", data, "--", sys.executable, STARTED, str(RANKS), PROGRAM, *words, timeout_s=400,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert len(torch.load(out)["epochs_s"]) == EPOCHS
    return [json.loads(path.read_text()) for path in (run_dir / "nodes").glob("*.json")]


def total(parts: list[dict[str, Any]], name: str) -> float:
    return float(sum(part["totals"][name] for part in parts))


def flat(make_tree: Callable[..., Path]) -> Path:
    root = make_tree(files=FILES, size_bytes=600)
    for path in sorted(root.rglob("*.bin")):
        path.rename(root / path.name)
    for number in range(3):
        (root / f"class{number}").rmdir()
    return root


def test_two_nodes_read_what_they_hold(hpcstage: Hpcstage, make_tree: Callable[..., Path]) -> None:
    data = flat(make_tree)
    ours, theirs = run(hpcstage, data, 2), run(hpcstage, data, 2, "regular")
    assert total(ours, "copied_files") == total(theirs, "copied_files") == FILES, "each file is read once"
    assert total(ours, "peer_files") < 0.25 * EPOCHS * FILES, "about 7 % are moved to even out"
    assert total(ours, "peer_files") < 0.6 * total(theirs, "peer_files")
    for part in ours:
        assert part["order"]["provenance"] == "sampler"
        assert part["order"]["announcements"] == EPOCHS * RANKS / 2
