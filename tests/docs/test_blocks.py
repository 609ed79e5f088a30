"""Every block of README and tutorial does what it says. Only the paths of the cluster are replaced."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from conftest import REPO, Hpcstage
from pages import Block, before_figures, blocks
from test_pages import COMING

README, TUTORIAL = REPO / "README.md", REPO / "docs" / "tutorial.md"
ONE_WORD, INSTALL, TRY, SLURM, VERDICT, IS_IT_WORKING = blocks(README)
TRAIN = """
import argparse, hashlib, pathlib
words = argparse.ArgumentParser()
words.add_argument("--data", type=pathlib.Path)
words.add_argument("--epochs", type=int)
given = words.parse_args()
total = hashlib.sha256()
for epoch in range(given.epochs):
    for path in sorted(given.data.rglob("*.bin")):
        total.update(path.read_bytes())
print(total.hexdigest())
"""
FROM = "/lustre/imagenet/train"
NOT_THE_CLONE = shutil.ignore_patterns(".*", "build", "tests", "benchmarks", "hpcstage-runs", "__pycache__")
APART = "@@ block"


class Reader:
    """Who copies blocks into a shell: a working directory, a dataset, a training program, hpcstage on the PATH."""

    def __init__(self, hpcstage: Hpcstage, data: Path) -> None:
        self.hpcstage = hpcstage
        self.data = data
        (hpcstage.cwd / "train.py").write_text(TRAIN)

    def runs(self, text: str, timeout_s: float = 400, env: Mapping[str, str] | None = None) -> tuple[str, str]:
        """Standard output and error of a shell that runs the text, which must end well."""
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        done = subprocess.run(
            ["bash", "-e"],
            input=text.replace(FROM, os.fspath(self.data)),
            cwd=self.hpcstage.cwd,
            env={**self.hpcstage.env, "PATH": path, **(env or {})},
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout, done.stderr


@pytest.fixture
def reader(hpcstage: Hpcstage, make_tree: Callable[..., Path]) -> Reader:
    return Reader(hpcstage, make_tree())


def without_coming(text: str) -> str:
    """Without the lines of commands that are not there yet."""
    return "\n".join(line for line in text.splitlines() if not line.startswith(tuple(f"hpcstage {c} " for c in COMING)))


def scripts(diff: Block) -> tuple[str, str]:
    """A script before and after what a diff says."""
    lines = diff.text.splitlines()
    before = "\n".join(line[1:] for line in lines if not line.startswith("+"))
    return before, "\n".join(line[1:] for line in lines if not line.startswith("-"))


def test_the_first_command_of_readme(reader: Reader) -> None:
    stdout, _ = reader.runs(ONE_WORD.text)
    assert stdout == reader.runs(ONE_WORD.text.partition(" -- ")[2])[0]
    (record,) = reader.hpcstage.records()
    assert json.loads(record.read_text())["coverage"]["opens"] == 90 * sum(1 for _ in reader.data.rglob("*.bin"))


def test_the_script_of_readme_before_and_after(reader: Reader) -> None:
    before, after = scripts(SLURM)
    stdout, stderr = reader.runs(after)
    assert stdout == reader.runs(before)[0]
    printed = [line for line in stderr.splitlines() if line.startswith("hpcstage: ")]
    for kind in before_figures(VERDICT.text):
        assert any(line.startswith(kind) for line in printed), (kind, stderr)


def test_is_it_working(reader: Reader) -> None:
    reader.runs(ONE_WORD.text)
    stdout, _ = reader.runs(without_coming(IS_IT_WORKING.text))
    assert reader.hpcstage.records()[0].parent.name in stdout


def test_the_two_commands_are_scripts(reader: Reader) -> None:
    """What they do is tested by tests/run/test_demo.py, and by running these tests."""
    names = [line.split()[0] for line in TRY.text.splitlines()]
    assert names == ["./scripts/demo", "./scripts/test"]
    for name in names:
        assert os.access(REPO / name, os.X_OK)
        reader.runs(f"bash -n {REPO / name}")


@pytest.mark.slow
def test_installing(reader: Reader) -> None:
    """In a copy of the clone, without an index: what it needs comes from the environment of the tests. Without a
    compiler, as tests/packages builds with one."""
    assert INSTALL.text in [one.text for one in blocks(TUTORIAL)]
    shutil.copytree(REPO, reader.hpcstage.cwd / "clone", ignore=NOT_THE_CLONE)
    env = {"PYTHONPATH": sysconfig.get_paths()["purelib"], "PIP_NO_INDEX": "1", "PIP_NO_BUILD_ISOLATION": "0"}
    env |= {"CC": "false", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    told = "python -c 'import hpcstage; print(hpcstage.__file__)'; command -v hpcstage"
    stdout, _ = reader.runs(f"cd clone\n{INSTALL.text}\ncd ..\n{told}", env=env)
    *_, imported, command = stdout.splitlines()
    venv = reader.hpcstage.cwd / "clone" / "venv"
    assert Path(imported).is_relative_to(venv)
    assert Path(command) == venv / "bin" / "hpcstage"


@pytest.mark.fuse
@pytest.mark.slow
def test_the_tutorial(reader: Reader) -> None:
    from hpcstage.emulator import unavailable

    if why := unavailable():
        pytest.skip(str(why))
    page = [one for one in blocks(TUTORIAL) if one.text != INSTALL.text]
    script = []
    for one in page:
        if one.file:
            (reader.hpcstage.cwd / one.file).write_text(one.text)
        elif one.kind == "bash":
            script.append(f"echo '{APART}'\n{one.text}")
    stdout, stderr = reader.runs("\n".join(script), 550)
    said = iter(stdout.split(APART)[1:])
    last = ""
    for one in page:
        if one.kind == "bash":
            last = next(said)
        elif not one.kind:
            kinds = before_figures(one.text)
            assert [kind for kind in kinds if kind not in before_figures(last)] == [], last
    modes = [json.loads(path.read_text())["run"]["mode_asked"] for path in reader.hpcstage.records()]
    assert modes == ["runtime", "upfront", "direct", "runtime"]
    assert "ended early" in stderr, "the daemon was killed"
