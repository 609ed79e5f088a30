"""Which entries of a directory are complete: renamed to their names, or closed and quiet."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import select
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("xxhash", reason="needs the extra `checkpoint`")
pytest.importorskip("numpy", reason="needs the extra `checkpoint`")

from hpcstage.checkpoint.entries import CompleteEntries
from hpcstage.checkpoint.generations.state import FileTree
from hpcstage.checkpoint.generations.store import GenerationStore

QUIET_S = 2.0


class Watched:
    """A directory whose clock the test moves."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.now = 100.0
        self.entries = CompleteEntries(directory, self.now, QUIET_S)

    def names(self, after_s: float = 0.1) -> tuple[str, ...]:
        """The complete entries so much later; looked at as a loop does, each time there is something to do."""
        end = self.now + after_s
        while True:
            if select.select([self.entries.fd], [], [], 0)[0]:
                self.entries.look(self.now)
            wait_s = self.entries.wake_after(self.now)
            if wait_s is None or self.now + wait_s > end:
                break
            self.now += wait_s
            self.entries.look(self.now)
        self.now = end
        return self.entries.names()


@pytest.fixture
def watched(local_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Watched]:
    monkeypatch.setattr("hpcstage.checkpoint.entries.time", SimpleNamespace(monotonic=lambda: 0.0))  # looks take none
    (local_dir / "checkpoints").mkdir()
    made = Watched(local_dir / "checkpoints")
    yield made
    made.entries.close()


def test_what_was_renamed_is_complete_at_once(watched: Watched, local_dir: Path) -> None:
    (watched.directory / "tmp").write_bytes(b"x")
    assert watched.names() == ()
    (watched.directory / "tmp").rename(watched.directory / "step_1.pt")
    assert watched.names() == ("step_1.pt",)
    (local_dir / "made-elsewhere").mkdir()
    (local_dir / "made-elsewhere" / "rank0").write_bytes(b"x")
    (local_dir / "made-elsewhere").rename(watched.directory / "step_2")
    assert watched.names() == ("step_1.pt", "step_2")


def test_what_was_closed_is_complete_after_a_quiet_time(watched: Watched) -> None:
    with open(watched.directory / "a", "wb") as file:
        file.write(b"x")
        file.flush()
        assert watched.names(10 * QUIET_S) == (), "open, however long"
    assert watched.names(0.1) == (), "its writer may have been killed a moment ago"
    assert watched.names(QUIET_S) == ("a",)
    (watched.directory / "b").write_bytes(b"x")
    assert watched.names(QUIET_S - 0.1) == ("a",)
    assert watched.names(0.7) == ("a", "b")


def test_a_directory_is_complete_when_all_of_it_is(watched: Watched) -> None:
    below = watched.directory / "step_1"
    (below / "shards").mkdir(parents=True)
    (below / "shards" / "rank0").write_bytes(b"x")
    with open(below / "shards" / "rank1", "wb"):
        assert watched.names(5 * QUIET_S) == ()
    assert watched.names(QUIET_S) == ("step_1",)
    for write in range(5):
        (below / "shards" / f"more{write}").write_bytes(b"x")
        assert watched.names(QUIET_S / 2) == (), "each change begins the quiet time anew"
    assert watched.names(QUIET_S) == ("step_1",)


def test_a_file_that_is_mapped_for_writing_is_not_complete(watched: Watched) -> None:
    path = watched.directory / "a"
    path.write_bytes(bytes(mmap.PAGESIZE))
    with open(path, "r+b") as file:
        mapped = mmap.mmap(file.fileno(), 0)
    assert watched.names(5 * QUIET_S) == ()
    mapped.close()
    assert watched.names(QUIET_S + 0.5) == ("a",)


def test_an_entry_that_was_renamed_and_is_written_to_is_not_complete(watched: Watched) -> None:
    with open(watched.directory / "tmp", "wb") as file:
        (watched.directory / "tmp").rename(watched.directory / "last")
        assert watched.names(QUIET_S) == ()
        file.write(b"x")
    assert watched.names(QUIET_S / 2) == ()
    assert watched.names(QUIET_S) == ("last",)
    (watched.directory / "other").write_bytes(b"new")
    (watched.directory / "other").rename(watched.directory / "last")
    assert watched.names() == ("last",)
    (watched.directory / "last").write_bytes(b"in place")
    assert watched.names() == ()
    assert watched.names(QUIET_S + 0.5) == ("last",)


