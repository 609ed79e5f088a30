"""What a shell knows of the commands: man pages, and completions by click's own mechanism."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import REPO, Hpcstage

from hpcstage.config import SETTINGS


def completed(hpcstage: Hpcstage, *words: str) -> list[str]:
    env = {"COMP_WORDS": " ".join(words), "COMP_CWORD": str(len(words) - 1), "_HPCSTAGE_COMPLETE": "bash_complete"}
    starts_as_hpcstage = "import sys; sys.argv[0] = 'hpcstage'; from hpcstage.__main__ import main; main()"
    env = {**hpcstage.env, **env}
    done = subprocess.run([sys.executable, "-c", starts_as_hpcstage], env=env, capture_output=True, check=True)
    return done.stdout.decode().splitlines()


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (["hpcstage", "ru"], ["plain,run"]),
        (["hpcstage", "config", "s"], ["plain,show"]),
        (["hpcstage", "run", "--mod"], ["plain,--mode"]),
        (["hpcstage", "run", "--mode", ""], ["plain,runtime", "plain,upfront", "plain,direct"]),
        (["hpcstage", "run", "--data", "da"], ["file,da"]),
        (["hpcstage", "run", "--", "py"], ["file,py"]),
    ],
)
def test_completions(hpcstage: Hpcstage, words: list[str], found: list[str]) -> None:
    assert completed(hpcstage, *words) == found


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("man")
    env = {**os.environ, "PYTHONPATH": os.fspath(REPO)}
    subprocess.run([sys.executable, REPO / "scripts" / "man.py", target], env=env, check=True, timeout=300)
    return target


def test_every_command_has_a_page(pages: Path) -> None:
    names = {path.name for path in pages.iterdir()}
    assert names >= {"hpcstage.1", "hpcstage-run.1", "hpcstage-checkpoint-restore.1", "hpcstage-config-show.1"}
    text = (pages / "hpcstage-run.1").read_text().replace("\\-", "-")
    assert all(f"\\fB{setting.flag}" in text and setting.env in text for setting in SETTINGS)


@pytest.mark.skipif(shutil.which("groff") is None, reason="needs groff (apt-get install groff-base)")
def test_groff_finds_nothing_wrong(pages: Path) -> None:
    command = ["groff", "-man", "-ww", "-Tutf8", "-z", "-k", *sorted(pages.iterdir())]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stderr == ""
