"""What a run leaves to be read, however it ended: one that still runs, that never started, that could not stage."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import Hpcstage, below, python_command, wait_for

Tree = Callable[..., Path]


@pytest.mark.parametrize(("command", "code"), [("no-such-command-anywhere", 127), ("/etc/passwd", 126)])
def test_a_command_that_cannot_be_executed(hpcstage: Hpcstage, make_tree: Tree, command: str, code: int) -> None:
    done = hpcstage("run", "--data", make_tree(files=1), "--", command)
    assert done.returncode == code
    *before, line = done.stderr.decode().splitlines()
    assert f"cannot run '{command}'" in line
    assert all("is memory" in told for told in before), "the report of a command that did not run says nothing new"
    record = json.loads(hpcstage.records()[-1].read_text())
    assert record["run"]["exit_code"] == code
    assert [note["id"] for note in record["notes"]] == ["command-not-run"]
    shown = hpcstage("report").stdout.decode()
    assert f"exit code {code}" in shown
    assert "wall time" not in shown.partition("Notes")[2]


def test_a_run_that_goes_on_is_not_reported_as_dead(hpcstage: Hpcstage, make_tree: Tree, tmp_path: Path) -> None:
    stop = tmp_path / "stop"
    wait = "import pathlib, sys, time\nwhile not pathlib.Path(sys.argv[1]).exists(): time.sleep(0.01)"
    with hpcstage.start("run", "--data", make_tree(files=3), "--", *python_command(wait, stop)) as going:
        try:
            wait_for(lambda: bool(list(hpcstage.cwd.glob("hpcstage-runs/*/run.part.json"))))
            wait_for(lambda: bool(list(hpcstage.cwd.glob("hpcstage-runs/*/nodes/*.json"))))
            shown = hpcstage("report").stdout.decode()
        finally:
            stop.touch()
            going.communicate(timeout=300)
    assert "still running" in shown
    assert "the run goes on: its command is running on this host" in shown
    assert "!!" not in shown
    assert "INCOMPLETE" not in shown
    assert "end of the command was not seen" not in shown
    after = hpcstage("report").stdout.decode()
    assert "exit code 0" in after
    assert "still running" not in after


@pytest.mark.parametrize("strict", [False, True])
def test_a_run_that_could_not_stage_is_the_last_run(
    hpcstage: Hpcstage, make_tree: Tree, tmp_path: Path, strict: bool
) -> None:
    data = make_tree(files=3)
    assert hpcstage("run", "-q", "--data", data, "--", "echo", "older").returncode == 0
    options = ("--strict",) if strict else ()
    nowhere = tmp_path / "nowhere" / "at all"
    done = hpcstage("run", *options, "--local-dir", nowhere, "--data", data, "--", "echo", "newer")
    assert done.returncode == (125 if strict else 0)
    shown = hpcstage("report").stdout.decode()
    assert "echo newer" in shown
    assert os.fspath(nowhere.parent) in "".join(shown.split()), "wherever the line is broken"
    assert "daemon" not in shown
    assert "not measured" not in shown.partition("wall")[2].partition("\n")[2], "there is nothing to be measured"
    assert ("ran without hpcstage" in shown) != strict
    assert ("exit code 125" in shown) == strict


def test_the_log_that_a_message_names_is_there(hpcstage: Hpcstage, make_tree: Tree, tmp_path: Path) -> None:
    stop = tmp_path / "stop"
    wait = "import pathlib, sys, time\nwhile not pathlib.Path(sys.argv[1]).exists(): time.sleep(0.01)"
    with hpcstage.start("run", "--data", make_tree(files=3), "--", *python_command(wait, stop)) as going:
        try:
            wait_for(lambda: bool(list(hpcstage.cwd.glob("hpcstage-runs/*/run.part.json"))))
            daemon = next(one for one, words in below(going.pid) if "hpcstage.daemon" in words)
            os.kill(daemon.pid, signal.SIGKILL)
            daemon.wait(300)
        finally:
            stop.touch()
            _, errors = going.communicate(timeout=300)
    (line,) = [line for line in errors.decode().splitlines() if "ended early" in line and "its log: " in line][:1]
    assert Path(line.partition("its log: ")[2].rstrip(")")).is_file()
    record = json.loads(hpcstage.records()[-1].read_text())
    (problem,) = [p for p in record["notes"] if p["id"] == "daemon-died"]
    assert Path(problem["remedy"].partition("its log: ")[2]).is_file()
    assert sys.executable in record["run"]["command"]
