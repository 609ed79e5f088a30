"""A program that hpcstage cannot serve is told so at once, and not as an error; one that has yet to read is not."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import Hpcstage, wait_for

Tree = Callable[..., Path]


@pytest.mark.parametrize("command", [[sys.executable, "-c", ""], ["env", "true"], ["sh", "-c", "python3 -c ''"]])
def test_others_are_told_nothing(hpcstage: Hpcstage, make_tree: Tree, command: list[str]) -> None:
    done = hpcstage("run", "--data", make_tree(files=3), "--", *command)
    assert b"is not Python" not in done.stderr


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a file system")
def test_an_argument_on_a_file_system_that_hangs_holds_up_no_signal(
    hpcstage: Hpcstage, make_tree: Tree, tmp_path: Path
) -> None:
    hung = tmp_path / "hung"
    hung.mkdir()
    try:
        device = os.open("/dev/fuse", os.O_RDWR)
    except OSError:
        pytest.skip("no FUSE")
    options = f"fd={device},rootmode=40000,user_id=0,group_id=0".encode()
    if ctypes.CDLL(None).mount(b"hung", os.fsencode(hung), b"fuse", 0, options):
        os.close(device)
        pytest.skip("mounting is not permitted")
    try:
        script = "trap 'exit 3' TERM; touch started; sleep 60 & wait"
        running = hpcstage.start("run", "--data", make_tree(files=3), "--", "sh", "-c", script, hung / "data")
        wait_for((hpcstage.cwd / "started").exists, what="the command")
        running.terminate()
        assert running.wait(300) == 3
    finally:
        os.close(device)
        subprocess.run(["umount", "-l", hung], check=True)


def test_nothing_is_judged_while_the_program_imports(hpcstage: Hpcstage, make_tree: Tree) -> None:
    os.mkfifo(hpcstage.cwd / "imports")
    running = hpcstage.start("run", "--data", make_tree(files=3), "--", sys.executable, "-c", "open('imports').read()")
    with open(hpcstage.cwd / "imports", "w"):
        wait_for(lambda: b"1 process reached" in hpcstage("report").stdout)
        said = hpcstage("report").stdout
    assert b"still running" in said
    assert b"opened a file below" not in said
    assert running.wait(300) == 0
