"""Each command where an extra is not installed: no traceback; where the command needs it, a line and exit code 2."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from conftest import REPO, Hpcstage

from hpcstage.extras import Extra

if sys.version_info >= (3, 11):
    import tomllib
else:
    tomllib = pytest.importorskip("tomli", reason="needs tomli below Python 3.11")

HIDING = """
import os, sys
class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name in os.environ["HIDDEN"].split():
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Hidden())
"""
NEEDS = {
    Extra.CHECKPOINT: [
        ("checkpoint", "ls", "d"),
        ("checkpoint", "verify", "d"),
        ("checkpoint", "restore", "d", "to"),
    ],
    Extra.TORCH: [("demo",)],
    Extra.MPI: [],
}
COMMANDS = [
    (),
    ("run", "--data", "d", "--", "true"),
    ("run", "--checkpoint", "c", "--out", "o", "--", "true"),
    ("run", "--nodes", "2", "--data", "d", "--", "true"),
    ("plan", "--data", "d"),
    ("plan", "--data", "d", "--nodes", "2"),
    ("report",),
    ("report", "--json"),
    ("clean", "--drain"),
    ("config", "show"),
    ("install-hook", "--remove", "--python", sys.executable),
]


def hiding(hpcstage: Hpcstage, tmp_path: Path, *extras: Extra) -> dict[str, str]:
    """An environment without the packages of these extras."""
    (tmp_path / "sitecustomize.py").write_text(HIDING)
    (hpcstage.cwd / "d").mkdir()
    (hpcstage.cwd / "d" / "a").write_text("b")
    hidden = " ".join(package for extra in extras for package in extra.value)
    return {"PYTHONPATH": f"{tmp_path}{os.pathsep}{REPO}", "HIDDEN": hidden}


def test_no_command_fails_without_any_extra(hpcstage: Hpcstage, tmp_path: Path) -> None:
    env = hiding(hpcstage, tmp_path, *Extra)
    for command in COMMANDS:
        done = hpcstage(*command, env=env)
        assert done.returncode == 0, (command, done.stderr)
        assert b"Traceback" not in done.stdout + done.stderr, command


@pytest.mark.parametrize("extra", Extra, ids=lambda extra: extra.name)
def test_what_an_extra_is_needed_for(hpcstage: Hpcstage, tmp_path: Path, extra: Extra) -> None:
    env = hiding(hpcstage, tmp_path, extra)
    done = hpcstage("run", "--nodes", "2", "--checkpoint", "c", "--data", "d", "--", "true", env=env)
    assert done.returncode == 0, done.stderr
    assert b"Traceback" not in done.stderr
    if extra is Extra.CHECKPOINT:
        assert "{checkpoint} is " in done.stderr.decode()
        assert "are not installed" in done.stderr.decode()
        assert "without staging" not in done.stderr.decode()
    for command in NEEDS[extra]:
        done = hpcstage(*command, env=env)
        assert done.returncode == 2, (command, done.stderr)
        (line,) = done.stderr.decode().splitlines()
        assert line.startswith("hpcstage: ")
        assert line.endswith(f" not installed ({extra.remedy})")


def test_the_packages_are_those_of_the_extras() -> None:
    declared = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for extra in Extra:
        assert {name.partition(">")[0] for name in declared[extra.name.lower()]} == set(extra.value)
