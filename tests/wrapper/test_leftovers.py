"""Output directories of runs that are over, on the local disk: what is drained, deleted, left alone."""

from __future__ import annotations

import fcntl
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcstage import owner
from hpcstage.emulator import Slowfs, unavailable
from hpcstage.errors import LocalDiskProblem
from hpcstage.node import kept
from hpcstage.node.kept import KeptLock, KeptPlace
from hpcstage.owner import OWNER, let_go
from hpcstage.upload.facts import Place
from hpcstage.upload.start import start
from hpcstage.wrapper import leftovers, outdir

NO_FUSE = unavailable()


@dataclass
class Left:
    """The place of a run, its DIR, and the lock of the run's wrapper."""

    above: Path
    target: Path
    place: KeptPlace
    lock: KeptLock

    def write(self, name: str = "file", text: str = "content") -> None:
        (self.place.tree / name).write_text(text)

    def end(self, *, was_watched: bool = True) -> None:
        """The run is over: it was killed."""
        if was_watched:
            self.place.watched.touch()
        self.lock.let_go()


@pytest.fixture
def left(local_dir: Path, tmp_path: Path) -> Iterator[Left]:
    above, target = local_dir / "hpcstage-out-0", tmp_path / "results"
    target.mkdir()
    (target / "earlier").write_text("earlier")
    place, lock = kept.make(above, ["run-9"], "run-9")
    start(Place(place.output), os.fspath(target), "run-9").close()
    yield Left(above, target, place, lock)
    place.remove()


def drained(left: Left) -> list[tuple[str, str]]:
    """Drains, and returns what is left, and why."""
    return [(one.name, one.why) for part in leftovers.drain_all(left.above) for one in part.named("undrained")]


# ---- what is deleted


@pytest.mark.parametrize("was_watched", [True, False])
def test_files_are_drained_also_where_it_is_not_said_that_they_were_watched(left, was_watched):
    left.write()
    left.end(was_watched=was_watched)
    assert leftovers.waiting(left.above) == [left.place]
    assert drained(left) == []
    assert (left.target / "file").read_text() == "content"
    assert not left.above.exists()


def test_a_run_that_was_killed_before_its_command_leaves_nothing(left, capfd):
    left.end(was_watched=False)
    assert leftovers.waiting(left.above) == []
    assert not left.above.exists()
    assert capfd.readouterr().err == ""


STOPPED = """
import os, sys
from pathlib import Path
from hpcstage.node.kept import KeptPlace

count = 0

def count_down(event, arguments):
    global count
    if event.startswith("os.re") or event in {"os.rmdir", "os.chmod"}:
        count += 1
        if count == int(sys.argv[2]):
            os._exit(1)

sys.addaudithook(count_down)
KeptPlace(Path(sys.argv[1])).remove()
"""


def test_a_removal_that_was_killed_is_finished(left, capfd):
    """All is drained; the removal is killed before each of its steps."""
    step, is_killed = 0, True
    left.end()
    left.place.remove()
    while is_killed:
        step += 1
        place, lock = kept.make(left.above, ["run-9"], "run-9")
        start(Place(place.output), os.fspath(left.target), "run-9").close()
        one = Left(left.above, left.target, place, lock)
        one.write("file", f"{step}")
        one.end()
        done = subprocess.run([sys.executable, "-c", STOPPED, place.path, f"{step}"], check=False)
        is_killed = done.returncode == 1
        assert drained(one) == [], step
        assert list(kept.places(left.above)) == [], step
        assert "removed or moved" not in capfd.readouterr().err, "nobody else removed it"
    assert step > 5


def test_a_place_with_names_that_are_too_long_to_be_called_is_deleted(left):
    deep = left.place.tree / "/".join(["d" * 200] * 19)
    deep.mkdir(parents=True)
    inside = os.open(deep, os.O_RDONLY)
    try:
        os.mkdir("e" * 250, dir_fd=inside)
    finally:
        os.close(inside)
    left.lock.let_go()
    left.place.remove()
    assert not left.above.exists()


# ---- who has what


