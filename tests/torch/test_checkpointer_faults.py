"""Checkpointer where something fails: Ctrl-C, no thread, a full disk, no right to remove, CUDA's registration."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import FrameType
from typing import Any

import psutil
import pytest
from conftest import wait_for

pytest.importorskip("torch")
pytest.importorskip("xxhash", reason="needs the extra `checkpoint`")

import torch
from savednames import names

import hpcstage.torch.checkpoints.checkpointer as room
import hpcstage.torch.checkpoints.entrynames as naming
from hpcstage.checkpoint.generations.files import LOCK, Files
from hpcstage.torch import Checkpointer
from hpcstage.torch.checkpoints import entry
from hpcstage.torch.checkpoints.checkpointer import DirectoryInUse
from hpcstage.torch.checkpoints.entry import DamagedEntry, check_entry
from hpcstage.torch.checkpoints.entrynames import claimed
from hpcstage.torch.checkpoints.hostmemory import HostMemory
from hpcstage.torch.checkpoints.saving import CheckpointNotSaved

pytestmark = pytest.mark.torch


def state(value: float) -> dict[str, torch.Tensor]:
    return {"a": torch.full((100_000,), value)}


def values(directory: Path) -> dict[int, float]:
    """What each checkpoint holds."""
    found = {}
    for path in (directory / name for name in names(directory)):
        loaded = Checkpointer(directory)._saver.load(path, torch.device("cpu"))
        assert loaded.state["a"].eq(loaded.state["a"][0]).all()
        found[loaded.step] = float(loaded.state["a"][0])
    return found


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Keeps all writing until it is set."""
    go, write = threading.Event(), os.pwrite

    def waiting(fd: int, data: Any, offset: int) -> int:
        go.wait()
        return write(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", waiting)
    yield go
    go.set()


@contextlib.contextmanager
def full_disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        yield


def interrupted(work: Callable[[], object]) -> None:
    """Does something, and presses Ctrl-C when it waits for the thread."""
    main = threading.main_thread().ident
    assert main == threading.get_ident()

    def waits() -> bool:
        frame: FrameType | None = sys._current_frames()[main]
        assert frame is not None
        found = [frame.f_code.co_filename]
        while frame := frame.f_back:
            found.append(frame.f_code.co_filename)
        return found[0] == threading.__file__ and room.__file__ in found

    def press() -> None:
        wait_for(waits, what="the program to wait")
        signal.pthread_kill(main, signal.SIGINT)

    thread = threading.Thread(target=press)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        work()
    thread.join()


def test_ctrl_c_while_a_save_waits(tmp_path: Path, held: threading.Event) -> None:
    checkpointer = Checkpointer(tmp_path, keep=None)
    checkpointer.save(state(1), 1)
    interrupted(lambda: checkpointer.save(state(2), 2))
    assert checkpointer._saver.busy
    threading.Timer(0.05, held.set).start()
    checkpointer.save(state(3), 3)
    checkpointer.close()
    assert values(tmp_path) == {1: 1.0, 3: 3.0}


def test_ctrl_c_while_it_closes(tmp_path: Path, held: threading.Event) -> None:
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(state(1), 1)
    interrupted(checkpointer.close)
    with pytest.raises(DirectoryInUse):
        Checkpointer(tmp_path).save(state(2), 2)
    held.set()
    checkpointer.close()
    assert values(tmp_path) == {1: 1.0}
    with Checkpointer(tmp_path) as other:
        other.save(state(2), 2)


def test_it_has_its_name_before_it_was_read_back_and_what_is_older_goes_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go, read = threading.Event(), os.preadv

    def waiting(*arguments: Any) -> int:
        go.wait()
        return read(*arguments)

    with Checkpointer(tmp_path, keep=1) as checkpointer:
        checkpointer.save(state(1), 1)
        checkpointer.wait()
        with monkeypatch.context() as patch:
            patch.setattr(os, "preadv", waiting)
            try:
                checkpointer.save(state(2), 2)
                wait_for((tmp_path / "step-00000002").exists, what="the name of the new one")
                assert names(tmp_path) == ["step-00000001", "step-00000002"]
            finally:
                go.set()
            checkpointer.wait()
    assert values(tmp_path) == {2: 2.0}


@pytest.mark.parametrize("exchanges", [True, False])
@pytest.mark.parametrize("step", [1, 2], ids=["the same again", "a new one"])
def test_what_comes_back_with_other_bytes_loses_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int, exchanges: bool
) -> None:
    write = os.pwrite

    def flips(fd: int, data: Any, offset: int) -> int:
        content = mmap.mmap(-1, len(data))  # of whole pages, as a write past the page cache needs them
        content[:] = bytes(data)
        if os.readlink(f"/proc/self/fd/{fd}").endswith("/tensors"):
            content[5] ^= 1
        return write(fd, memoryview(content), offset)

    def refused(*_: object) -> None:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    checkpointer = Checkpointer(tmp_path, keep=1)
    checkpointer.save(state(1), 1)
    checkpointer.wait()
    with monkeypatch.context() as patch:
        if not exchanges:
            patch.setattr(naming, "exchange_names", refused)
        patch.setattr(os, "pwrite", flips)
        checkpointer.save(state(2), step)
        with pytest.raises(CheckpointNotSaved) as caught:
            checkpointer.close()
    assert f"step-{step:08} was not saved: its tensor a differs from its checksum" in caught.value.line()
    assert names(tmp_path) == ["step-00000001"]
    assert values(tmp_path) == {1: 1.0}


