"""Progress on stderr: a live line on a terminal until the command starts, else lines at quarters; never on stdout."""

from __future__ import annotations

import contextlib
import fcntl
import io
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import Hpcstage, python_command, wait_for

from hpcstage.node import page
from hpcstage.protocol.shim import State, WorkProgress
from hpcstage.report import progress
from hpcstage.report.progress import CopyPace, ProgressLine
from hpcstage.stderr import PATIENCE_S, UnwaitingStream

Tree = Callable[..., Path]
SOON = "import hpcstage.report.progress as p; p.LIVE_AFTER_S = 0.0; p.LONG_S = 0.2; "
"""Makes what takes 0.2 s long enough to be told."""
MAIN = "from hpcstage.__main__ import main; main()"
SLOWLY = ("--max-rate", "1MB")


def command(*arguments: str | Path, before: str = SOON) -> list[str]:
    return [sys.executable, "-c", before + MAIN, *map(os.fspath, arguments)]


def on_terminal(
    hpcstage: Hpcstage, words: list[str], columns: int = 80, end_at: bytes = b"", by: int = signal.SIGTERM
) -> tuple[bytes, bytes]:
    """Runs a command with a terminal as stderr, and ends it once that shows `end_at`; returns what the command wrote to
    stdout, and what the terminal got."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    env = {**hpcstage.env, "TERM": "xterm"}
    out = hpcstage.cwd / "stdout"
    with out.open("wb") as file, subprocess.Popen(words, stdout=file, stderr=theirs, env=env, cwd=hpcstage.cwd) as run:
        os.close(theirs)
        got = b""
        while chunk := _read(ours):
            got += chunk
            if end_at and end_at in got:
                run.send_signal(by)
                end_at = b""
    os.close(ours)
    assert run.returncode in (0, -by), got
    return out.read_bytes(), got


def _read(fd: int) -> bytes:
    try:
        return os.read(fd, 65536)
    except OSError:  # the other end is closed
        return b""


@pytest.mark.parametrize("columns", [60, 200])
def test_a_terminal_shows_a_line_until_the_command_starts(hpcstage: Hpcstage, make_tree: Tree, columns: int) -> None:
    data = make_tree(files=8, size_bytes=400_000)
    code = "import sys; print('its output'); sys.stderr.write('BEGIN\\n')"
    words = command("run", "--mode", "upfront", *SLOWLY, "--data", data, "--", *python_command(code))
    out, got = on_terminal(hpcstage, words, columns)
    assert out == b"its output\n"
    before, _, after = got.partition(b"BEGIN")
    assert b"hpcstage: copying" in before
    if columns == 200:
        assert re.search(rb"\d+ %, \d+ s left, [\d.]+ .?B/s, [\d.]+ .B of 3.2 MB, \d of 8 files", before)
    assert before.rstrip().endswith(b"\r\x1b[1A\x1b[2K"), "the line is gone"
    assert b"\x1b[?25" not in before, "the cursor was never hidden"
    assert b"\x1b" not in after
    assert b"copying" not in after
    drawn = re.sub(rb"\x1b\[[0-9;?]*[a-zA-Z]", b"", before).decode()
    assert max(map(len, re.split("[\r\n]", drawn.partition("copying")[2]))) <= columns


def test_an_early_end_leaves_the_terminal_as_it_was(hpcstage: Hpcstage, make_tree: Tree) -> None:
    data = make_tree(files=20, size_bytes=400_000)
    words = command("run", "--mode", "upfront", *SLOWLY, "--data", data, "--", "echo", "begun")
    out, got = on_terminal(hpcstage, words, end_at=b"hpcstage: copying")
    assert out == b""
    assert got.rstrip().endswith(b"\r\x1b[1A\x1b[2K"), "the line is gone"


def test_a_killed_wrapper_leaves_a_cursor_that_is_seen(hpcstage: Hpcstage, make_tree: Tree) -> None:
    data = make_tree(files=20, size_bytes=400_000)
    words = command("run", "--mode", "upfront", *SLOWLY, "--data", data, "--", "true")
    _, got = on_terminal(hpcstage, words, end_at=b"hpcstage: copying", by=signal.SIGKILL)
    assert b"\x1b[?25l" not in got
    wait_for(lambda: not list(hpcstage.local_dir.glob("hpcstage-*/*/")), 120, "the end of the daemon")


def test_of_virtual_nodes_the_sum_is_shown(hpcstage: Hpcstage, make_tree: Tree) -> None:
    data = make_tree(files=8, size_bytes=200_000)
    nodes = ("--nodes", "2", "--placement", "partition")
    words = command("run", *nodes, "--mode", "upfront", *SLOWLY, "--data", data, "--", "true")
    got = on_terminal(hpcstage, words, 200)[1]
    assert b"hpcstage: copying on 2 nodes" in got
    assert re.search(rb"of 1.6 MB, \d of 8 files", got), "each node has one half"


def test_a_terminal_shows_the_scan_of_a_plan(hpcstage: Hpcstage, make_tree: Tree) -> None:
    words = ["plan", "--data", os.fspath(make_tree(files=30))]
    out, got = on_terminal(hpcstage, command(*words))
    assert re.search(rb"hpcstage: scanning .*30 files, 300 kB, [\d,]+ files/s", got)
    assert got.rstrip().endswith(b"\x1b[2K")
    assert out == hpcstage(*words).stdout or b"30 files, 300 kB" in out
    assert on_terminal(hpcstage, command(*words, "-q"))[1] == b""


@pytest.mark.parametrize("mode", ["upfront", "runtime"])
def test_a_log_has_a_line_at_each_quarter_of_what_takes_long(hpcstage: Hpcstage, make_tree: Tree, mode: str) -> None:
    data, log, end = make_tree(files=8, size_bytes=400_000), hpcstage.cwd / "log", hpcstage.cwd / "end"
    code = "import os, sys, time\nwhile not os.path.exists(sys.argv[1]): time.sleep(0.01)"
    words = command("run", "--mode", mode, *SLOWLY, "--data", data, "--", *python_command(code, end))
    with log.open("wb") as file, subprocess.Popen(words, stderr=file, env=hpcstage.env, cwd=hpcstage.cwd):
        try:
            wait_for(lambda: b"copying: 100 %" in log.read_bytes(), 120, "the last quarter")
        finally:
            end.touch()
    *said, last = [line for line in log.read_text().splitlines() if "copying: " in line]
    assert len(said) <= 3, "fewer where a busy machine looks seldom"
    begin, end = r"hpcstage: copying: \d\d %, \d+ s left", r"[\d.]+ .?B/s, [\d.]+ .B of 3.2 MB, \d of 8 files"
    assert all(re.fullmatch(f"{begin}, {end}", line) for line in said), said
    assert re.fullmatch(r"hpcstage: copying: 100 %, in [\d.]+ s, 3.2 MB of 3.2 MB, 8 of 8 files", last)
    assert "\x1b" not in log.read_text()


@pytest.mark.parametrize("terminal", [True, False])
def test_quiet_is_quiet(hpcstage: Hpcstage, make_tree: Tree, terminal: bool) -> None:
    data = make_tree(files=4, size_bytes=200_000)
    words = command("run", "-q", "--mode", "upfront", *SLOWLY, "--data", data, "--", "true")
    if terminal:
        assert on_terminal(hpcstage, words) == (b"", b"")
    else:
        done = subprocess.run(words, env=hpcstage.env, cwd=hpcstage.cwd, capture_output=True, timeout=300, check=True)
        assert (done.stdout, done.stderr) == (b"", b"")


def test_of_what_is_soon_over_nothing_is_said_and_rich_is_not_imported(hpcstage: Hpcstage, make_tree: Tree) -> None:
    data = make_tree(files=4, size_bytes=200_000)
    words = command("run", "--mode", "upfront", "--data", data, "--", "true", before="")
    words[1:1] = ["-X", "importtime"]
    done = subprocess.run(words, env=hpcstage.env, cwd=hpcstage.cwd, capture_output=True, timeout=300, check=True)
    imported = re.findall(r"\| +([\w.]+)$", done.stderr.decode(), re.M)
    assert "hpcstage.report.progress" in imported
    assert [name for name in imported if name.startswith("rich")] == []
    assert b"copying" not in done.stderr


@pytest.mark.parametrize("stderr", ["pipe", "terminal"])
def test_a_stderr_that_nobody_reads_holds_up_no_run(hpcstage: Hpcstage, make_tree: Tree, stderr: str) -> None:
    data, env = make_tree(files=8, size_bytes=200_000), {**hpcstage.env, "TERM": "xterm", "HPCSTAGE_NODEZ": "2"}
    ours, theirs = os.pipe() if stderr == "pipe" else pty.openpty()
    _fill(theirs)
    words = command("run", "--mode", "upfront", *SLOWLY, "--data", data, "--", "sh", "-c", "exit 7")
    with subprocess.Popen(words, stderr=theirs, env=env, cwd=hpcstage.cwd) as run:
        try:
            assert run.wait(timeout=300) == 7
        finally:
            run.kill()
            os.close(ours)
            os.close(theirs)
    assert hpcstage.records()


@pytest.mark.parametrize("reader", ["sleeps", "gone"])
def test_an_error_that_cannot_be_said_keeps_its_exit_code(hpcstage: Hpcstage, make_tree: Tree, reader: str) -> None:
    ours, theirs = os.pipe()
    if reader == "gone":
        os.close(ours)
    else:
        _fill(theirs)
    words = command("run", "--data", make_tree(files=1), "--", "/does/not/exist")
    with subprocess.Popen(words, stderr=theirs, env=hpcstage.env, cwd=hpcstage.cwd) as run:
        try:
            assert run.wait(timeout=300) == 127
        finally:
            run.kill()
            os.close(theirs)
            if reader != "gone":
                os.close(ours)


def test_a_terminal_that_takes_nothing_but_says_it_would_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = os.pipe()
    try:
        out = UnwaitingStream(theirs, "utf-8")

        def takes_nothing(fd: int, data: bytes) -> int:
            raise BlockingIOError

        monkeypatch.setattr(os, "write", takes_nothing)  # as a terminal with room for one byte does with a line end
        begun = time.monotonic()
        out.write("\n")
        assert time.monotonic() - begun < PATIENCE_S + 5
    finally:
        os.close(ours)
        os.close(theirs)


def test_what_scanning_nodes_have_found_does_not_count_as_copied(tmp_path: Path) -> None:
    told = [(State.STAGING, WorkProgress(1, 10, 4, 40)), (State.SCANNING, WorkProgress(3, 30)), None]
    told.append((State.SETTLED, WorkProgress(4, 40, 4, 40)))
    paths = [tmp_path / str(index) for index in range(len(told))]
    for path, one in zip(paths, told, strict=True):
        if one is not None:
            page.create(path)
            page.set_state(path, one[0])
            page.note_progress(path, one[1])
    assert page.summed_progress(paths) == (State.STAGING, WorkProgress(5, 50, 8, 80))
    assert page.summed_progress(paths[1:]) == (State.SCANNING, WorkProgress(3, 30))
    assert page.summed_progress(paths[2:]) is None


def test_what_was_dropped_does_not_stop_what_comes_later() -> None:
    ours, theirs = os.pipe()
    try:
        out = UnwaitingStream(theirs, "utf-8")
        filled = _fill(theirs)
        begun = time.monotonic()
        for _ in range(100):
            out.write("nobody reads this\n")
        assert time.monotonic() - begun < 50 * PATIENCE_S
        assert os.get_blocking(theirs), "the command's end of the pipe is as it was"
        assert _emptied(ours, filled) == b"x" * filled
        out.write("é is read\n")
        assert os.read(ours, 100) == "é is read\n".encode()
    finally:
        os.close(ours)
        os.close(theirs)


def _fill(fd: int) -> int:
    """Writes to a pipe or terminal until it takes no more; returns the number of bytes."""
    filled = 0
    os.set_blocking(fd, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            filled += os.write(fd, b"x" * 1024)
    os.set_blocking(fd, True)
    return filled


def _emptied(fd: int, size_bytes: int) -> bytes:
    got = b""
    while len(got) < size_bytes:
        got += os.read(fd, size_bytes - len(got))
    return got


# ---- the arithmetic


def pace(*seen: tuple[float, WorkProgress]) -> CopyPace:
    found = CopyPace(0.0)
    for at_s, done in seen:
        found.add(at_s, done)
    return found


def test_share_rate_and_time_left() -> None:
    found = pace((0.0, WorkProgress(0, 0, 100, 10**9)), (10.0, WorkProgress(25, 200 * 10**6, 100, 10**9)))
    assert found.share == 0.2
    assert found.left_s == pytest.approx(40)
    assert found.text() == "20 %, 40 s left, 20 MB/s, 200 MB of 1 GB, 25 of 100 files"


def test_the_rate_is_that_of_the_last_half_minute() -> None:
    slow = [(float(second), WorkProgress(second, second * 10**6, 1000, 10**9)) for second in range(100)]
    fast = [(100.0 + second, WorkProgress(100, (100 + 9 * second) * 10**6, 1000, 10**9)) for second in range(60)]
    assert "9 MB/s" in pace(*slow, *fast).text()


def test_what_is_not_known_is_not_told() -> None:
    assert pace((0.0, WorkProgress(0, 0)), (2.0, WorkProgress(500, 10**6))).text() == "500 files, 1 MB, 250 files/s"
    stuck = pace((0.0, WorkProgress(1, 10, 4, 100)), (5.0, WorkProgress(1, 10, 4, 100)))
    assert stuck.left_s is None
    assert "10 %, time left unknown" in stuck.text()


def test_each_quarter_of_what_takes_long_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    log, now_s = io.StringIO(), 0.0
    monkeypatch.setattr(progress.stderr, "stream", lambda: log)
    monkeypatch.setattr(progress.time, "monotonic", lambda: now_s)
    line = ProgressLine(quiet=False)
    for second in range(201):
        now_s = float(second)
        line.show("copying", WorkProgress(second // 2, second * 10**6, 100, 200 * 10**6))
    assert [said.split(",")[0] for said in log.getvalue().splitlines()] == [
        f"hpcstage: copying: {share} %" for share in (25, 50, 75, 100)
    ]


def test_files_without_bytes_count_by_their_number() -> None:
    found = pace((0.0, WorkProgress(0, 0, 8, 0)), (1.0, WorkProgress(2, 0, 8, 0)))
    assert (found.share, found.left_s) == (0.25, pytest.approx(3.0))
