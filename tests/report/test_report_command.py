"""`hpcstage report` as a user calls it."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import re
import shutil
import struct
import subprocess
import sys
import termios
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import Hpcstage
from reportcases import CASES
from rich.cells import cell_len

from hpcstage import jsonform
from hpcstage.record import files, index
from hpcstage.record.schema import Record
from hpcstage.units import format_duration

READ = [sys.executable, "-c", "import glob, sys; [open(f).close() for f in glob.glob(sys.argv[1] + '/*/*')]"]
REPO = Path(__file__).resolve().parents[2]


def report(tmp_path: Path, *arguments: str, **env: str) -> subprocess.CompletedProcess[bytes]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("HPCSTAGE", "XDG_", "NO_COLOR"))}
    state = {"XDG_STATE_HOME": str(tmp_path / "state"), "PYTHONPATH": str(REPO)}
    command = [sys.executable, "-m", "hpcstage", "report", *arguments]
    return subprocess.run(command, env=kept | state | env, capture_output=True, timeout=300, cwd=tmp_path, check=False)


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    path = tmp_path / "hpcstage-runs" / "one"
    path.mkdir(parents=True)
    files.save(Record.from_json(CASES["whole"]()), path / "run.json")
    return path


def test_a_run_directory_and_its_file(tmp_path: Path, run_dir: Path) -> None:
    by_directory, by_file = report(tmp_path, str(run_dir)), report(tmp_path, str(run_dir / "run.json"))
    assert by_directory.returncode == by_file.returncode == 0
    assert by_directory.stdout == by_file.stdout
    assert b"mode runtime, exit code 0" in by_directory.stdout
    assert b"\x1b" not in by_directory.stdout
    assert by_directory.stderr == b""


def test_the_last_run(tmp_path: Path, run_dir: Path) -> None:
    index.add(Record.from_json(CASES["whole"]()), run_dir, {"XDG_STATE_HOME": str(tmp_path / "state")})
    assert report(tmp_path).stdout == report(tmp_path, str(run_dir)).stdout
    shutil.rmtree(run_dir)
    gone = report(tmp_path)
    assert gone.returncode == 1
    assert b"no run found" in gone.stderr


def test_how_long_the_command_took_earlier_in_another_mode(hpcstage: Hpcstage, make_tree: Callable[..., Path]) -> None:
    data = make_tree()
    for mode in ("direct", "upfront"):
        done = hpcstage("run", "--mode", mode, "--data", data, "--", *READ, data)
    direct, upfront = (files.load(path) for path in hpcstage.records())
    assert upfront.verdict is not None
    told = upfront.verdict.compared or upfront.verdict.text
    assert format_duration(direct.time_split.total_s or 0.0) in told
    assert format_duration(upfront.time_split.total_s or 0.0) in told
    assert f"hpcstage: {told}" in done.stderr.decode().splitlines()


def part_of(run_dir: Path, job_id: str | None) -> None:
    from recordcases import run_part

    run_dir.mkdir(parents=True)
    part = run_part(run_id=run_dir.name, job_id=job_id)
    (run_dir / "run.part.json").write_text(json.dumps(jsonform.written(part)))


@pytest.mark.parametrize("place", ["hpcstage-runs", "state/hpcstage/runs"])
def test_by_the_id_of_the_run_or_of_its_job_without_the_index(tmp_path: Path, place: str) -> None:
    runs = tmp_path / place
    part_of(runs / "20261121-031422-1f3a", "4711.pbs1")
    part_of(runs / "20261121-031500-1f3b", "4712")
    assert not (tmp_path / "state" / "hpcstage" / "runs.jsonl").exists()
    for asked in ("20261121-031422-1f3a", "4711.pbs1", "4711"):
        shown = report(tmp_path, asked)
        assert shown.returncode == 0, shown.stderr
        assert b"hpcstage report: 20261121-031422-1f3a" in shown.stdout
    unknown = report(tmp_path, "471")
    assert unknown.returncode == 1
    assert b"471 is no run directory" in unknown.stderr


def test_by_the_id_of_a_run_that_lies_elsewhere(tmp_path: Path, run_dir: Path) -> None:
    index.add(Record.from_json(CASES["whole"]()), run_dir, {"XDG_STATE_HOME": str(tmp_path / "state")})
    (tmp_path / "here").mkdir()
    record, kept = CASES["whole"](), {"XDG_STATE_HOME": str(tmp_path / "state")}
    for asked in (record["run"]["id"], record["run"]["job_id"]):
        assert report(tmp_path / "here", asked, **kept).returncode == 0


def test_of_several_runs_of_a_job_the_last(tmp_path: Path) -> None:
    for number, name in enumerate(("first", "last", "second")):
        part_of(tmp_path / "hpcstage-runs" / name, "4711")
        at_s = 1e9 + 10 * (number if name != "last" else 5)
        os.utime(tmp_path / "hpcstage-runs" / name / "run.part.json", (at_s, at_s))
    assert b"hpcstage report: last" in report(tmp_path, "4711").stdout


def test_the_last_of_the_runs_that_lie_here_without_the_index(tmp_path: Path, run_dir: Path) -> None:
    assert report(tmp_path).stdout == report(tmp_path, str(run_dir)).stdout


def test_json_is_the_record(tmp_path: Path, run_dir: Path) -> None:
    assert json.loads(report(tmp_path, str(run_dir), "--json").stdout) == CASES["whole"]()


def test_every_node(tmp_path: Path, run_dir: Path) -> None:
    files.save(Record.from_json(CASES["64 nodes, many failed"]()), run_dir / "run.json")
    shown = report(tmp_path, str(run_dir), "--nodes")
    assert shown.returncode == 0
    assert sum(line.startswith(b"  node") for line in shown.stdout.splitlines()) == 64
    files.save(Record.from_json(CASES["hostile nodes"]()), run_dir / "run.json")
    assert report(tmp_path, str(run_dir), "--nodes", PYTHONIOENCODING="ascii").stdout.isascii()


def test_a_killed_run(tmp_path: Path) -> None:
    (tmp_path / "nodes").mkdir()
    node = CASES["killed"]()
    assert not node["complete"]
    from recordcases import node_part, run_part

    (tmp_path / "nodes" / "node17.json").write_text(json.dumps(node_part(complete=False).to_json()))
    (tmp_path / "run.part.json").write_text(json.dumps(jsonform.written(run_part(exit_code=None, child_ended_s=None))))
    for path in (tmp_path / "nodes" / "node17.json", tmp_path / "run.part.json"):
        os.utime(path, (0, 0))
    shown = report(tmp_path, str(tmp_path))
    assert shown.returncode == 0
    assert b"INCOMPLETE" in shown.stdout


def test_a_terminal_without_unicode(tmp_path: Path, run_dir: Path) -> None:
    files.save(Record.from_json(CASES["hostile"]()), run_dir / "run.json")
    shown = report(tmp_path, str(run_dir), PYTHONIOENCODING="ascii")
    assert shown.returncode == 0
    assert shown.stdout.isascii()


@pytest.mark.parametrize(
    "content", [b"", b'{"schema_version": "1.0"', b"[]", b'{"schema_version": "9.0", "time_split": {}}']
)
def test_bad_files_give_one_line_and_1(tmp_path: Path, run_dir: Path, content: bytes) -> None:
    (run_dir / "run.json").write_bytes(content)
    failed = report(tmp_path, str(run_dir))
    assert failed.returncode == 1
    assert failed.stdout == b""
    assert failed.stderr.count(b"\n") == 1
    assert b"run.json" in failed.stderr


def on_terminal(tmp_path: Path, run_dir: Path, columns: int, *options: str, **env: str) -> str:
    """What a terminal of this width gets."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    state = {"XDG_STATE_HOME": str(tmp_path / "state"), "PYTHONPATH": str(REPO), "TERM": "xterm"}
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("HPCSTAGE", "XDG_", "NO_COLOR", "COLUMNS"))}
    command = [sys.executable, "-m", "hpcstage", "report", str(run_dir), *options]
    got = b""
    with subprocess.Popen(command, env=kept | state | env, stdin=theirs, stdout=theirs, cwd=tmp_path):
        os.close(theirs)
        with contextlib.suppress(OSError):  # the other end is closed
            while chunk := os.read(ours, 65536):
                got += chunk
    os.close(ours)
    return got.decode().replace("\r\n", "\n")


