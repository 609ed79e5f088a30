"""DIR has one owner, whoever is killed or stands still between any two steps, and never stays locked."""

from __future__ import annotations

import os
import select
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest
from conftest import wait_for
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hpcstage import owner
from hpcstage.owner import OWNER, Owned, Owner, holder_of, let_go, take
from hpcstage.upload.facts import Run
from hpcstage.upload.target import Target

ELSEWHERE = Owner("run 7 on another node", "11111111-2222-3333-4444-555555555555 1", "77")


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for long."""
    monkeypatch.setattr(owner, "OLD_S", 1.0)
    monkeypatch.setattr(owner, "_LOOK_S", 0.01)


def left(target: Path, data: bytes, age_s: float = 0.0) -> Path:
    """The file that an owner left."""
    path = target / OWNER
    path.write_bytes(data)
    os.utime(path, (time.time() - age_s, time.time() - age_s))
    return path


def takes(target: Path) -> str:
    """Becomes the owner, and is it no more; returns who is it, or nothing."""
    try:
        fd = take(os.fspath(target), "run 8 on this node")
    except Owned as error:
        return error.holder
    assert holder_of(os.fspath(target)) == "run 8 on this node"
    let_go(fd)
    assert OWNER not in os.listdir(target)
    return ""


def test_an_owner_on_another_node_that_renews_its_file_is_it(tmp_path: Path) -> None:
    path = left(tmp_path, ELSEWHERE.data())
    renewed = threading.Timer(0.4, os.utime, (path,))
    renewed.start()
    assert takes(tmp_path) == ELSEWHERE.holder
    renewed.join()
    assert path.read_bytes() == ELSEWHERE.data(), "it stays the other's"


def test_an_owner_on_another_node_that_ends_meanwhile_is_it_no_more(tmp_path: Path) -> None:
    ended = threading.Timer(0.4, left(tmp_path, ELSEWHERE.data()).unlink)
    ended.start()
    assert takes(tmp_path) == ""
    ended.join()


def test_a_file_that_another_node_has_just_made_is_its(tmp_path: Path) -> None:
    """Two starts within milliseconds: the other has made the file and not written to it yet."""
    path = left(tmp_path, b"")
    wrote = threading.Timer(0.4, path.write_bytes, (ELSEWHERE.data(),))
    renewed = threading.Timer(0.9, os.utime, (path,))
    wrote.start()
    renewed.start()
    assert takes(tmp_path) == ELSEWHERE.holder
    renewed.join()


@pytest.mark.parametrize("age_s", [0.0, 0.5, -20.0, 3600.0])
@pytest.mark.parametrize("data", [ELSEWHERE.data(), b"", b"of something else"])
def test_a_dead_owner_on_another_node_does_not_block(tmp_path: Path, data: bytes, age_s: float) -> None:
    left(tmp_path, data, age_s)
    assert takes(tmp_path) == ""


def test_an_old_file_is_nobodys_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owner, "OLD_S", 1e6)
    left(tmp_path, ELSEWHERE.data(), 2e6)
    assert takes(tmp_path) == ""


def test_a_hard_link_in_the_place_of_the_file_is_not_written_to(tmp_path: Path) -> None:
    """Others may write to DIR, and have linked a file of this user there."""
    own = tmp_path / "own"
    own.write_text("precious")
    os.link(own, tmp_path / OWNER)
    assert takes(tmp_path) == ""
    assert own.read_text() == "precious"


@contextmanager
def process(target: Path) -> Iterator[psutil.Process]:
    """A process that owns DIR and does nothing more."""
    ready, out = os.pipe()
    pid = os.fork()
    if not pid:
        with suppress(BaseException):
            take(os.fspath(target), ELSEWHERE.holder)
            os.write(out, b".")
            signal.pause()
        os._exit(1)
    os.close(out)
    try:
        assert os.read(ready, 1) == b"."
        yield psutil.Process(pid)
    finally:
        os.close(ready)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


@pytest.mark.parametrize("is_renewed", [True, False])
def test_a_process_of_this_node_is_the_owner_as_long_as_it_lives(tmp_path: Path, is_renewed: bool) -> None:
    with process(tmp_path) as other:
        (renewing,) = other.children()
        if not is_renewed:
            renewing.kill()
            wait_for(lambda: renewing.status() == psutil.STATUS_ZOMBIE)
        assert takes(tmp_path) == ELSEWHERE.holder
    wait_for(lambda: takes(tmp_path) == "", what="the end of all that had the socket")


def test_a_killed_process_leaves_nothing_to_other_nodes(tmp_path: Path) -> None:
    with process(tmp_path):
        pass
    wait_for(lambda: not os.listdir(tmp_path))


def test_who_inherits_the_socket_is_the_owner_too(tmp_path: Path) -> None:
    """As the daemon is after the wrapper was killed."""
    ready, out = os.pipe()
    pid = os.fork()
    if not pid:
        with suppress(BaseException):
            take(os.fspath(tmp_path), ELSEWHERE.holder)
            if heir := os.fork():
                os.write(out, b"%d" % heir)
            signal.pause()
        os._exit(1)
    heir = int(os.read(ready, 100))
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    assert takes(tmp_path) == ELSEWHERE.holder
    os.kill(heir, signal.SIGKILL)
    wait_for(lambda: not os.listdir(tmp_path), what="the removal")
    os.close(ready)
    os.close(out)


def test_the_file_is_renewed_until_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owner, "RENEWED_S", 0.05)
    fd = take(os.fspath(tmp_path), "run 8 on this node")
    heir, path = os.dup(fd), tmp_path / OWNER
    monkeypatch.setattr(owner, "REMOVED_S", 0.1)
    renewing = psutil.Process(owner._held[fd].renewing)
    let_go(fd)
    os.utime(path, (0, 0))
    wait_for(lambda: path.stat().st_mtime > time.time() - 60, what="a renewed file")
    os.close(heir)
    renewing.wait(300)
    assert not path.exists()


def test_the_file_is_removed_though_who_renewed_it_was_killed(tmp_path: Path) -> None:
    fd = take(os.fspath(tmp_path), "run 8 on this node")
    renewing = psutil.Process(owner._held[fd].renewing)
    renewing.kill()
    wait_for(lambda: renewing.status() == psutil.STATUS_ZOMBIE)
    let_go(fd)
    assert os.listdir(tmp_path) == []


def test_who_reads_another_owner_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hpcstage.upload.target.OWNER_S", 0.0)
    run = Run("8", os.fspath(tmp_path), tmp_path.stat().st_ino, 0, "this node")
    (tmp_path / "file").touch()
    fd = take(os.fspath(tmp_path), "run 8 on this node")
    Target(run).check()
    left(tmp_path, ELSEWHERE.data())
    for change in (
        lambda target: target.check(),
        lambda target: target.remove("file"),
        lambda target: target.give_free("file", "other", 1),
        lambda target: target.take_over("file", "other", 1),
    ):
        with pytest.raises(OSError, match="it is in use by run 7 on another node"):
            change(Target(run))
    Target(run, "7").check()
    assert (tmp_path / "file").exists()
    let_go(fd)
    assert holder_of(os.fspath(tmp_path)) == ELSEWHERE.holder, "it is not removed by others"


# ---- any order of any steps

STEPS = frozenset({"open", "write", "close", "rename", "unlink", "pread"})


class _Gate:
    """Stands for `os` in a contender, which waits before each step until it may go on."""

    def __init__(self, told: int, may: int) -> None:
        self._pid, self._told, self._may = os.getpid(), told, may

    def __getattr__(self, name: str) -> object:
        if name in STEPS and os.getpid() == self._pid:
            os.write(self._told, b"s")
            assert os.read(self._may, 1)
        return getattr(os, name)


class Contender:
    """A process that wants to become the owner, each on a node of its own or all on one."""

    def __init__(self, target: str, number: int, *, is_alone: bool) -> None:
        self.holder = f"run {number} on node {number}"
        self._told, told = os.pipe()
        may, self._may = os.pipe()
        self.pid = os.fork()
        if not self.pid:
            with suppress(BaseException):
                if is_alone:
                    owner._where = lambda: f"node {number}"
                owner.os = _Gate(told, may)  # type: ignore[assignment]
                try:
                    take(target, self.holder)
                except Owned:
                    os.write(told, b"r")
                else:
                    os.write(told, b"t")
                signal.pause()
            os._exit(1)
        os.close(told)
        os.close(may)
        self.state = "s"
        """s: before a step; t: it took DIR; r: it was refused; k: it was killed."""
        self._hear()

    def _hear(self) -> None:
        self.state = os.read(self._told, 1).decode() or "k"

    def step(self) -> None:
        if self.state == "s":
            os.write(self._may, b".")
            if select.select([self._told], [], [], 5.0)[0]:
                self._hear()

    def kill(self, *, with_children: bool) -> None:
        if self.state == "k":
            return
        family = psutil.Process(self.pid).children() if with_children else []
        os.kill(self.pid, signal.SIGSTOP)
        for one in family:
            one.kill()
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        self.state = "k"

    def close(self) -> None:
        self.kill(with_children=True)
        os.close(self._told)
        os.close(self._may)


@contextmanager
def contending(
    count: int, dead: bytes | None, *, is_alone: bool, old_s: float
) -> Iterator[tuple[str, list[Contender]]]:
    """Begins contenders for DIR, which a dead owner has left; nobody has it for long when they are dead."""
    with tempfile.TemporaryDirectory() as target, pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, "OLD_S", old_s)
        patch.setattr(owner, "RENEWED_S", RENEWED_S)
        if dead is not None:
            left(Path(target), dead, 100.0)
        contenders = [Contender(target, number, is_alone=is_alone) for number in range(count)]
        try:
            yield target, contenders
        finally:
            for one in contenders:
                one.close()
        deadline = time.monotonic() + old_s + 5.0
        while takes(Path(target)):
            assert time.monotonic() < deadline, "DIR stays locked"


def finish(contender: Contender) -> str:
    """Lets a contender go on to its end."""
    wait_for(lambda: [contender.step()] != [] and contender.state != "s")
    return contender.state


DEAD = [None, b"", ELSEWHERE.data()]
RENEWED_S = 0.02


@pytest.mark.parametrize("dead", DEAD)
@pytest.mark.parametrize("is_killed", [False, True])
def test_whoever_stands_still_or_dies_at_any_step_another_is_the_owner(dead: bytes | None, is_killed: bool) -> None:
    step, state = 0, "s"
    while state == "s":
        with contending(2, dead, is_alone=False, old_s=0.3) as (target, (first, second)):
            for _ in range(step):
                first.step()
            state = first.state
            if is_killed:
                first.kill(with_children=True)
            other = finish(second)
            if not is_killed:
                assert [finish(first), other].count("t") == 1, step
            assert other == "t" or (state != "s" and not is_killed) or first.state == "t", step
            assert holder_of(target) == (second if other == "t" else first).holder, step
        step += 1
    assert step > 3


def test_who_was_taken_for_dead_while_it_made_its_claim_sees_the_owner() -> None:
    for step in range(20):
        with contending(2, ELSEWHERE.data(), is_alone=True, old_s=0.1) as (target, (first, second)):
            for _ in range(step):
                first.step()
            if first.state != "s":
                break
            assert finish(second) == "t", step
            finish(first)
            time.sleep(2 * RENEWED_S)
            owners = [one.holder for one in (first, second) if one.state == "t"]
            assert holder_of(target) in owners, step


moves = st.lists(st.tuples(st.integers(0, 2), st.sampled_from(["step"] * 8 + ["kill", "all", "wait"])), max_size=50)


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(moves=moves, is_alone=st.booleans(), dead=st.sampled_from(DEAD))
def test_there_is_one_owner_whatever_the_order(
    moves: list[tuple[int, str]], is_alone: bool, dead: bytes | None
) -> None:
    can_be_taken_for_dead = is_alone or any(move == "wait" for _, move in moves)
    old_s = 0.15 if can_be_taken_for_dead else 2.0
    with contending(3, dead, is_alone=is_alone, old_s=old_s) as (target, contenders):
        for number, move in moves:
            one = contenders[number]
            if move == "step":
                one.step()
            elif move == "wait":
                time.sleep(0.2)
            else:
                one.kill(with_children=move == "all")
        for one in contenders:
            finish(one)
        time.sleep(2 * RENEWED_S)
        owners = [one.holder for one in contenders if one.state == "t"]
        assert not owners or holder_of(target) in owners, "all others read that they are it no more"
        assert can_be_taken_for_dead or len(owners) <= 1
