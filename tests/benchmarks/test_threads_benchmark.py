"""`benchmarks.threads` runs to its end with --quick and leaves a valid result; what it measures is not judged here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import REPO

from hpcstage.emulator import unavailable

pytest.importorskip("torch")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.fuse,
    pytest.mark.compiler,
    pytest.mark.torch,
    pytest.mark.timeout(300),
    pytest.mark.skipif(unavailable() is not None, reason=f"emulator: {unavailable()}"),
]


def test_threads(tmp_path: Path) -> None:
    result, work = tmp_path / "threads.json", tmp_path / "work"
    work.mkdir()
    command = [sys.executable, "-m", "benchmarks.threads", "--quick", "--json", str(result), "--work-dir", str(work)]
    cells = [f"{kind}, {workers} workers" for kind in ("io", "decode") for workers in (0, 2)]
    wanted = ["PyTorch", "1 threads", "4 threads"]
    command += [word for cell in cells for word in ("--only", cell)] + [w for arm in wanted for w in ("--arms", arm)]
    done = subprocess.run(
        command, cwd=REPO, capture_output=True, text=True, timeout=280, check=False, env=os.environ.copy()
    )
    assert done.returncode == 0, done.stderr
    assert not list(work.iterdir()), "what it worked with is removed"
    loaded = json.loads(result.read_text())
    assert loaded["benchmark"] == "threads"
    assert {s["cell"] for s in loaded["samples"]} == set(cells)
    assert {s["arm"] for s in loaded["samples"]} == set(wanted)
    figures = {figure["name"]: figure for figure in loaded["figures"]}
    assert figures["the same batches in all arms"]["ok"] is True
    assert len(figures) == 3