def test_a_terminal_gets_its_width_and_colour_unless_refused(tmp_path: Path, run_dir: Path) -> None:
    piped = report(tmp_path, str(run_dir)).stdout.decode()
    for columns, longest in ((40, 80), (80, 80), (200, 100)):
        plain = re.sub("\x1b\\[[0-9;]+m", "", on_terminal(tmp_path, run_dir, columns))
        assert max(map(cell_len, plain.split("\n"))) == longest
    assert "\x1b[1m" in on_terminal(tmp_path, run_dir, 80)
    assert on_terminal(tmp_path, run_dir, 80, "--no-color") == piped
    assert on_terminal(tmp_path, run_dir, 80, NO_COLOR="1") == piped
    assert "\x1b" not in on_terminal(tmp_path, run_dir, 80, TERM="dumb")
    assert report(tmp_path, str(run_dir), COLUMNS="200", FORCE_COLOR="1").stdout.decode() == piped


def test_usage(tmp_path: Path) -> None:
    assert report(tmp_path, "--bogus").returncode == 2
    assert report(tmp_path, "a", "b").returncode == 2
    assert report(tmp_path, "missing").returncode == 1


@pytest.mark.parametrize(
    "command", [["report"], ["report", "--json"], ["config", "show"], ["plan", "--data"], ["--help"]]
)
def test_standard_output_that_is_full(hpcstage: Hpcstage, make_tree: Callable[..., Path], command: list[str]) -> None:
    data = make_tree(files=1)
    hpcstage("run", "-q", "--data", data, "--", "true")
    words = hpcstage.command(*command, *([data] if command[-1] == "--data" else []))
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            words, cwd=hpcstage.cwd, env=hpcstage.env, stdout=full, stderr=subprocess.PIPE, timeout=300, check=False
        )
    assert done.returncode == 1
    assert done.stderr.decode() == "hpcstage: cannot write to standard output: No space left on device\n"


