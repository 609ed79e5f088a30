"""`hpcstage report --follow`: a run that goes on, ends, is killed, loses a node, from its host and from another."""

from __future__ import annotations

import contextlib
import os
import pty
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import manyruns
import pytest
from conftest import Hpcstage, kill_all, wait_for
from recordcases import START
from reportcases import CASES

from hpcstage.protocol.shim import WorkProgress
from hpcstage.record.parts.roster import Presence
from hpcstage.record.schema import Record
from hpcstage.report.follow import Pace, copied

Tree = Callable[..., Path]
ELSEWHERE = ("unshare", "--pid", "--fork", "--mount-proc")
"""In another PID namespace, as on the login node, nothing is seen of a run but its files."""
needs_root = pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("unshare"), reason="needs root and unshare")


@contextmanager
def following(hpcstage: Hpcstage, *before: str) -> Iterator[tuple[subprocess.Popen[bytes], Callable[[], str]]]:
    """A follower of the last run, and what it has said so far."""
    path = hpcstage.cwd / "followed"
    with path.open("wb") as out:
        words = [*before, *hpcstage.command("report", "--follow")]
        with subprocess.Popen(
            words, cwd=hpcstage.cwd, env=hpcstage.env, stdout=out, stderr=subprocess.STDOUT
        ) as process:
            yield process, path.read_text
            process.wait(300)


@pytest.mark.parametrize("before", [(), pytest.param(ELSEWHERE, marks=needs_root)])
def test_until_the_run_ends(hpcstage: Hpcstage, make_tree: Tree, before: tuple[str, ...]) -> None:
    with manyruns.going(hpcstage, "--data", make_tree(files=3)):
        follower = following(hpcstage, *before)
        process, said = follower.__enter__()
        wait_for(lambda: "3 of 3 files copied (100 %)\n" in said())
        assert process.poll() is None
    follower.__exit__(None, None, None)
    assert process.returncode == 0
    assert "hpcstage report: " in said()
    assert "exit code 0" in said()
    assert "killed" not in said()


@pytest.mark.parametrize("before", [(), pytest.param(ELSEWHERE, marks=needs_root)])
def test_until_it_is_killed(hpcstage: Hpcstage, make_tree: Tree, local_dir: Path, before: tuple[str, ...]) -> None:
    with manyruns.going(hpcstage, "--data", make_tree(files=3)) as run, following(hpcstage, *before) as (process, said):
        wait_for(lambda: "3 of 3 files" in said())
        kill_all(run)
        if before:
            assert process.poll() is None, "it may go on, as far as the files tell"
            manyruns.grow_old(next(hpcstage.cwd.glob("hpcstage-runs/*")))
    hpcstage("clean")
    assert process.returncode == 0
    assert "\nkilled: there is no sign of life since 20" in said()
    assert "end not seen" in said(), "and its report follows"


def test_a_node_that_is_lost_on_the_way(hpcstage: Hpcstage, make_tree: Tree) -> None:
    with manyruns.going(hpcstage, "--nodes", "2", "--data", make_tree(files=3)) as run:
        wait_for(lambda: len(list(hpcstage.cwd.glob("hpcstage-runs/*/nodes/*.v[01].json"))) == 2)
        with following(hpcstage) as (process, said):
            wait_for(lambda: said() != "")
            manyruns.kill_node(run, 1)
            manyruns.grow_old(next(hpcstage.cwd.glob("hpcstage-runs/*/nodes/*.v1.json")))
            wait_for(lambda: ", 1 node lost" in said())
            (hpcstage.cwd / "stop").touch()
    assert "warning: nothing was heard from " in said()
    assert said().count("nothing was heard from ") == 1
    assert process.returncode == 0


