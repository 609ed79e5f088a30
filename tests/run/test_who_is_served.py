"""A program that hpcstage cannot serve is told so at once, and not as an error; one that has yet to read is not."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import Hpcstage, wait_for

Tree = Callable[..., Path]


@pytest.mark.parametrize("command", [["tar", "cf", "-"], ["find"]])
def test_a_program_that_is_not_python(hpcstage: Hpcstage, make_tree: Tree, command: list[str]) -> None:
    data = make_tree(files=3)
    done = hpcstage("run", "--data", data, "--", *command, data)
    assert done.returncode == 0
    said = done.stderr.decode().splitlines()
    assert any(f"hpcstage: {command[0]} is not Python: " in line for line in said), said
    assert not any("error:" in line for line in said), said


@pytest.mark.parametrize("command", [[sys.executable, "-c", ""], ["env", "true"], ["sh", "-c", "python3 -c ''"]])
def test_others_are_told_nothing(hpcstage: Hpcstage, make_tree: Tree, command: list[str]) -> None:
    done = hpcstage("run", "--data", make_tree(files=3), "--", *command)
    assert b"is not Python" not in done.stderr


def test_nothing_is_judged_while_the_program_imports(hpcstage: Hpcstage, make_tree: Tree) -> None:
    os.mkfifo(hpcstage.cwd / "imports")
    running = hpcstage.start("run", "--data", make_tree(files=3), "--", sys.executable, "-c", "open('imports').read()")
    with open(hpcstage.cwd / "imports", "w"):
        wait_for(lambda: b"1 process attached" in hpcstage("report").stdout)
        said = hpcstage("report").stdout
    assert b"still running" in said
    assert b"opened a file below" not in said
    assert running.wait(60) == 0