def test_what_took_the_place_of_a_file_and_is_damaged_gives_it_back(tmp_path: Path) -> None:
    (tmp_path / "last.ckpt").write_bytes(b"of another saver")
    (tmp_path / "new").mkdir()
    replaced = naming.give_name(Files(), tmp_path / "new", tmp_path / "last.ckpt")
    with pytest.raises(DamagedEntry):
        check_entry(Files(), tmp_path / "last.ckpt", replaced)
    assert names(tmp_path) == ["last.ckpt"]
    assert (tmp_path / "last.ckpt").read_bytes() == b"of another saver"


def test_without_another_thread_it_is_written_at_once(tmp_path: Path) -> None:
    before = threading.stack_size(1 << 47)  # more than there is: no thread can be started
    try:
        with Checkpointer(tmp_path) as checkpointer:
            checkpointer.save(state(1), 1)
            assert values(tmp_path) == {1: 1.0}
            threading.stack_size(before)
            checkpointer.save(state(2), 2)
    finally:
        threading.stack_size(before)
    assert values(tmp_path) == {1: 1.0, 2: 2.0}


def test_ctrl_c_before_the_thread_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[threading.Thread] = []

    def start(thread: threading.Thread) -> None:
        started.append(thread)
        raise KeyboardInterrupt

    with Checkpointer(tmp_path) as checkpointer:
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", start)
            with pytest.raises(KeyboardInterrupt):
                checkpointer.save(state(1), 1)
        assert not checkpointer._saver.busy
        checkpointer.save(state(2), 2)
        started[0].run()
    assert values(tmp_path) == {2: 2.0}, "a thread that begins late does nothing"


def test_a_save_that_failed_is_tried_again_at_once_but_not_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    raised: list[int] = []
    with Checkpointer(tmp_path, every=100) as checkpointer:
        with full_disk(monkeypatch):
            for step in range(98, 110):
                try:
                    checkpointer.save(state(step), step)
                except CheckpointNotSaved:
                    raised.append(step)
                wait_for(lambda: not checkpointer._saver.busy, what="the end of the writing")
        assert raised == [101, 102], "saved at 100 and 101, and each failure raised by the next call"
        for step in range(110, 202):
            checkpointer.save(state(step), step)
    assert values(tmp_path) == {200: 200.0}


def test_a_failure_is_raised_by_the_next_call_however_soon_it_comes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_thread(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    checkpointer = Checkpointer(tmp_path)
    with full_disk(monkeypatch), monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", no_thread)  # it is written before `save` returns
        assert checkpointer.save(state(1), 1)
    with pytest.raises(CheckpointNotSaved, match="step-00000001"):
        checkpointer.save(state(2), 2)
    checkpointer.close()
    assert values(tmp_path) == {2: 2.0}


def test_a_load_raises_nothing_of_a_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(state(1), 1)
    checkpointer.wait()
    with full_disk(monkeypatch):
        checkpointer.save(state(2), 2)
        assert checkpointer.load().step == 1
    with pytest.raises(CheckpointNotSaved):
        checkpointer.close()
    checkpointer.close()


def test_older_ones_that_cannot_be_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    remove = room.remove_entry

    def refused(files: Any, path: Path) -> None:
        if path.name == "step-00000001":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), os.fspath(path))
        remove(files, path)

    monkeypatch.setattr(room, "remove_entry", refused)
    with Checkpointer(tmp_path, keep=1) as checkpointer:
        for step in (1, 2, 3):
            checkpointer.save(state(step), step)
    assert values(tmp_path) == {1: 1.0, 3: 3.0}, "the others go, and nothing is raised"
    lines = capfd.readouterr().err
    assert "not saved" not in lines
    assert lines.count("step-00000003 is saved, and older checkpoints could not be removed: [Errno 13]") == 1


def test_a_directory_that_is_named_by_a_link(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "link").symlink_to("there")
    with Checkpointer(tmp_path / "link", keep=1) as checkpointer:
        for step in (1, 2):
            checkpointer.save(state(step), step)
    assert values(tmp_path / "there") == {2: 2.0}


