"""`benchmarks.elastic` runs to its end with --quick and leaves a valid result; what it measures is not judged here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import REPO

pytest.importorskip("torch")
pytestmark = [pytest.mark.slow, pytest.mark.torch, pytest.mark.timeout(300)]


def test_elastic(tmp_path: Path) -> None:
    result, work = tmp_path / "elastic.json", tmp_path / "work"
    work.mkdir()
    command = [sys.executable, "-m", "benchmarks.elastic", "--quick", "--arms", "hpcstage", "--json", str(result)]
    done = subprocess.run(
        [*command, "--work-dir", str(work)],
        cwd=REPO, capture_output=True, text=True, timeout=280, check=False, env=os.environ.copy(),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert not list(work.iterdir()), "what it worked with is removed"
    loaded = json.loads(result.read_text())
    (sample,) = loaded["samples"]
    assert (loaded["benchmark"], sample["cell"], sample["arm"]) == ("elastic", "host killed", "hpcstage")
    assert 0 < sample["agreed_s"] < sample["seconds"] < 60
    assert len(loaded["figures"]) == 2
