"""The coder's benchmark measures all arms on the same bytes, and says what is short where ISA-L is missing."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import REPO

from benchmarks import coder

pytestmark = [
    pytest.mark.compiler,
    pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler"),
]
needs_isal = pytest.mark.skipif(coder.loaded_isal() is None, reason="needs ISA-L (package libisal2)")


def quick(tmp_path: Path, *words: str, code: int = 0, env: dict[str, str] | None = None) -> dict[str, Any]:
    work = tmp_path / "work"
    work.mkdir(exist_ok=True)
    file = tmp_path / "coder.json"
    command = [sys.executable, "-m", "benchmarks.coder", "--quick", "--reps", "1", "--json", str(file)]
    done = subprocess.run(
        [*command, "--work-dir", str(work), *words],
        cwd=REPO, env={**os.environ, **(env or {})}, capture_output=True, text=True, timeout=150, check=False,
    )  # fmt: skip
    assert done.returncode == code, done.stderr
    assert not list(work.iterdir()), "what it worked with is removed"
    loaded: dict[str, Any] = json.loads(file.read_text())
    return loaded


@needs_isal
def test_every_arm_is_measured_and_leaves_the_same_bytes(tmp_path: Path) -> None:
    found = quick(tmp_path)
    arms = {
        cell: {s["arm"] for s in found["samples"] if s["cell"] == cell} for cell in ("64 KB, encode", "1 MB, encode")
    }
    assert set(map(frozenset, arms.values())) == {frozenset({coder.C, coder.OURS, coder.NUMPY, coder.REDSET})}
    digests = {(s["cell"].partition(",")[0], s["digest"]) for s in found["samples"]}
    assert len(digests) == len(coder.SIZES), "one for each size"
    figures = {figure["name"]: figure for figure in found["figures"]}
    assert figures["the same bytes in all arms"]["ok"]
    assert figures["64 KB: hpcstage on ISA-L, of ISA-L called from C"]["asked"] == ">= 0.8"
    assert figures["1 MB: the numpy form"]["asked"] == ">= 3 GB/s"


def test_check_fails_where_nothing_was_measured(tmp_path: Path) -> None:
    found = quick(tmp_path, "--check", "--only", "64 KB, encode", "--arms", coder.REDSET, code=1)
    assert [figure["measured"] for figure in found["figures"]][:2] == [None, None]