def test_only_a_process_that_saves_keeps_the_memory(tmp_path: Path) -> None:
    with Checkpointer(tmp_path) as saving:
        saving.save(state(1), 1)
        assert saving.load().step == 1
        assert saving._saver._memory.is_taken
    loading = Checkpointer(tmp_path)
    assert loading.load().state["a"].eq(1).all()
    assert not loading._saver._memory.is_taken


def in_a_child(work: Callable[[], bool]) -> int:
    """The exit code of a forked process: 0 if the work returned True."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        try:
            os._exit(0 if work() else 3)
        finally:
            os._exit(4)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_a_forked_process_claims_nothing(tmp_path: Path) -> None:
    end, go = os.pipe()

    def waits() -> bool:
        os.close(go)
        return os.read(end, 1) == b""

    with ThreadPoolExecutor(1) as pool:
        with claimed(tmp_path, "tensors"):
            before = len(psutil.Process().children())
            child = pool.submit(in_a_child, waits)
            wait_for(lambda: len(psutil.Process().children()) > before, what="the child")
            with pytest.raises(BlockingIOError), claimed(tmp_path, "tensors"):
                pass
        try:
            wait_for(lambda: not is_claimed(tmp_path), what="the end of the claim")
            assert not child.done()
        finally:
            os.close(go)
            os.close(end)
        assert child.result() == 0


def is_claimed(path: Path) -> bool:
    try:
        with claimed(path, "tensors"):
            return False
    except BlockingIOError:
        return True


def locks_held(directory: Path) -> list[Path]:
    """What is locked below a directory, by the kernel's list."""
    inodes = {
        line.split()[-3].split(":")[2] for line in Path("/proc/locks").read_text().splitlines() if "->" not in line
    }
    return [path for path in [directory, *directory.rglob("*")] if str(path.stat().st_ino) in inodes]


def test_locks_are_of_files_and_nothing_is_open_below_what_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lock of a directory is one of a single node on NFS, which also removes no directory of which a file is
    open."""
    locked, open_below = [], []

    def discard(files: Files, path: Path, first: str) -> None:
        links = [os.readlink(fd) for fd in Path("/proc/self/fd").iterdir() if fd.is_symlink()]
        open_below.extend(link for link in links if link.startswith(f"{path}/"))
        naming.discard(files, path, first)

    def give_name(files: Files, temporary: Path, path: Path) -> Path | None:
        locked.extend(locks_held(tmp_path))
        return naming.give_name(files, temporary, path)

    monkeypatch.setattr(entry, "discard", discard)
    monkeypatch.setattr(entry, "give_name", give_name)
    (tmp_path / ".step-00000001.aaaaaaaaaaaa").mkdir()
    with Checkpointer(tmp_path) as checkpointer:
        for value in (1, 2):
            checkpointer.save(state(value), 1)
    assert {path.name for path in locked} == {LOCK, "tensors"}
    assert open_below == []
    assert names(tmp_path) == ["step-00000001"]


def test_a_forked_process_has_zeros_in_place_of_the_memory() -> None:
    memory = HostMemory()
    memory.keep([torch.full((5000,), 7, dtype=torch.uint8)])
    assert in_a_child(lambda: bytes(memory.image[:5000]) == bytes(5000)) == 0
    assert bytes(memory.image[:5000]) == b"\7" * 5000


class Cudart:
    """Stands for CUDA, which no machine of the tests has."""

    def __init__(self, code: int) -> None:
        self.code = code
        self.calls: list[tuple[str, int]] = []

    def cudaHostRegister(self, address: int, size_bytes: int, flags: int) -> int:
        self.calls.append(("register", address))
        return self.code

    def cudaHostUnregister(self, address: int) -> int:
        self.calls.append(("unregister", address))
        return 0


@pytest.fixture
def cudart(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Cudart:
    made = Cudart(getattr(request, "param", 0))
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: made)
    return made


@pytest.mark.parametrize("released", [True, False])
def test_memory_is_unregistered_once(cudart: Cudart, released: bool) -> None:
    memory = HostMemory()
    memory.keep([torch.ones(5000)])
    memory.keep([torch.ones(5000)])
    if released:
        memory.release()
    del memory
    ((first, address), (second, again)) = cudart.calls
    assert (first, second) == ("register", "unregister")
    assert address == again


def test_a_forked_process_leaves_cuda_alone(cudart: Cudart) -> None:
    memory = HostMemory()
    memory.keep([torch.ones(5000)])

    def released() -> bool:
        memory.release()
        return len(cudart.calls) == 1

    assert in_a_child(released) == 0
    memory.release()
    assert len(cudart.calls) == 2


@pytest.mark.parametrize("cudart", [712], indirect=True)
def test_memory_that_cuda_refuses_is_used_as_it_is(cudart: Cudart) -> None:
    memory = HostMemory()
    for value in (1.0, 2.0):
        memory.keep([torch.full((5000,), value)])
    assert memory.place(0).eq(2).all()
    memory.release()
    assert [call for call, _ in cudart.calls] == ["register"]
