"""`benchmarks.checkpointer` runs to its end with --quick and leaves a valid result; its figures are not judged here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import REPO

for package in ("torch", "xxhash"):
    pytest.importorskip(package)
pytestmark = [pytest.mark.slow, pytest.mark.torch, pytest.mark.fuse, pytest.mark.timeout(300)]


def test_checkpointer(tmp_path: Path, local_dir: Path) -> None:
    result, work = tmp_path / "checkpointer.json", local_dir / "work"  # no disk that others write to
    work.mkdir()
    command = [sys.executable, "-m", "benchmarks.checkpointer", "--quick", "--json", str(result)]
    command += ["--work-dir", str(work), "--memory-dir", str(local_dir)]
    done = subprocess.run(
        command, cwd=REPO, capture_output=True, text=True, timeout=280, check=False, env=os.environ.copy()
    )
    assert done.returncode == 0, done.stderr
    assert not list(work.iterdir()), "what it worked with is removed"
    loaded = json.loads(result.read_text())
    assert loaded["benchmark"] == "checkpointer"
    assert {s["cell"] for s in loaded["samples"]} == {"save, 70 tensors", "save, 4000 tensors", "training", "ways"}
    assert len({s["arm"] for s in loaded["samples"] if s["cell"] == "ways"}) == 7
    assert loaded["figures"][-1] == {
        **loaded["figures"][-1], "name": "every state came back bit for bit", "ok": True,
    }  # fmt: skip
