"""Stopped processes below an agent are found by the kernel's word and killed; others are left alone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import psutil
import pytest
from conftest import wait_for

from hpcstage.elastic.frozen import FrozenProcesses

TREE = "import subprocess, sys; p = subprocess.Popen(['sleep', '1000']); print(p.pid, flush=True); p.wait()"


@pytest.fixture
def tree() -> Iterator[tuple[subprocess.Popen[str], psutil.Process]]:
    """A child and its child."""
    with subprocess.Popen([sys.executable, "-c", TREE], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        below = psutil.Process(int(child.stdout.readline()))
        yield child, below
        for process in (below, child):
            if process.is_running() if isinstance(process, psutil.Process) else process.poll() is None:
                process.kill()
    wait_for(lambda: not below.is_running(), what="the end of the child's child")


def stop(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)
    wait_for(lambda: psutil.Process(pid).status() == psutil.STATUS_STOPPED)


def test_a_stopped_process_is_killed_after_the_limit_and_not_before(
    tree: tuple[subprocess.Popen[str], psutil.Process], capfd: pytest.CaptureFixture[str]
) -> None:
    child, _ = tree
    frozen = FrozenProcesses("n1", 2.0, 0.0)
    stop(child.pid)
    assert [frozen.kill(step / 4) for step in range(9)] == [[]] * 8 + [[child.pid]]
    assert child.wait(300) == -signal.SIGKILL
    assert f"elastic: n1: process {child.pid} (" in capfd.readouterr().err


def test_a_stopped_process_further_down_is_found(tree: tuple[subprocess.Popen[str], psutil.Process]) -> None:
    child, below = tree
    frozen = FrozenProcesses("n1", 0.5, 0.0)
    stop(below.pid)
    assert [frozen.kill(step / 4) for step in range(3)] == [[], [], [below.pid]]
    assert child.wait(300) == 0


def test_one_that_goes_on_in_time_is_left_alone(tree: tuple[subprocess.Popen[str], psutil.Process]) -> None:
    child, _ = tree
    frozen = FrozenProcesses("n1", 1.0, 0.0)
    for begin in (0.0, 2.0):
        stop(child.pid)
        assert [frozen.kill(begin + step / 4) for step in range(4)] == [[]] * 4
        os.kill(child.pid, signal.SIGCONT)
        wait_for(lambda: psutil.Process(child.pid).status() != psutil.STATUS_STOPPED)
        assert [frozen.kill(begin + 1 + step / 4) for step in range(4)] == [[]] * 4
    assert child.poll() is None


def test_time_in_which_the_agent_was_stopped_itself_does_not_count(
    tree: tuple[subprocess.Popen[str], psutil.Process],
) -> None:
    child, _ = tree
    frozen = FrozenProcesses("n1", 2.0, 0.0)
    stop(child.pid)
    assert (frozen.kill(0.0), frozen.kill(600.0), frozen.kill(600.5)) == ([], [], [])
    assert child.poll() is None


def test_looking_costs_little(tree: tuple[subprocess.Popen[str], psutil.Process]) -> None:
    frozen = FrozenProcesses("n1", 2.0, 0.0)
    began_s = time.process_time()
    for step in range(100):
        frozen.kill(step / 4)
    assert time.process_time() - began_s < 5.0, "of 25 s"