@pytest.mark.parametrize("command", [["report"], ["report", "--json"], ["--help"]])
def test_a_reader_that_has_seen_enough(tmp_path: Path, run_dir: Path, command: list[str]) -> None:
    """As `head` does, the reader closes the pipe. Nobody is told of that."""
    words = [sys.executable, "-m", "hpcstage", *command, *([str(run_dir)] if command[0] == "report" else [])]
    read, write = os.pipe()
    os.close(read)
    env = {**os.environ, "PYTHONPATH": str(REPO)}
    done = subprocess.run(words, cwd=tmp_path, env=env, stdout=write, stderr=subprocess.PIPE, timeout=300, check=False)
    os.close(write)
    assert (done.returncode, done.stderr) == (1, b"")


FAILS = """
import os, sys
import click
from hpcstage.cli import main

@click.command()
@click.argument("path")
def fails(path):
    fd = os.open(path, os.O_WRONLY | os.O_NONBLOCK) if path != "pipe" else None
    if fd is None:
        read, fd = os.pipe()
        os.close(read)
    os.write(fd, b"x")

main.COMMANDS["fails"] = "__main__:fails"
sys.exit(main.run(sys.argv[1:]))
"""
"""A command with a mistake: it expects no error of its system calls."""


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("/dev/full", "a system call failed: No space left on device"),
        ("pipe", "a system call failed: Broken pipe"),
        ("/nonexistent/file", "cannot use /nonexistent/file: No such file or directory"),
    ],
)
def test_a_system_call_that_nobody_expected_to_fail(tmp_path: Path, path: str, said: str) -> None:
    words = [sys.executable, "-c", FAILS, "fails", path]
    env = {**os.environ, "PYTHONPATH": str(REPO)}
    done = subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (1, "", f"hpcstage: {said}\n")
