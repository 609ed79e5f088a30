"""An entry that takes the place of another where two names cannot be exchanged (NFS), killed at any step."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("xxhash", reason="needs the extra `checkpoint`")
pytest.importorskip("numpy", reason="needs the extra `checkpoint`")

from hpcstage.checkpoint.generations import restoring
from hpcstage.checkpoint.generations.files import LOCK
from hpcstage.checkpoint.generations.restoring import NEWEST_NS, making_in, place, remove_leftovers

RENAMES = 3


def refused(*_: object) -> None:
    raise OSError(errno.EINVAL, "Invalid argument")


def make(path: Path, content: str, *, is_directory: bool) -> None:
    if is_directory:
        path.mkdir()
        path = path / "shard"
    path.write_text(content)


def content_of(path: Path) -> str:
    return (path / "shard" if path.is_dir() else path).read_text()


def killed_at(number: int, work: Callable[[], object]) -> bool:
    """Works in a process that is killed before its so-manieth rename; tells whether it came to its end."""
    pid = os.fork()
    if not pid:
        real, left = os.rename, iter(range(number))

        def rename(*names: str | Path) -> None:
            if next(left, None) is None:
                os._exit(1)
            real(*names)

        os.rename = restoring.os.rename = rename  # type: ignore[assignment]
        restoring.exchange_names = restoring.rename_if_free = refused
        work()
        os._exit(0)
    return os.waitpid(pid, 0)[1] == 0


@pytest.mark.parametrize("number", range(RENAMES))
@pytest.mark.parametrize(("was_directory", "is_directory"), [(False, False), (True, True), (True, False)])
def test_one_of_the_two_has_the_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, was_directory: bool, is_directory: bool
) -> None:
    def take_over() -> None:
        with making_in(tmp_path) as made:
            make(made / "source", "new", is_directory=is_directory)
            place(made / "source", tmp_path / "last", NEWEST_NS)

    make(tmp_path / "last", "old", is_directory=was_directory)
    is_done = killed_at(number, take_over)
    if not was_directory:
        assert content_of(tmp_path / "last") == ("new" if is_done else "old"), "at any moment"
    monkeypatch.setattr(restoring, "rename_if_free", refused)
    remove_leftovers(tmp_path)
    assert os.listdir(tmp_path) == ["last"]
    assert content_of(tmp_path / "last") == ("new" if is_done else "old")


def test_the_lock_is_one_of_a_file_open_for_writing(tmp_path: Path) -> None:
    """NFS refuses an exclusive lock of what is open for reading, such as a directory."""
    with making_in(tmp_path) as made:
        assert remove_leftovers(tmp_path) == []
        with (made / LOCK).open("r+b") as file, pytest.raises(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        assert (made / LOCK).read_text() == f"{socket.gethostname()}\n"
        os.rename(made, tmp_path / ".hpcstage-restore-left")
    assert remove_leftovers(tmp_path) == [".hpcstage-restore-left"]


def test_nothing_is_open_below_what_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NFS removes no directory of which a file is open."""
    remove, open_below = restoring._remove, []

    def removed(directory: Path) -> None:
        links = [os.readlink(fd) for fd in Path("/proc/self/fd").iterdir() if fd.is_symlink()]
        open_below.extend(link for link in links if link.startswith(f"{directory}/"))
        remove(directory)

    monkeypatch.setattr(restoring, "_remove", removed)
    (tmp_path / ".hpcstage-restore-left").mkdir()
    with making_in(tmp_path):
        assert remove_leftovers(tmp_path) == [".hpcstage-restore-left"]
    assert open_below == []
    assert os.listdir(tmp_path) == []
