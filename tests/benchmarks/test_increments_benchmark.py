"""`benchmarks.increments` runs to its end with --quick and leaves a valid result; its figures are not judged here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import REPO

for package in ("torch", "xxhash", "zstandard"):
    pytest.importorskip(package)
pytestmark = [pytest.mark.slow, pytest.mark.torch, pytest.mark.timeout(300)]


def test_increments(tmp_path: Path) -> None:
    result, work = tmp_path / "increments.json", tmp_path / "work"
    work.mkdir()
    command = [sys.executable, "-m", "benchmarks.increments", "--quick", "--json", str(result), "--work-dir", str(work)]
    done = subprocess.run(
        command, cwd=REPO, capture_output=True, text=True, timeout=280, check=False, env=os.environ.copy()
    )
    assert done.returncode == 0, done.stderr
    assert not list(work.iterdir()), "what it worked with is removed"
    loaded = json.loads(result.read_text())
    assert loaded["benchmark"] == "increments"
    assert {s["arm"] for s in loaded["samples"] if s["cell"] == "dense, Adam, tensors"} == {"full", "incremental"}
    assert len({s["cell"] for s in loaded["samples"]}) == 4 * 2 + 3
    assert all(s["same"] for s in loaded["samples"])
    assert loaded["figures"][-1]["name"] == "every state came back bit for bit"