def test_a_late_drain_waits_for_who_uses_the_directory(left):
    left.write()
    left.end()
    lock = outdir.lock(os.fspath(left.target), "--out results", "run 10 on this node")
    assert drained(left) == [("", f"{left.target} is in use by run 10 on this node")]
    assert sorted(os.listdir(left.target)) == [OWNER, "earlier"]
    let_go(lock)
    assert drained(left) == []
    assert sorted(os.listdir(left.target)) == ["earlier", "file"], "its own lock is gone, too"


def test_who_has_the_lock_of_the_directory_drains_itself(left):
    left.write()
    left.end()
    lock = outdir.lock(os.fspath(left.target), "--out results", "run run-9 on this node")
    own = left.place.take()
    assert own is not None
    try:
        assert leftovers.drain(left.place, own, 10.0, owning=left.place.run_id).named("undrained") == ()
        assert (left.target / OWNER).read_text().startswith("run run-9 on this node\n")
    finally:
        own.let_go()
        let_go(lock)
    assert sorted(os.listdir(left.target)) == ["earlier", "file"]


def test_a_drain_may_write_to_what_the_run_around_it_has_locked(left, monkeypatch):
    """As agents drain what an earlier run left on their node, before the first command of the next."""
    left.write()
    left.end()
    lock = outdir.lock(os.fspath(left.target), "--out results", "run 10 on another node")
    monkeypatch.setenv("HPCSTAGE_RUN_ID", "10")
    try:
        assert drained(left) == []
        assert (left.target / "file").read_text() == "content"
        assert (left.target / OWNER).read_text().startswith("run 10 on another node\n")
    finally:
        let_go(lock)


def test_a_drain_comes_after_that_of_another_node(left):
    left.write()
    left.end()
    target = os.fspath(left.target)
    lock = outdir.lock(target, target, "the drain of run 9 on another node")
    ended = threading.Timer(0.3, let_go, (lock,))
    ended.start()
    assert drained(left) == []
    assert not ended.is_alive()
    ended.join()


