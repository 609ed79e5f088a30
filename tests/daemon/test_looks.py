"""Looks at the threads of processes: what a look says, and that looks stay cheap."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
from conftest import wait_for

from hpcstage.daemon.process.looks import Looks, threads_of


@pytest.fixture
def sleeper() -> Iterator[int]:
    """A process that waits for its standard input to end."""
    with subprocess.Popen(
        [sys.executable, "-c", "input()"], stdin=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as process:
        wait_for(lambda: threads_of(process.pid, 8) == "S", what="a process that sleeps")
        yield process.pid
        process.kill()


@pytest.mark.parametrize("call", ["source", "local", ""])
def test_a_process_whose_threads_sleep_waits_for_what_it_is_inside_of(sleeper: int, call: str) -> None:
    looks = Looks(lambda: iter([(sleeper, call, "")]), 0.0)
    for tenth in range(10, 60):
        looks.look(tenth / 10)
    found = looks.of(sleeper)
    assert found["looked_ns"] > 0
    assert {name for name in found if name.startswith("look_wait")} == ({f"look_wait_{call}_ns"} if call else set())
    assert all(value <= found["looked_ns"] for value in found.values())


def test_a_process_with_a_thread_that_runs_does_not_wait() -> None:
    assert threads_of(os.getpid(), 64)[-1] == "R"  # this thread
    looks = Looks(lambda: iter([(os.getpid(), "source", "source")]), 0.0)
    for tenth in range(10, 60):
        looks.look(tenth / 10)
    assert set(looks.of(os.getpid())) == {"looked_ns", "look_inside_source_ns"}


@pytest.mark.parametrize("mapped", ["source", "local", ""])
def test_a_page_fault_is_one_where_files_are_mapped(monkeypatch: pytest.MonkeyPatch, mapped: str) -> None:
    monkeypatch.setattr(
        "hpcstage.daemon.process.looks.threads_of", lambda pid, most: "DS"
    )  # the kernel alone can put one there
    looks = Looks(lambda: iter([(os.getpid(), "", mapped)]), 0.0)
    for tenth in range(10, 60):
        looks.look(tenth / 10)
    found = looks.of(os.getpid())
    assert {name for name in found if name.startswith("look_fault")} == (
        {f"look_fault_{mapped}_ns"} if mapped else set()
    )


def test_a_process_that_is_gone_is_not_looked_at() -> None:
    with subprocess.Popen(["true"]) as process:
        process.wait()
    assert threads_of(process.pid, 8) == ""


def test_with_nothing_to_look_at_looks_are_rare() -> None:
    looks = Looks(lambda: iter([]), 0.0)
    looks.look(1.0)
    assert looks.wake_after(1.0) >= 0.25
