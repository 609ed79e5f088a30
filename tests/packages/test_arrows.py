"""Who may import whom: the contracts of pyproject.toml, held against the code."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from conftest import REPO

LINT = (sys.executable, "-c", "from importlinter.cli import lint_imports_command as lint; lint()", "--no-cache")


def test_arrows_go_one_way() -> None:
    done = subprocess.run([*LINT], cwd=REPO, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " 0 broken" in done.stdout


def test_an_arrow_the_other_way_is_found(tmp_path: Path) -> None:
    for path in (REPO / "hpcstage").rglob("*.py"):
        copied = tmp_path / path.relative_to(REPO)
        copied.parent.mkdir(parents=True, exist_ok=True)
        copied.write_bytes(path.read_bytes())
    (tmp_path / "pyproject.toml").write_bytes((REPO / "pyproject.toml").read_bytes())
    with open(tmp_path / "hpcstage" / "plan" / "types.py", "a") as file:
        file.write("\nfrom hpcstage.daemon.queue.rates import Rates  # noqa\n")
    done = subprocess.run([*LINT], cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode != 0
    assert "hpcstage.plan.types -> hpcstage.daemon.queue.rates" in done.stdout
