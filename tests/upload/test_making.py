"""Entries that get their names in DIR: killed before any step, where links or replies are missing, among others'."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from killsteps import killed_before
from sharedos import LOST, SharedOs

from hpcstage.owner import OWNER, Owner
from hpcstage.upload import making, target
from hpcstage.upload.facts import Run
from hpcstage.upload.making import Making, remove_tree, sweep
from hpcstage.upload.target import Target

KINDS = pytest.mark.parametrize(
    ("was_directory", "is_directory"), [(False, False), (True, True), (True, False), (False, True)]
)


def make(path: Path, content: str, *, is_directory: bool) -> None:
    if is_directory:
        path.mkdir()
        path = path / "shard"
    path.write_text(content)


def content_of(path: Path) -> str:
    return (path / "shard" if path.is_dir() else path).read_text()


def target_of(directory: Path, run_id: str = "run") -> Target:
    return Target(Run(run_id, os.fspath(directory), directory.stat().st_ino, 0, "host"))


def replace_last(directory: Path, *, is_directory: bool) -> None:
    """Makes two entries, of which one replaces another, and removes a third."""
    with Making(target_of(directory)) as made:
        make(made.path / "last", "new", is_directory=is_directory)
        make(made.path / "step", "step", is_directory=is_directory)
        assert made.give("step", ["step"]) == "step"
        assert made.give("last", ["last"], lambda _: True) == "last"
        made.remove("old")


def put_there(directory: Path, *, was_directory: bool) -> None:
    for name in ("last", "old"):
        make(directory / name, "old", is_directory=was_directory)


@KINDS
def test_killed_before_any_step_one_of_the_two_has_the_name(
    tmp_path: Path, was_directory: bool, is_directory: bool
) -> None:
    seen = set()
    for step in range(1000):
        directory = tmp_path / f"{step}"
        directory.mkdir()
        put_there(directory, was_directory=was_directory)
        is_killed = killed_before(step, lambda d=directory: replace_last(d, is_directory=is_directory))
        if not (was_directory or is_directory):
            assert content_of(directory / "last") in {"old", "new"}, "at any moment"
        sweep(target_of(directory, "next"))
        assert set(os.listdir(directory)) <= {"last", "old", "step"}
        seen.add(content_of(directory / "last"))
        if not is_killed:
            break
        replace_last_again(directory, is_directory=is_directory)
    assert seen == {"old", "new"}
    assert sorted(os.listdir(directory)) == ["last", "step"]


def replace_last_again(directory: Path, *, is_directory: bool) -> None:
    """What a late drain does."""
    remove_tree(directory / "step")
    replace_last(directory, is_directory=is_directory)
    assert sorted(os.listdir(directory)) == ["last", "step"]
    assert content_of(directory / "last") == "new"


@KINDS
@pytest.mark.parametrize("has_links", [True, False])
def test_a_lost_reply_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, was_directory: bool, is_directory: bool, has_links: bool
) -> None:
    for lost in range(100):
        calls: list[str] = []

        def failing(name: str, lost: int = lost, calls: list[str] = calls) -> int:
            if name == "link" and not has_links:
                return errno.EPERM
            if name not in {"link", "rename", "unlink"}:
                return 0
            calls.append(name)
            return LOST[name] if len(calls) == lost else 0

        directory = tmp_path / f"{lost}"
        directory.mkdir()
        put_there(directory, was_directory=was_directory)
        for module in (making, target):
            monkeypatch.setattr(module, "os", SharedOs(os.fspath(directory), failing))
        replace_last(directory, is_directory=is_directory)
        monkeypatch.undo()
        assert sorted(os.listdir(directory)) == ["last", "step"], (lost, calls)
        assert content_of(directory / "last") == "new"
        if len(calls) < lost:
            break


def test_what_cannot_get_its_name_leaves_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_there(tmp_path, was_directory=True)
    count = iter(range(1 << 30))

    def failing(name: str) -> int:  # the new one fails, after the old one stepped aside
        return errno.EIO if name == "rename" and next(count) == 2 else 0

    monkeypatch.setattr(target, "os", SharedOs(os.fspath(tmp_path), failing))
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        replace_last(tmp_path, is_directory=True)
    assert sorted(os.listdir(tmp_path)) == ["last", "old", "step"]
    assert content_of(tmp_path / "last") == "old"


def test_the_first_place_that_is_free_or_may_be_replaced(tmp_path: Path) -> None:
    for name in ("a", "a.run"):
        (tmp_path / name).write_text("of others")
    with Making(target_of(tmp_path)) as made:
        for name in ("a", "b", "c"):
            (made.path / name).write_text("ours")
        assert made.give("a", ["a", "a.run", "a.run.1"], lambda place: place == "a.run") == "a.run"
        assert made.give("b", ["a", "b"]) == "b"
        assert made.give("c", ["a"]) is None
    assert {name: (tmp_path / name).read_text() for name in os.listdir(tmp_path)} == {
        "a": "of others",
        "a.run": "ours",
        "b": "ours",
    }


def test_a_run_that_was_taken_for_dead_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(target, "OWNER_S", 0.0)
    put_there(tmp_path, was_directory=False)
    with Making(target_of(tmp_path)) as made:
        (made.path / "last").write_text("new")
        (tmp_path / OWNER).write_bytes(Owner("run 9 on host", "boot net", "12ab").data())
        with pytest.raises(OSError, match="in use by run 9 on host"):
            made.give("last", ["last"], lambda _: True)
    assert content_of(tmp_path / "last") == "old"
    with pytest.raises(OSError, match="in use by run 9 on host"), Making(target_of(tmp_path)):
        pass


def test_directories_that_the_program_made_unwritable_are_removed_and_what_links_lead_to_stays(tmp_path: Path) -> None:
    (tmp_path / "goal" / "below").mkdir(parents=True)
    (tmp_path / "goal").chmod(0o750)
    left = tmp_path / "left"
    (left / "a" / "b").mkdir(parents=True)
    (left / "a" / "b" / "file").touch()
    (left / "link").symlink_to(tmp_path / "goal")
    (left / "a" / "b").chmod(0)
    (left / "a").chmod(0o500)
    remove_tree(left)
    assert os.listdir(tmp_path) == ["goal"]
    assert (tmp_path / "goal").stat().st_mode & 0o777 == 0o750
