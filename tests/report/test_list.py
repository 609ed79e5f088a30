"""`hpcstage list`: a thousand runs in a moment, and the state of each as it is."""

from __future__ import annotations

import json
import os
import resource
import shutil
from collections.abc import Callable
from pathlib import Path

import manyruns
import psutil
import pytest
from conftest import Hpcstage, below, kill_all, wait_for

EVERY = 1000
CPU_LIMIT_S = 4.0


@pytest.fixture(scope="module")
def thousand(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    base = tmp_path_factory.mktemp("thousand")
    return base, manyruns.make(base, EVERY)


def rows(hpcstage: Hpcstage, *words: str, **given: object) -> list[list[str]]:
    done = hpcstage("list", *words, **given)  # type: ignore[arg-type]
    assert (done.returncode, done.stderr) == (0, b"")
    return [line.split() for line in done.stdout.decode().splitlines()]


def states(hpcstage: Hpcstage) -> list[tuple[str, int, bool]]:
    found = json.loads(hpcstage("list", "--json").stdout)
    return [(run["state"], run["lost_nodes"], run["is_there"]) for run in found]


@pytest.mark.parametrize("with_index", [True, False])
def test_a_thousand_runs_newest_first(
    hpcstage: Hpcstage, thousand: tuple[Path, dict[str, str]], tmp_path: Path, with_index: bool
) -> None:
    base, env = thousand
    given = {"cwd": base, "env": env if with_index else {"XDG_STATE_HOME": str(tmp_path / "none")}}
    heads, *found = rows(hpcstage, "--all", **given)
    assert heads == ["run", "job", "command", "mode", "nodes", "total", "waited", "exit", "state", "started"]
    assert [row[0] for row in found] == [manyruns.run_id(number) for number in reversed(range(EVERY))]
    assert sum(row.count("killed") for row in found) == EVERY // manyruns.KILLED_EVERY
    assert found[0][1:8] == ["4999", "train.py", "direct", "1", "60.2", "s", "5.12"]
    heads, *found, more = rows(hpcstage, "-n", "3", **given)
    assert len(found) == 3
    assert more[:2] == ["997", "more:"]


def test_thousands_of_runs_are_listed_in_seconds(hpcstage: Hpcstage, thousand: tuple[Path, dict[str, str]]) -> None:
    """Of the processor's time: others may use the machine."""
    base, env = thousand
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert len(rows(hpcstage, "--all", cwd=base, env=env)) == EVERY + 1
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < CPU_LIMIT_S


def test_the_index_keeps_a_thousand_runs(thousand: tuple[Path, dict[str, str]], tmp_path: Path) -> None:
    """Each has two lines in it, a killed one has one."""
    from hpcstage.record import index

    state = shutil.copytree(thousand[0] / "state", tmp_path / "state")
    env = {"XDG_STATE_HOME": os.fspath(state)}
    first = next(index.newest(env))
    path = index.path_of(env)
    path.write_bytes(path.read_bytes() * 2)
    index._append(first, env)
    assert len(path.read_bytes().splitlines()) == index.MOST_RUNS
    kept = list(index.newest(env))
    assert len(kept) == EVERY
    assert sum(line.state == "ended" for line in kept) == EVERY - EVERY // manyruns.KILLED_EVERY


def test_no_run_yet(hpcstage: Hpcstage) -> None:
    done = hpcstage("list")
    assert (done.returncode, done.stdout.count(b"\n")) == (0, 1)
    assert done.stdout.startswith(b"no runs yet")
    assert json.loads(hpcstage("list", "--json").stdout) == []


def test_a_run_that_goes_on_ends_and_goes(hpcstage: Hpcstage, make_tree: Callable[..., Path]) -> None:
    with manyruns.going(hpcstage, "--data", make_tree(files=3)):
        assert states(hpcstage) == [("running", 0, True)]
    assert states(hpcstage) == [("ended", 0, True)]
    (found,) = rows(hpcstage)[1:]
    assert found[-4:-2] == ["0", "ended"]
    shutil.rmtree(hpcstage.cwd / "hpcstage-runs")
    assert states(hpcstage) == [("ended", 0, False)]
    assert b"ended, directory gone" in hpcstage("list").stdout


def test_a_run_into_the_directory_of_an_earlier_one(hpcstage: Hpcstage, make_tree: Callable[..., Path]) -> None:
    words = ("--run-dir", "results", "--data", make_tree(files=3))
    with manyruns.going(hpcstage, *words):
        pass
    with manyruns.going(hpcstage, *words):
        assert states(hpcstage) == [("running", 0, True), ("ended", 0, True)]
        assert b"still running" in hpcstage("report", "results").stdout, "the record there is that of the earlier run"
    assert states(hpcstage) == [("ended", 0, True)] * 2


def test_a_killed_run(hpcstage: Hpcstage, make_tree: Callable[..., Path], local_dir: Path) -> None:
    with manyruns.going(hpcstage, "--data", make_tree(files=3)) as process:
        kill_all(process)
        assert states(hpcstage) == [("lost", 0, True)]
        assert rows(hpcstage)[1][-3] == "killed"
    hpcstage("clean")


def test_while_the_wrapper_ends_the_run_it_is_running(hpcstage: Hpcstage, make_tree: Callable[..., Path]) -> None:
    """Its command has ended, and there may be much to be copied."""
    with manyruns.going(hpcstage, "--data", make_tree(files=3)) as process:
        (command,) = [one for one, words in below(process.pid) if "-c" in words and one.ppid() == process.pid]
        process.send_signal(19)
        command.kill()
        wait_for(lambda: command.status() == psutil.STATUS_ZOMBIE)
        assert states(hpcstage) == [("running", 0, True)]
        process.send_signal(18)
    assert states(hpcstage) == [("ended", 0, True)]


def test_a_run_that_loses_a_node(hpcstage: Hpcstage, make_tree: Callable[..., Path]) -> None:
    with manyruns.going(hpcstage, "--nodes", "2", "--data", make_tree(files=3)) as process:
        wait_for(lambda: len(list(hpcstage.cwd.glob("hpcstage-runs/*/nodes/*.v[01].json"))) == 2)
        (part,) = hpcstage.cwd.glob("hpcstage-runs/*/nodes/*.v1.json")
        manyruns.kill_node(process, 1)
        manyruns.grow_old(part)
        assert states(hpcstage) == [("running", 1, True)]
        assert b"running, 1 node lost" in hpcstage("list").stdout
        assert b"is silent: its last sign of life is" in hpcstage("report").stdout
    assert states(hpcstage) == [("ended", 1, True)]