def test_on_a_terminal_one_line_changes(hpcstage: Hpcstage, make_tree: Tree) -> None:
    ours, theirs = pty.openpty()
    got, words, where = b"", hpcstage.command("report", "--follow"), {"cwd": hpcstage.cwd, "env": hpcstage.env}
    with manyruns.going(hpcstage, "--data", make_tree(files=3)):
        process = subprocess.Popen(words, stdin=theirs, stdout=theirs, stderr=theirs, **where)  # type: ignore[call-overload]
        os.close(theirs)
        while b"files copied" not in got:
            got += os.read(ours, 65536)
    with contextlib.suppress(OSError):  # the other end is closed
        while chunk := os.read(ours, 65536):
            got += chunk
    os.close(ours)
    assert process.wait(300) == 0
    line, _, rest = got.decode().rpartition("\r\x1b[K")
    assert line.count("\n") == 0, "until the end the line is written over"
    assert "hpcstage report: " in rest.partition("\r\n")[2]


def test_who_follows_may_stop_at_any_time(hpcstage: Hpcstage, make_tree: Tree) -> None:
    with manyruns.going(hpcstage, "--data", make_tree(files=3)) as run:
        with following(hpcstage) as (process, said):
            wait_for(lambda: said() != "")
            process.send_signal(signal.SIGINT)
        assert process.returncode == 130
        assert "Traceback" not in said()
        assert run.poll() is None


def test_a_run_that_has_ended_one_of_a_thousand(hpcstage: Hpcstage) -> None:
    env = manyruns.make(hpcstage.cwd, 1000)
    done = hpcstage("report", "--follow", "4321", env=env)
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout == hpcstage("report", "4321", env=env).stdout
    killed = hpcstage("report", "--follow", "4320", env=env)
    assert killed.stdout.startswith(b"killed: there is no sign of life since 2026-")


# ---- what is known of the copying ----


def record_of(case: str, done: int, **node: object) -> Record:
    """A run that goes on, with so many of its 10,000 files staged on each node."""
    found = Record.from_json(CASES[case]())
    datasets = [replace(one, staged_files=done, staged_bytes=done * 100_000) for one in found.datasets]
    nodes = [replace(one, state=Presence.RUNNING, **node) for one in found.nodes]  # type: ignore[arg-type]
    return replace(found, datasets=tuple(datasets), nodes=tuple(nodes), run=replace(found.run, state="running"))


def test_how_long_the_copying_takes_yet_follows_from_the_last_half_minute() -> None:
    pace = Pace()
    for second in range(0, 100, 10):
        pace.add(START + second, record_of("whole", 10 * second))
    said = pace.text(record_of("whole", 900))
    assert said.startswith("90 s, 900 of 10,000 files copied (9 %), about 15m10s left for the rest, ")
    pace.add(START + 100, record_of("whole", 10_000))
    assert "left" not in pace.text(record_of("whole", 10_000))


def test_no_time_is_said_where_nobody_knows_what_will_be_copied() -> None:
    assert copied(record_of("whole", 900)) == WorkProgress(900, 90_000_000, 10_000, 10**9)
    assert copied(record_of("2 nodes", 900)) == WorkProgress(900, 90_000_000, 20_000, 2 * 10**9)
    assert copied(record_of("whole", 900, budget_bytes=10**8)) == WorkProgress(900, 90_000_000), "not all fit"
    group = record_of("2 nodes", 900).group
    assert group is not None
    alone = replace(record_of("2 nodes", 900), group=replace(group, placement="private"))
    assert copied(alone) == WorkProgress(900, 90_000_000), "each copies what its program reads"
    assert copied(record_of("no node", 900)) == WorkProgress(0, 0)
    lost = replace(alone, nodes=(replace(alone.nodes[0], state=Presence.SILENT), *alone.nodes[1:]))
    pace = Pace()
    pace.add(START, lost)
    assert pace.text(lost).endswith(", 1 node lost")


def test_the_rate_at_the_source_is_that_of_now() -> None:
    pace, record = Pace(), record_of("whole", 900)
    for second, size_bytes in ((0, 0), (10, 10**9), (20, 10**9)):
        pace.add(START + second, replace(record, totals=replace(record.totals, source_bytes=size_bytes)))
        said = pace.text(replace(record, totals=replace(record.totals, source_bytes=size_bytes)))
        assert ("100 MB/s from the source" in said) == (second == 10)