def is_passed_over(place: KeptPlace) -> bool:
    """Whether systemd-tmpfiles, which wants a lock of each directory that it looks into, does not get this one."""
    fd = os.open(place.path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def test_a_cleaner_of_old_files_passes_over_a_place_with_which_somebody_works(left):
    assert is_passed_over(left.place)
    left.lock.let_go()
    assert not is_passed_over(left.place)
    lock = left.place.take()
    assert lock is not None
    assert is_passed_over(left.place)
    again = lock.again()
    lock.let_go()
    assert is_passed_over(left.place)
    again.let_go()
    assert not is_passed_over(left.place)


@pytest.fixture
def program() -> Iterator[list[subprocess.Popen[bytes]]]:
    started: list[subprocess.Popen[bytes]] = []
    yield started
    for one in started:
        one.kill()
        one.wait()


@pytest.mark.parametrize("how", ["works there", "works below", "names it", "names a file"])
def test_a_program_without_our_variables_uses_a_directory(left, program, how):
    (left.place.tree / "sub").mkdir()
    tree = os.fspath(left.place.tree)
    cwd = {"works there": tree, "works below": f"{tree}/sub"}.get(how)
    word = {"names it": tree, "names a file": f"--out={tree}/file"}.get(how, "nothing")
    code = "import time; print(flush=True); time.sleep(60)"
    program.append(subprocess.Popen([sys.executable, "-c", code, word], env={}, cwd=cwd, stdout=subprocess.PIPE))
    assert program[0].stdout is not None
    program[0].stdout.readline()
    program[0].stdout.close()
    left.write()
    left.end()
    assert left.place.is_used()
    assert leftovers.waiting(left.above) == []
    program[0].kill()
    program[0].wait()
    assert not left.place.is_used()
    assert drained(left) == []


def test_who_asks_may_stand_in_the_directory(left, monkeypatch):
    monkeypatch.chdir(left.place.tree)
    assert not left.place.is_used()


@pytest.mark.parametrize("has_run", [True, False])
def test_a_job_that_inherits_the_variables_of_an_earlier_run_does_not_use_its_place(left, program, has_run):
    env = {"HPCSTAGE_OUT": os.fspath(left.place.tree)} | ({"HPCSTAGE_RUN_ID": "run-8"} if has_run else {})
    program.append(subprocess.Popen(["sleep", "60"], env=env))
    assert left.place.is_used() is not has_run


# ---- the names of places


NAMES = ["dir", "run-10"]


def test_a_place_that_somebody_has_keeps_its_name(left, program):
    left.place.path.rename(left.above / "dir")
    place, lock = kept.make(left.above, NAMES, "run-10")
    assert (place.path.name, place.run_id) == ("run-10", "run-10")
    lock.let_go()
    place.remove()
    left.lock.let_go()
    program.append(subprocess.Popen(["sleep", "60"], cwd=left.above / "dir/out/tree"))
    with pytest.raises(LocalDiskProblem, match="run run-9, or a program of it, has it"):
        kept.make(left.above, NAMES[:1], "run-10")
    assert os.listdir(left.above) == ["dir"]
    KeptPlace(left.above / "dir").remove()


def test_a_place_of_a_run_that_is_over_gives_its_name_up(left):
    left.write()
    left.place.path.rename(left.above / "dir")
    KeptPlace(left.above / "dir").watched.touch()
    left.lock.let_go()
    place, lock = kept.make(left.above, NAMES, "run-10")
    assert (place.path.name, place.run_id) == ("dir", "run-10")
    assert [one.path.name for one in kept.places(left.above)] == ["dir", "run-9"]
    assert drained(left) == []
    assert (left.target / "file").read_text() == "content"
    lock.let_go()
    place.remove()


def test_the_lock_of_a_place_that_another_one_replaced_is_not_taken(left, monkeypatch):
    """Who took it would take the living run's for one that is over."""
    left.lock.let_go()
    made = []

    def replaced(fd, how):
        if not made:
            made.append(None)
            left.place.path.rename(left.above / "run-8")
            made[0] = kept.make(left.above, ["run-9"], "run-10")
        flock(fd, how)

    flock = fcntl.flock
    monkeypatch.setattr(kept.fcntl, "flock", replaced)
    assert left.place.take() is None
    made[0][1].let_go()
    KeptPlace(left.above / "run-8").remove()


@given(st.text(min_size=1).filter(lambda name: "\0" not in name))
def test_the_name_for_a_directory_can_be_made_and_read(name):
    assert re.fullmatch(r"[A-Za-z0-9_-]{0,32}-[0-9a-f]{16}", kept.named_after(f"/shared/{name}")) is not None
    assert kept.named_after(f"/shared/{name}") != kept.named_after(f"/shared/{name}/x")


# ---- a directory that is inherited


def test_a_directory_of_a_run_that_does_not_live_here_is_not_used(left, tmp_path):
    tree = os.fspath(left.place.tree)
    env = {"HPCSTAGE_OUT": tree, "XDG_CONFIG_HOME": os.fspath(tmp_path / "config")}
    assert outdir.without_us({}, env, tmp_path) == {outdir.OUT: tree}
    left.end()
    assert outdir.without_us({}, env, tmp_path) == {}
    given = outdir.without_us({"out": "another"}, env, tmp_path)
    assert given == {outdir.OUT: os.fspath(tmp_path / "another")}
    elsewhere = tree.replace("run-9", "run-8")
    assert outdir.without_us({}, {**env, "HPCSTAGE_OUT": elsewhere}, tmp_path) == {}
    assert not os.path.exists(elsewhere)
    mine = os.fspath(tmp_path / "mine")
    assert outdir.without_us({}, {**env, "HPCSTAGE_OUT": mine}, tmp_path) == {outdir.OUT: mine}


# ---- a shared file system that hangs


@pytest.mark.skipif(NO_FUSE is not None, reason=str(NO_FUSE))
def test_a_lock_on_a_file_system_that_hangs_is_let_go(tmp_path, monkeypatch):
    monkeypatch.setattr(owner, "REMOVED_S", 0.2)
    source = tmp_path / "source"
    source.mkdir()
    with Slowfs(source) as slow:
        (slow.path / "first").write_text("closing this one tells the kernel that closing asks nobody")
        fd = outdir.lock(os.fspath(slow.path), "results", "run 9")
        renewing = psutil.Process(owner._held[fd].renewing)
        os.kill(slow.server_pid, signal.SIGSTOP)
        try:
            began_s = time.monotonic()
            let_go(fd)
            assert time.monotonic() - began_s < 60
        finally:
            os.kill(slow.server_pid, signal.SIGCONT)
        renewing.wait(300)
        assert os.listdir(source) == ["first"], "it is removed as soon as the file system answers"