def test_a_reader_does_not_keep_an_entry_from_being_complete(watched: Watched) -> None:
    (watched.directory / "a").write_bytes(b"x")
    with open(watched.directory / "a", "rb"):
        assert watched.names(QUIET_S + 0.5) == ("a",)


def test_what_goes_is_no_more_complete(watched: Watched) -> None:
    (watched.directory / "a").write_bytes(b"x")
    (watched.directory / "b").mkdir()
    (watched.directory / "link").symlink_to("a")
    assert watched.names(QUIET_S + 0.5) == ("a", "b", "link")
    (watched.directory / "a").unlink()
    assert watched.names() == ("b", "link")
    shutil.rmtree(watched.directory)
    assert watched.names() == ()
    assert watched.entries.is_gone
    assert watched.entries.wake_after(watched.now) is None


def test_what_cannot_be_listed_for_a_moment_is_not_gone(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    (watched.directory / "a").write_bytes(b"x")
    assert watched.names(QUIET_S + 0.5) == ("a",)
    revision = watched.entries.revision

    def refused(_: str) -> list[str]:
        raise OSError(errno.EMFILE, "too many open files")

    with monkeypatch.context() as patched:
        patched.setattr("hpcstage.checkpoint.entries.os.listdir", refused)
        assert watched.names(5 * QUIET_S) == ("a",)
    assert watched.names(QUIET_S) == ("a",)
    assert watched.entries.revision == revision


def test_a_revision_tells_whether_there_is_something_to_save(watched: Watched) -> None:
    assert watched.entries.revision == 0
    (watched.directory / "a").write_bytes(b"x")
    watched.names()
    assert watched.entries.revision == 0
    watched.names(QUIET_S + 0.5)
    first = watched.entries.revision
    assert first > 0
    watched.names(10 * QUIET_S)
    assert watched.entries.revision == first
    (watched.directory / "a").write_bytes(b"xy")
    watched.names(QUIET_S + 0.5)
    assert watched.entries.revision > first


def test_what_is_there_at_the_start_and_what_is_being_made(local_dir: Path) -> None:
    (local_dir / "a").write_bytes(b"x")
    (local_dir / ".hpcstage-making-0123456789ab").mkdir()
    (local_dir / ".step_100.pt").write_bytes(b"half")
    watched = Watched(local_dir)
    assert watched.names(QUIET_S) == ("a",)
    watched.entries.close()


def test_many_entries_are_looked_at_seldom(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    """At most a fiftieth of the time goes into looking."""
    times = iter(range(0, 1000, 2))
    monkeypatch.setattr("hpcstage.checkpoint.entries.time.monotonic", lambda: next(times))
    watched.entries.look(watched.now)
    (watched.directory / "a").write_bytes(b"x")
    watched.entries.look(watched.now)
    assert watched.entries.wake_after(watched.now) == pytest.approx(100.0)


def test_the_signal_of_a_lease_ends_nobody(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program opens a file while it is asked who writes to it: the kernel signals to who has the lease."""
    (watched.directory / "a").write_bytes(b"x")
    opened = []

    def ask(fd: int, command: int, argument: int) -> int:
        answer = fcntl.fcntl(fd, command, argument)
        if (command, argument) == (fcntl.F_SETLEASE, fcntl.F_RDLCK):
            with pytest.raises(BlockingIOError):
                os.open(watched.directory / "a", os.O_WRONLY | os.O_NONBLOCK)
            opened.append(fd)
        return answer

    monkeypatch.setattr("hpcstage.leases.fcntl", SimpleNamespace(**{**vars(fcntl), "fcntl": ask}))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of threads that numpy keeps: the child uses none
        pid = os.fork()
    if pid == 0:
        done = False
        try:
            done = watched.names(QUIET_S + 0.5) == ("a",) and len(opened) == 1
        finally:
            os._exit(0 if done else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_a_generation_is_all_that_is_complete(watched: Watched, local_dir: Path) -> None:
    (watched.directory / "step_1.pt").write_bytes(b"x" * 100)
    assert watched.names(QUIET_S + 0.5) == ("step_1.pt",)
    with open(watched.directory / "step_2.pt", "wb") as file, GenerationStore(local_dir / "store") as store:
        file.write(b"half")
        file.flush()
        saved = store.commit(FileTree(watched.directory, watched.names(QUIET_S + 0.5)))
    assert [entry.name for entry in saved.manifest.entries] == ["step_1.pt"]
