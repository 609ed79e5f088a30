"""The lock of DIR where `flock` tells nothing of other nodes: what stands in the file, and whether it is renewed."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from conftest import REPO, wait_for

from hpcstage.errors import UsageError
from hpcstage.wrapper import dirlock

ELSEWHERE = "11111111-2222-3333-4444-555555555555 77 12345"
"""A process on another node."""
HOLD = """
import sys, time
from hpcstage.wrapper import dirlock
dirlock.lock(sys.argv[1], sys.argv[1], "run 7 on another node")
print("held", flush=True)
time.sleep(60)
"""


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for long."""
    monkeypatch.setattr(dirlock, "WATCHED_S", 1.0)


def left(target: Path, process: str, age_s: float = 0.0) -> Path:
    """A lock that a run left."""
    lock = target / dirlock.LOCK
    lock.write_text(f"run 7 on another node\n{process}\n")
    os.utime(lock, (time.time() - age_s, time.time() - age_s))
    return lock


def takes(target: Path) -> str:
    """Takes the lock and lets go of it; returns who has it, or nothing."""
    try:
        fd = dirlock.lock(os.fspath(target), "--out results", "run 8 on this node")
    except dirlock.TargetInUse as error:
        return error.holder
    assert (target / dirlock.LOCK).read_text().startswith("run 8 on this node\n")
    dirlock.unlock(os.fspath(target), fd)
    assert not (target / dirlock.LOCK).exists()
    return ""


def test_a_holder_on_another_node_that_renews_the_lock_has_it(tmp_path: Path) -> None:
    lock = left(tmp_path, ELSEWHERE)
    renewed = threading.Timer(0.4, os.utime, (lock,))
    renewed.start()
    assert takes(tmp_path) == "run 7 on another node"
    renewed.join()
    assert lock.read_text().startswith("run 7 on another node\n"), "it stays the other's"


def test_a_holder_on_another_node_that_ends_meanwhile_has_it_no_more(tmp_path: Path) -> None:
    ended = threading.Timer(0.4, left(tmp_path, ELSEWHERE).unlink)
    ended.start()
    assert takes(tmp_path) == ""
    ended.join()


def test_a_lock_that_another_node_has_just_made_is_its(tmp_path: Path) -> None:
    """Two starts within milliseconds: the other has made the file and not written to it yet."""
    (tmp_path / dirlock.LOCK).touch()
    wrote = threading.Timer(0.4, left, (tmp_path, ELSEWHERE))
    renewed = threading.Timer(0.9, os.utime, (tmp_path / dirlock.LOCK,))
    wrote.start()
    renewed.start()
    assert takes(tmp_path) == "run 7 on another node"
    renewed.join()


def test_of_two_that_take_the_lock_of_a_dead_holder_at_once_one_has_it(tmp_path: Path) -> None:
    lock, is_over = left(tmp_path, ELSEWHERE), threading.Event()

    def other() -> None:
        wait_for(lambda: lock.read_text().startswith("run 8 on this node\n"), what="the lock of this node")
        lock.write_text("run 9 on a third node\n22222222-2222-3333-4444-555555555555 5 6\n")
        while not is_over.wait(0.2):
            os.utime(lock)

    thread = threading.Thread(target=other)
    thread.start()
    try:
        assert takes(tmp_path) == "run 9 on a third node"
    finally:
        is_over.set()
        thread.join()


def test_a_hard_link_in_the_place_of_the_lock_is_refused(tmp_path: Path) -> None:
    """Others may write to DIR, and have linked a file of this user there."""
    own = tmp_path / "own"
    own.write_text("precious")
    os.link(own, tmp_path / dirlock.LOCK)
    with pytest.raises(UsageError, match="hard link"):
        dirlock.lock(os.fspath(tmp_path), "--out results", "run 8 on this node")
    assert own.read_text() == "precious"


@pytest.mark.parametrize("age_s", [0.0, 20.0, -20.0])
def test_a_dead_holder_on_another_node_does_not_block(tmp_path: Path, age_s: float) -> None:
    left(tmp_path, ELSEWHERE, age_s)
    assert takes(tmp_path) == ""


@pytest.mark.parametrize("process", [ELSEWHERE, "", "of an older version"])
def test_an_old_lock_is_taken_at_once(tmp_path: Path, process: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dirlock, "WATCHED_S", 1e6)
    left(tmp_path, process, 2 * dirlock._OLD_S)
    assert takes(tmp_path) == ""


def test_a_process_of_this_node_has_it_as_long_as_it_lives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dirlock.fcntl, "flock", lambda *_: None)  # as on a file system without
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, tmp_path],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.fspath(REPO)},
    ) as other:
        try:
            assert other.stdout is not None
            assert other.stdout.readline() == b"held\n"
            assert takes(tmp_path) == "run 7 on another node"
        finally:
            other.kill()
    assert takes(tmp_path) == ""


def test_who_has_the_lock_renews_it_until_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dirlock, "RENEWED_S", 0.05)
    fd = dirlock.lock(os.fspath(tmp_path), "--out results", "run 8 on this node")
    lock = tmp_path / dirlock.LOCK
    os.utime(lock, (0, 0))
    wait_for(lambda: lock.stat().st_mtime > time.time() - 60, what="a renewed lock")
    dirlock.unlock(os.fspath(tmp_path), fd)
    assert dirlock._renewing == {}
