"""A test that fails gets a second try only if it started a process; names of the tests' modules."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from conftest import REPO

TESTS = """
import os, subprocess, sys
import pytest

tries = {}

def fails_once(name):
    tries[name] = tries.get(name, 0) + 1
    assert tries[name] > 1

@pytest.fixture(scope="module")
def process():
    return subprocess.run(["true"])

def test_with_a_process():
    subprocess.run(["true"])
    fails_once("process")

def test_with_a_fixture_that_starts_one(process):
    fails_once("fixture")

def test_with_a_fork():
    if os.fork() == 0:
        os._exit(0)
    os.wait()
    fails_once("fork")

def test_without():
    fails_once("none")

def test_of_the_machine():
    subprocess.run(["true"])
    assert False
"""


def test_second_tries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copy(REPO / "tests" / "conftest.py", tmp_path)
    (tmp_path / "test_tries.py").write_text(TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    command = [sys.executable, "-m", "pytest", "-q", "-rA", "-p", "no:cacheprovider", os.fspath(tmp_path)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    counts = dict(reversed(pair.split()) for pair in re.findall(r"\d+ [a-z]+", done.stdout.splitlines()[-1]))
    assert (counts["rerun"], counts["passed"], counts["failed"]) == ("4", "3", "2"), done.stdout
    assert re.search(r"^FAILED .*test_without", done.stdout, re.MULTILINE)
    assert not re.search(r"^RERUN .*test_without", done.stdout, re.MULTILINE)


def test_modules_of_tests_have_names_of_their_own() -> None:
    """Pytest imports them by their last name alone: a second one of the same name ends the whole run."""
    names = Counter(path.name for path in (REPO / "tests").rglob("*.py") if path.parent != REPO / "tests")
    assert [name for name, times in names.items() if times > 1] == []
