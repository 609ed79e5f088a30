"""The quick form of `benchmarks.locality`: that it works, and that it checks."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import REPO

from hpcstage.emulator import unavailable

pytestmark = [
    pytest.mark.slow,
    pytest.mark.fuse,
    pytest.mark.compiler,
    pytest.mark.torch,
    pytest.mark.timeout(400),
    pytest.mark.skipif(unavailable() is not None, reason=f"emulator: {unavailable()}"),
    pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs PyTorch"),
    pytest.mark.skipif(importlib.util.find_spec("mpi4py") is None, reason="needs mpi4py and an MPI"),
]


def quick(tmp_path: Path, *words: str, code: int = 0) -> dict[str, Any]:
    result, work = tmp_path / "locality.json", tmp_path / "work"
    work.mkdir()
    command = [sys.executable, "-m", "benchmarks.locality", "--quick", "--json", str(result), "--work-dir", str(work)]
    done = subprocess.run(
        [*command, *words], cwd=REPO, capture_output=True, text=True, timeout=380, check=False, env=os.environ.copy()
    )
    assert done.returncode == code, done.stderr
    assert not list(work.iterdir()), "what it worked with is removed"
    loaded: dict[str, Any] = json.loads(result.read_text())
    return loaded


def test_what_is_counted(tmp_path: Path) -> None:
    result = quick(tmp_path, "--only", "moved", "--only", "learners", "--check")
    cells = {sample["cell"] for sample in result["samples"]}
    assert "moved, local batch 128, by 16 nodes" in cells
    assert "16 learners simulated, source of 16, slow links" in cells
    assert all(figure["ok"] for figure in result["figures"])


def test_trainings_give_the_same(tmp_path: Path) -> None:
    result = quick(tmp_path, "--only", "theorem 1", "--check")
    assert {figure["name"]: figure["ok"] for figure in result["figures"]} == {
        f"locality: {what} off the regular sampler's{how}": True
        for what, how in (("gradients", ", relative"), ("accuracy", ""))
    }
    assert result["samples"][0]["steps"] > 10


def test_loading_on_nodes(tmp_path: Path) -> None:
    result = quick(tmp_path, "--only", "2 nodes, loading")
    arms = {sample["arm"]: sample for sample in result["samples"]}
    assert set(arms) == {"regular", "cached", "locality"}
    assert arms["regular"]["source"] == pytest.approx(2, abs=0.01)
    assert arms["locality"]["source"] == pytest.approx(1, abs=0.01)
    assert arms["locality"]["source_opens"] == 0
    assert arms["locality"]["peer_files"] < arms["cached"]["peer_files"]
