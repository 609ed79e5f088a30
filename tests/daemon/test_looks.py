"""Looks at the threads of processes: what a look says, and that looks stay cheap."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
from conftest import wait_for

from hpcstage.daemon.process.looks import Looks, threads_of

State = tuple[int, bool, bool, bool, bool]


@pytest.fixture
def sleeper() -> Iterator[int]:
    """A process that waits for its standard input to end."""
    with subprocess.Popen(
        [sys.executable, "-c", "input()"], stdin=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as process:
        wait_for(lambda: threads_of(process.pid, 8) == "S", what="a process that sleeps")
        yield process.pid
        process.kill()


@pytest.mark.parametrize(
    ("inside", "waits", "source_ns", "local_ns"),
    [(True, True, True, False), (True, False, False, True), (False, False, False, False)],
)
def test_a_process_whose_threads_sleep_waits_for_what_it_is_inside_of(
    sleeper: int, inside: bool, waits: bool, source_ns: bool, local_ns: bool
) -> None:
    looks = Looks(lambda: iter([(sleeper, inside, waits, False, False)]), 0.0)
    for tenth in range(10, 60):
        looks.look(tenth / 10)
    found = looks.of(sleeper)
    assert found["looked_ns"] > 0
    assert ("look_wait_source_ns" in found, "look_wait_local_ns" in found) == (source_ns, local_ns)
    assert all(value <= found["looked_ns"] for value in found.values())


def test_a_process_with_a_thread_that_runs_does_not_wait() -> None:
    assert threads_of(os.getpid(), 64)[-1] == "R"  # this thread
    looks = Looks(lambda: iter([(os.getpid(), True, True, True, True)]), 0.0)
    for tenth in range(10, 60):
        looks.look(tenth / 10)
    assert set(looks.of(os.getpid())) == {"looked_ns", "look_inside_source_ns"}


@pytest.mark.parametrize("maps", [(True, False), (False, True), (False, False)])
def test_a_page_fault_is_one_where_files_are_mapped(monkeypatch: pytest.MonkeyPatch, maps: tuple[bool, bool]) -> None:
    monkeypatch.setattr(
        "hpcstage.daemon.process.looks.threads_of", lambda pid, most: "DS"
    )  # the kernel alone can put one there
    looks = Looks(lambda: iter([(os.getpid(), False, False, *maps)]), 0.0)
    for tenth in range(10, 60):
        looks.look(tenth / 10)
    found = looks.of(os.getpid())
    assert ("look_fault_source_ns" in found, "look_fault_local_ns" in found) == maps


def test_a_process_that_is_gone_is_not_looked_at() -> None:
    with subprocess.Popen(["true"]) as process:
        process.wait()
    assert threads_of(process.pid, 8) == ""


def test_with_nothing_to_look_at_looks_are_rare() -> None:
    looks = Looks(lambda: iter([]), 0.0)
    looks.look(1.0)
    assert looks.wake_after(1.0) >= 0.25
