"""Who may import whom: the contracts of pyproject.toml, held against the code, and what the documents say of both."""

from __future__ import annotations

import re
import subprocess
import sys
from itertools import takewhile
from pathlib import Path

import pytest
from conftest import REPO

if sys.version_info >= (3, 11):
    import tomllib
else:
    tomllib = pytest.importorskip("tomli", reason="needs tomli below Python 3.11")

LINT = (sys.executable, "-c", "from importlinter.cli import lint_imports_command as lint; lint()", "--no-cache")


def test_arrows_go_one_way() -> None:
    done = subprocess.run([*LINT], cwd=REPO, capture_output=True, text=True, timeout=300, check=False)
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
    done = subprocess.run([*LINT], cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode != 0
    assert "hpcstage.plan.types -> hpcstage.daemon.queue.rates" in done.stdout


def test_the_page_on_the_architecture_shows_the_arrows() -> None:
    contracts = tomllib.loads((REPO / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (arrows,) = (one for one in contracts if one["name"] == "Arrows go down")
    page = (REPO / "docs" / "architecture.md").read_text()
    block = page.split("## Who may import whom")[1].split("```")[1]
    names = {path.stem for path in (REPO / "hpcstage").iterdir()}
    *shown, below = ([*takewhile(names.__contains__, line.split())] for line in block.strip().splitlines())
    assert [set(row) for row in shown] == [set(layer.split(" | ")) for layer in arrows["layers"]]
    assert set(below) == set(arrows["exhaustive_ignores"]) - {"__main__", "demo", "emulator", "shim", "torch"}


def test_the_rooms_are_listed_for_who_contributes() -> None:
    tree = (REPO / "CONTRIBUTING.md").read_text().split("```")[1]
    rooms = {path.parent.name for path in (REPO / "hpcstage").glob("*/__init__.py")}
    assert rooms == set(re.findall(r"^  (\w+)/", tree, re.MULTILINE))


@pytest.mark.parametrize("document", ["CONTRIBUTING.md", "docs/architecture.md"])
def test_documents_name_files_that_are_there(document: str) -> None:
    named = set(re.findall(r"`((?:[\w*.-]+/)+[\w*.-]*|[\w*]+\.(?:py|c|h))(?::\w+)?`", (REPO / document).read_text()))
    assert len(named) > 10
    for name in named:
        below = [(REPO / "hpcstage").rglob(form) for form in (name, f"{name}.py")]
        assert any(any(found) for found in below) or any(REPO.glob(name)), name
