"""A watched directory and its target, on real file systems: what is written here is there, and nothing else goes."""
# ruff: noqa: F811  fixtures are imported

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from conftest import wait_for
from draining import Running, start, tree  # noqa: F401

from hpcstage.outputs import freeing, journal, ledger, marks, namequeue, outcomes, seen, watch
from hpcstage.outputs.late import drain_late
from hpcstage.outputs.prepare import CannotMirror, OutputPlace, prepare
from hpcstage.outputs.unseen import UNSEEN


@pytest.fixture(autouse=True)
def quick_removals(monkeypatch):
    monkeypatch.setattr(namequeue, "HOLD_S", 0.3)
    monkeypatch.setattr(marks, "RETRY_S", 0.05)


def test_files_directories_links_modes_and_times_come_over(start, tmp_path):
    running = start()
    out = running.out
    (out / "a").mkdir()
    (out / "a/empty").mkdir(mode=0o750)
    (out / "a/file").write_bytes(os.urandom(3_000_000))
    (out / "a/file").chmod(0o640)
    os.utime(out / "a/file", ns=(1_000_000_007, 2_000_000_009))
    (out / "relative").symlink_to("a/file")
    (out / "a/absolute").symlink_to(out / "a/file")
    (out / "elsewhere").symlink_to("/nowhere/at/all")
    os.link(out / "a/file", out / "hard")
    os.utime(out / "a/empty", ns=(5, 6))
    (out / "a").chmod(0o500)
    report = running.end()
    assert (report.undrained, report.unclosed) == ([], [])
    expected = tree(out, times=True)
    expected["a/absolute"] = (*expected["a/absolute"][:1], "file", *expected["a/absolute"][2:])
    assert tree(running.target, times=True) == expected
    (out / "a").chmod(0o700)
    (running.target / "a").chmod(0o700)


def test_closed_files_come_over_while_the_program_runs(start):
    running = start()
    (running.out / "new").write_text("content")
    running.until((running.target / "new").exists)
    assert (running.target / "new").read_text() == "content"


def test_a_log_grows_in_place_within_seconds(start, monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda _: None)  # takes as long as others write
    running = start()
    with (running.out / "log").open("w") as log:
        log.write("one\n")
        log.flush()
        running.until((running.target / "log").exists, 5)
        inode = (running.target / "log").stat().st_ino
        log.write("two\n")
        log.flush()
        running.until(lambda: (running.target / "log").read_text() == "one\ntwo\n", 5)
        assert (running.target / "log").stat().st_ino == inode
        assert running.stop().unclosed == ["log"]


def test_a_reader_of_what_was_written_and_closed_makes_it_no_open_file(start, monkeypatch):
    """The first look at the file comes while somebody reads it."""
    monkeypatch.setattr(watch, "LOOK_S", 0.05)
    running = start()
    (running.out / "file").write_text("all of it")
    with (running.out / "file").open():
        running.turn(0.0)
        (looked,) = running.drain._watch._open._files.values()
        running.until(lambda: looked.state not in {None, (0, 0, 0)})
    running.settle()
    assert running.end().unclosed == []


@pytest.mark.parametrize("is_read", [False, True])
def test_a_hard_link_whose_first_name_is_replaced_is_no_open_file(start, monkeypatch, is_read):
    monkeypatch.setattr(watch, "LOOK_S", 0.05)
    running = start()
    (running.out / "first").write_text("content")
    os.link(running.out / "first", running.out / "link")
    with contextlib.ExitStack() as stack:
        if is_read:
            stack.enter_context((running.out / "link").open())
        (running.out / "new").write_text("new")
        (running.out / "new").rename(running.out / "first")
        running.turn(0.0)
        looked = running.drain._watch._open._files["link"]
        running.until(lambda: looked.state not in {None, (0, 0, 0)})
        running.settle()
    assert running.end().unclosed == []


@pytest.mark.parametrize("is_closed", [False, True])
def test_a_late_drain_names_what_was_being_written_when_all_was_killed(start, is_closed):
    running = start()
    with (running.out / "log").open("w") as log:
        log.write("one\n")
        log.flush()
        running.until(lambda: running.drain.report().unclosed == ["log"])
        if is_closed:
            log.close()
            running.until(lambda: running.drain.report().unclosed == [])
        running.stop()
        report = drain_late(running.place, 60.0)
        assert report is not None
        assert report.unclosed == ([] if is_closed else ["log"])
        assert (running.target / "log").read_text() == "one\n"


def test_no_incomplete_file_takes_the_place_of_a_complete_one(start):
    running = start()
    best = running.target / "best"
    (running.out / "best").write_text("complete")
    with (running.out / "tmp").open("w") as file:
        file.write("half")
        file.flush()
        running.until((running.target / "tmp").exists)
        running.settle()
        file.write(" and half")
    (running.out / "tmp").rename(running.out / "best")
    seen = []
    running.until(lambda: seen.append(best.read_text()) or seen[-1] == "half and half")
    assert set(seen) <= {"complete", "half and half"}


def test_what_changed_before_its_end_is_replaced_whole(start):
    running = start()
    path = running.out / "file"
    path.write_bytes(b"a" * 100_000)
    running.settle()
    inode = (running.target / "file").stat().st_ino
    with path.open("r+b") as file:
        file.write(b"b")
        file.seek(0, 2)
        file.write(b"grown")
    running.settle()
    assert (running.target / "file").read_bytes() == path.read_bytes()
    assert (running.target / "file").stat().st_ino != inode


def test_a_memory_map_that_outlives_its_descriptor_is_found_at_the_end(start, tmp_path):
    place = tmp_path / "local"
    place.mkdir()
    running = Running(place, tmp_path / "results")
    try:
        path = running.out / "map"
        path.write_bytes(b"\0" * 8192)
        with path.open("r+b") as file:
            view = mmap.mmap(file.fileno(), 0)
        running.settle()
        view[0] = 7
        view.close()
        running.end()
        assert (running.target / "map").read_bytes()[0] == 7
    finally:
        running.stop()


def test_sparse_files_stay_sparse(start):
    running = start()
    with (running.out / "sparse").open("wb") as file:
        file.seek(50 << 20)
        file.write(b"end")
        file.truncate(100 << 20)
    running.end()
    there = (running.target / "sparse").stat()
    assert there.st_size == 100 << 20
    assert there.st_blocks * 512 < 1 << 20
    assert (running.target / "sparse").read_bytes() == (running.out / "sparse").read_bytes()


def test_special_files_are_named(start):
    running = start()
    os.mkfifo(running.out / "pipe")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(os.fspath(running.out / "sock"))
    report = running.end()
    assert report.findings.skipped == {"pipe": "FIFO", "sock": "socket"}
    assert tree(running.target) == {}


@pytest.mark.parametrize("is_late", [False, True])
def test_a_directory_that_cannot_be_listed_is_named(start, is_late):
    running = start()
    (running.out / "seen").write_text("seen")
    name = "/".join(["d" * 200] * 19)
    (running.out / name).mkdir(parents=True)
    inside = os.open(running.out / name, os.O_RDONLY)
    try:
        os.mkdir("e" * 250, dir_fd=inside)
        os.close(os.open(f"{'e' * 250}/lost", os.O_WRONLY | os.O_CREAT, dir_fd=inside))
    finally:
        os.close(inside)
    report = running.end()
    if is_late:
        report = drain_late(running.place, 10.0)
        assert report is not None
    left = {one.name: one.why for one in report.undrained}
    assert left.pop(f"{name}/{'e' * 250}/") == "the directory cannot be listed: File name too long"
    assert set(left) <= {f"{name}/{'e' * 250}"}, "nor can it be made in the target"
    assert (running.target / "seen").read_text() == "seen"


# ---- what the target holds at the start


@pytest.fixture
def earlier(tmp_path: Path) -> Path:
    target = tmp_path / "results"
    (target / "old/deep").mkdir(parents=True)
    (target / "old/deep/file").write_text("deep")
    (target / "old/file").write_text("old")
    (target / "top").write_text("top")
    (target / "link").symlink_to("top")
    return target


def test_what_was_there_is_seen_and_stays(start, earlier):
    before = tree(earlier, times=True)
    running = start(earlier)
    assert (running.out / "old/deep/file").read_text() == "deep"
    assert os.readlink(running.out / "top") == os.fspath(earlier / "top")
    assert os.readlink(running.out / "link") == "top"
    with (running.out / "top").open("a") as file:
        file.write(" more")
    report = running.end()
    assert report.files == 0
    after = tree(earlier, times=True)
    assert after.pop("top")[1] == b"top more"
    before.pop("top")
    assert after == before


def test_renames_and_removals_of_what_was_there(start, earlier):
    running = start(earlier)
    inode = (earlier / "old/deep/file").stat().st_ino
    out = running.out
    (out / "top").rename(out / "first")
    (out / "first").rename(out / "second")
    (out / "old/file").unlink()
    (out / "old/deep").rename(out / "moved")
    (out / "old").rmdir()
    report = running.end()
    assert report.findings.kept == {}
    assert {name: what[1] for name, what in tree(earlier).items()} == {
        "second": b"top",
        "moved": None,
        "moved/file": b"deep",
        "link": "top",
    }
    assert (earlier / "moved/file").stat().st_ino == inode
    assert (out / "second").read_text() == "top"
    assert (out / "moved/file").read_text() == "deep"


def test_names_that_are_exchanged(start, earlier):
    from hpcstage.renaming import exchange_names

    running = start(earlier)
    (running.out / "new").write_text("new")
    running.settle()
    exchange_names(os.fspath(running.out / "top"), os.fspath(running.out / "old/file"))
    exchange_names(os.fspath(running.out / "new"), os.fspath(running.out / "old/deep"))
    running.end()
    assert (earlier / "top").read_text() == "old"
    assert (earlier / "old/file").read_text() == "top"
    assert (earlier / "old/deep").read_text() == "new"
    assert (earlier / "new/file").read_text() == "deep"


def test_replacing_what_was_there(start, earlier):
    running = start(earlier)
    (running.out / "tmp").write_text("new")
    (running.out / "tmp").rename(running.out / "top")
    (running.out / "old/file").unlink()
    (running.out / "old/file").write_text("again")
    running.end()
    assert (earlier / "top").read_text() == "new"
    assert (earlier / "old/file").read_text() == "again"
    assert not (earlier / "tmp").exists()


def test_too_many_entries_are_refused(local_dir, earlier):
    with pytest.raises(CannotMirror, match="more than 3 entries"):
        prepare(OutputPlace(local_dir / "out"), earlier, "run-1", most_entries=3)
    assert not (local_dir / "out").exists()


# ---- nothing is removed that was not seen to be


@pytest.fixture
def filled(start, earlier) -> Running:
    running = start(earlier)
    for number in range(50):
        (running.out / f"new{number}").write_text("x")
    running.settle()
    return running


def test_a_wiped_directory_removes_nothing(filled):
    before = tree(filled.target)
    shutil.rmtree(filled.out)
    report = filled.end()
    assert report.is_gone
    assert tree(filled.target) == before


def test_a_directory_that_is_moved_away_removes_nothing(filled, local_dir):
    before = tree(filled.target)
    filled.out.rename(local_dir / "elsewhere")
    assert filled.end().is_gone
    assert tree(filled.target) == before


def test_a_wipe_that_takes_longer_than_the_hold(filled, monkeypatch):
    before = tree(filled.target)
    for number in range(50):
        (filled.out / f"new{number}").unlink()
        filled.turn(0.02)
    shutil.rmtree(filled.out)
    filled.end()
    assert tree(filled.target) == before


def test_lost_events_remove_nothing_and_lose_nothing(filled):
    before = tree(filled.target)
    limit = int(Path("/proc/sys/fs/inotify/max_queued_events").read_text())
    (filled.out / "new1").unlink()
    (filled.out / "old/file").unlink()
    for number in range(limit // 2 + 500):
        name = filled.out / f"many{number % 2}"
        name.mkdir()
        name.rmdir()
    (filled.out / "sub").mkdir()
    (filled.out / "sub/file").write_text("after")
    report = filled.end()
    assert report.overflows
    assert report.findings.kept == dict.fromkeys(("new1", "old/file"), UNSEEN)
    after = tree(filled.target)
    assert after.pop("sub/file")[1] == b"after"
    after.pop("sub")
    assert after == before


def test_a_late_drain_names_what_went_unseen(filled):
    (filled.out / "sub/deep").mkdir(parents=True)
    for name in ("sub/file", "sub/deep/file", "changed", "gone there"):
        (filled.out / name).write_text(name)
    filled.settle()
    filled.stop()
    with (filled.out / "top").open("a") as file:
        file.write(" and more, by the command")
    before = tree(filled.target)
    for name in ("new1", "old/file", "top", "changed", "gone there"):
        (filled.out / name).unlink()
    (filled.out / "new2").rename(filled.out / "renamed")
    shutil.rmtree(filled.out / "sub")
    (filled.out / "sub").symlink_to(filled.target / "sub")
    (filled.target / "theirs").write_text("by others, whose it is now")
    (filled.target / "theirs").rename(filled.target / "changed")
    (filled.target / "gone there").unlink()
    for _ in range(2):
        report = drain_late(filled.place, 60.0)
        assert report is not None
        kept = dict(report.findings.kept)
        assert kept == dict.fromkeys(("new1", "new2", "old/file", "sub/deep", "sub/file", "top"), UNSEEN)
    after = tree(filled.target)
    assert after["renamed"] == before["new2"]
    assert {name: after.get(name) for name in before if name not in {"changed", "gone there"}} == {
        name: entry for name, entry in before.items() if name not in {"changed", "gone there"}
    }


def test_a_late_drain_names_what_a_killed_uploader_had_just_written(filled):
    """It was killed before it could say so; the file went before the late drain."""
    (filled.out / "late").write_text("late")
    filled.settle()
    filled.stop()
    journal = Path(filled.place.journal)
    lines = journal.read_bytes().splitlines(keepends=True)
    kept = [line for line in lines if b'["did",["carry","late"' not in line]
    assert len(kept) < len(lines)
    journal.write_bytes(b"".join(kept))
    (filled.out / "late").unlink()
    report = drain_late(filled.place, 60.0)
    assert report is not None
    assert report.findings.kept == {"late": UNSEEN}
    assert (filled.target / "late").read_text() == "late"


def lose_events(running, monkeypatch):
    """The kernel has thrown away what it had to tell until now."""
    from hpcstage import inotify

    real = running.drain._watch._queue.read
    monkeypatch.setattr(running.drain._watch._queue, "read", lambda: b"")
    assert real()
    overflow = inotify._EVENT.pack(-1, inotify.OVERFLOW, 0, 0)
    pieces = [overflow]
    monkeypatch.setattr(running.drain._watch._queue, "read", lambda: pieces.pop() if pieces else real())


def test_after_lost_events_all_is_watched_again(filled, monkeypatch):
    for number in range(20):
        (filled.out / f"d{number}").mkdir()
    (filled.out / "old").rename(filled.out / "d3/old")
    lose_events(filled, monkeypatch)
    filled.settle()
    (filled.out / "d3/old/deep/late").write_text("late")
    filled.settle()
    assert (filled.target / "d3/old/deep/late").read_text() == "late"
    assert (filled.target / "d3/old/file").read_text() == "old"


def test_a_directory_that_is_made_anew_while_events_are_lost_removes_nothing(tmp_path, earlier, monkeypatch):
    running = Running(tmp_path / "local", earlier)  # on a disk that gives a number of an inode again
    try:
        (running.out / "new").write_text("new")
        running.settle()
        before, inode = tree(running.target), running.out.stat().st_ino
        (running.out / "top").unlink()
        (running.out / "new").unlink()
        running.turn(0.0)
        shutil.rmtree(running.out)
        for _ in range(50):
            running.out.mkdir()
            if running.out.stat().st_ino == inode:
                break
            running.out.rmdir()
        else:
            running.out.mkdir()
        lose_events(running, monkeypatch)
        assert running.end().is_gone
        assert tree(running.target) == before
    finally:
        running.stop()


def test_a_directory_moved_out_stays_and_is_named(filled, local_dir):
    (filled.out / "old").rename(local_dir / "old")
    (filled.out / "new3").rename(local_dir / "new3")
    report = filled.end()
    assert list(report.findings.kept) == ["old"]
    assert (filled.target / "old/deep/file").exists()
    assert not (filled.target / "new3").exists()


# ---- faults of the target


def test_a_full_target_keeps_files_and_names_them(start, tmp_path):
    if os.geteuid():
        pytest.skip("needs root")
    target = tmp_path / "small"
    target.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", target], check=True)
    try:
        running = start(target)
        (running.out / "small").write_bytes(b"s" * 1000)
        (running.out / "large").write_bytes(b"l" * (2 << 20))
        report = running.end()
        assert [(left.name, os.strerror(errno.ENOSPC) in left.why) for left in report.undrained] == [("large", True)]
        assert (target / "small").read_bytes() == b"s" * 1000
        assert os.listdir(target) == ["small"]
        running.stop()
    finally:
        subprocess.run(["umount", target], check=True)


def test_a_target_that_turns_read_only_and_back(start, tmp_path):
    if os.geteuid():
        pytest.skip("needs root")
    target = tmp_path / "mounted"
    target.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "none", target], check=True)
    try:
        running = start(target)
        (running.out / "first").write_text("1")
        running.settle()
        subprocess.run(["mount", "-o", "remount,ro", target], check=True)
        (running.out / "second").write_text("2")
        (running.out / "first").unlink()
        running.until(lambda: any(mark.tries for mark in running.drain._ledger.marks.by_name.values()))
        left = running.drain.report().undrained
        assert [(one.name, "Read-only" in one.why) for one in left] == [("second", True)]
        subprocess.run(["mount", "-o", "remount,rw", target], check=True)
        running.until(lambda: tree(target).keys() == {"second"})
        running.stop()
    finally:
        subprocess.run(["umount", target], check=True)


def test_renames_and_removals_in_a_read_only_target_are_named_and_done_later(start, tmp_path, monkeypatch):
    if os.geteuid():
        pytest.skip("needs root")
    monkeypatch.setattr(namequeue, "_RETRY_S", 0.1)
    target = tmp_path / "mounted"
    target.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "none", target], check=True)
    try:
        for name in ("renamed", "removed"):
            (target / name).write_text(name)
        running = start(target)
        subprocess.run(["mount", "-o", "remount,ro", target], check=True)
        (running.out / "renamed").rename(running.out / "new")
        (running.out / "removed").unlink()
        report = running.end()
        assert {one.name for one in report.undrained} == {"renamed", "removed"}
        assert all("Read-only" in one.why for one in report.undrained)
        subprocess.run(["mount", "-o", "remount,rw", target], check=True)
        late = drain_late(running.place, 60.0)
        assert late is not None
        assert (late.undrained, late.findings.kept) == ([], {})
        assert {name: what for name, (_, what, *_) in tree(target).items()} == {"new": b"renamed"}
    finally:
        subprocess.run(["umount", target], check=True)


def test_a_target_that_has_gone_is_not_filled(start, tmp_path):
    running = start()
    running.target.rename(tmp_path / "away")
    running.target.mkdir()
    (running.out / "file").write_text("x")
    report = running.end()
    assert [left.name for left in report.undrained] == ["file"]
    assert os.listdir(running.target) == []


def test_the_death_of_the_carrying_process_costs_nothing(start):
    running = start()
    for number in range(200):
        (running.out / f"file{number}").write_bytes(os.urandom(1000))
    kills = 0
    while len(os.listdir(running.target)) < 200 and kills < 5:
        running.turn()
        if running.drain._process._pid and running.drain._process.carrying:
            os.kill(running.drain._process._pid, 9)
            kills += 1
            running.until(lambda: not running.drain._process._given or running.drain._process.carrying < 8)
    assert kills
    running.end()
    assert tree(running.target) == tree(running.out)


def test_a_target_that_hangs_holds_up_nothing(start):
    running = start()
    (running.out / "first").write_text("1")
    running.settle()
    os.kill(running.drain._process._pid, signal.SIGSTOP)
    (running.out / "second").write_text("2")
    running.until(lambda: running.drain._process.carrying)
    begun = time.monotonic()
    for _ in range(10):
        running.drain.work(time.monotonic())
    assert time.monotonic() - begun < 0.5
    report = running.stop()
    assert [(left.name, left.why) for left in report.undrained] == [("second", "there was no time left")]
    assert not (running.target / "second").exists()


# ---- space on the local disk

FREED = 200_000


def free(running: Running) -> set[str]:
    """Frees what can be freed, and returns the names of the links."""
    running.settle()
    running.drain.give_way(1 << 40, time.monotonic())
    running.settle()
    return {path.name for path in running.out.iterdir() if path.is_symlink()}


def test_links_take_the_place_of_what_is_drained_and_open_nowhere(start, monkeypatch):
    monkeypatch.setattr(freeing, "GRACE_S", 0.02)
    running = start()
    out = running.out
    content = {name: os.urandom(FREED) for name in ("done", "written", "read", "mapped", "linked", "elsewhere")}
    for name, data in content.items():
        (out / name).write_bytes(data)
    os.link(out / "linked", out / "link")
    (out / "small").write_text("small")
    with (out / "sparse").open("wb") as file:
        file.truncate(FREED)
    mtime_ns = (out / "done").stat().st_mtime_ns
    running.settle()  # the carrying process is there: it has none of what is opened now
    with contextlib.ExitStack() as stack:
        stack.enter_context((out / "written").open("ab"))
        stack.enter_context((out / "read").open("rb"))
        with (out / "mapped").open("r+b") as file:
            stack.enter_context(mmap.mmap(file.fileno(), 0))
        with (out / "elsewhere").open("rb") as file:
            other = subprocess.Popen(["sleep", "60"], stdin=file)
        try:
            assert free(running) == {"done", "sparse"}
        finally:
            other.kill()
            other.wait()
    assert (out / "done").stat().st_mtime_ns == mtime_ns
    running.drain._ledger._state.unfreeable.clear()
    assert free(running) == {"done", "sparse", "written", "read", "mapped", "elsewhere"}
    assert {name: (out / name).read_bytes() for name in content} == content
    assert os.listdir(running.place.scratch) == []


def test_a_link_that_took_the_place_of_a_file_can_be_used_as_the_file(start, monkeypatch):
    monkeypatch.setattr(freeing, "GRACE_S", 0.02)
    running = start()
    out = running.out
    for name in ("appended", "renamed", "removed", "replaced", "stays"):
        (out / name).write_bytes(b"x" * FREED)
    assert len(free(running)) == 5
    with (out / "appended").open("ab") as file:
        file.write(b"more")
    (out / "renamed").rename(out / "new")
    (out / "removed").unlink()
    (out / "tmp").write_text("another")
    (out / "tmp").rename(out / "replaced")
    report = running.end()
    assert (report.undrained, report.findings.kept, report.findings.beside) == ([], {}, {})
    found = {name: what[1] for name, what in tree(running.target).items()}
    x = b"x" * FREED
    assert found == {"appended": x + b"more", "new": x, "replaced": b"another", "stays": x}


def test_who_found_a_file_before_a_link_took_its_place_writes_to_that_file(start):
    running = start()
    path = running.out / "file"
    path.write_bytes(b"x" * FREED)
    running.settle()
    found = os.open(path, os.O_PATH)

    def write() -> None:
        wait_for(path.is_symlink)
        with open(f"/proc/self/fd/{found}", "ab") as file:
            file.write(b"late")

    writer = threading.Thread(target=write)
    writer.start()
    try:
        assert free(running) == set()
        writer.join(5)
        assert path.read_bytes() == b"x" * FREED + b"late"
        running.end()
        assert (running.target / "file").read_bytes() == b"x" * FREED + b"late"
    finally:
        writer.join(5)
        os.close(found)


def test_who_writes_through_the_link_beside_who_found_the_file_before_loses_nothing(start):
    running = start()
    path = running.out / "file"
    path.write_bytes(b"x" * FREED)
    running.settle()
    found = os.open(path, os.O_PATH)

    def write() -> None:
        wait_for(path.is_symlink)
        with (running.target / "file").open("ab") as file:  # as who follows the link does
            file.write(b"through the link")
        with open(f"/proc/self/fd/{found}", "ab") as file:
            file.write(b"late")

    writer = threading.Thread(target=write)
    writer.start()
    try:
        assert free(running) == set()
        writer.join(5)
        report = running.end()
        assert report.findings.beside == {"file": "file.run-1"}
        assert (running.target / "file").read_bytes() == b"x" * FREED + b"through the link"
        assert (running.target / "file.run-1").read_bytes() == b"x" * FREED + b"late"
    finally:
        writer.join(5)
        os.close(found)


def test_a_store_through_a_map_of_which_no_time_tells_is_seen(start):
    running = start()  # on tmpfs, where the kernel notes at most the time of a page's first store
    path = running.out / "file"
    path.write_bytes(b"x" * FREED)
    running.settle()  # the carrying process is there: it has no map of the file
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as view:
        view[2] = 3
        with path.open("r+b") as other:
            other.write(b"\1")
        running.settle()
        view[1] = 2
    assert free(running) <= {"file"}
    assert (path.read_bytes()[:3], (running.target / "file").read_bytes()[:3]) == (b"\1\2\3", b"\1\2\3")


def test_nothing_is_lost_where_programs_write_and_space_is_needed_all_the_time(start, monkeypatch):
    monkeypatch.setattr(freeing, "GRACE_S", 0.005)
    monkeypatch.setattr(ledger, "LEAST_FREED_BYTES", 1)
    monkeypatch.setattr(outcomes, "FREE_AGAIN_S", 0.0)
    monkeypatch.setattr(marks, "REST_S", 0.0)
    monkeypatch.setattr(seen, "CLOSED_S", 0.0)
    running = start()
    code = """
import os, random, sys, time
name = f"{sys.argv[1]}/{sys.argv[2]}"
whole = b""
for number in range(100):
    line = f"{number} {random.random()}\\n".encode()
    if random.random() < 0.1:
        with open(f"{name}.tmp", "wb") as file:
            file.write(whole + line)
        os.rename(f"{name}.tmp", name)
    else:
        with open(name, "ab") as file:
            file.write(line)
    whole += line
    time.sleep(random.choice((0, 0, 0.03, 0.06)))
    assert open(name, "rb").read() == whole, "nobody finds less than was written, or no file"
sys.stdout.buffer.write(whole)
"""
    programs = [
        subprocess.Popen([sys.executable, "-c", code, running.out, name], stdout=subprocess.PIPE) for name in "abc"
    ]
    was_linked = set()
    while any(program.poll() is None for program in programs):
        running.turn(0.002)
        running.drain.give_way(1 << 40, time.monotonic())
        was_linked.update(name for name in "abc" if (running.out / name).is_symlink())
    written = [program.communicate()[0] for program in programs]
    assert [program.returncode for program in programs] == [0, 0, 0]
    running.end()
    assert [(running.target / name).read_bytes() for name in "abc"] == written
    assert was_linked == set("abc")
    assert os.listdir(running.place.scratch) == []


# ---- how much and when


def test_files_wait_for_reads(start):
    asked = []
    running = start(may_copy=lambda size_bytes: asked.append(size_bytes) or 0.3)
    begun = time.monotonic()
    for number in range(3):
        (running.out / f"file{number}").write_bytes(b"x" * (number + 1))
    running.until(lambda: len(os.listdir(running.target)) == 3)
    assert sorted(asked)[:3] == [1, 2, 3]
    assert time.monotonic() - begun > 0.2


def test_the_rate_is_kept(start):
    running = start(rate=4e6)
    begun = time.monotonic()
    for number in range(4):
        (running.out / f"file{number}").write_bytes(b"x" * (1 << 20))
    running.end()
    assert time.monotonic() - begun > 0.7


def test_many_processes_write_at_once(start):
    code = "import os, sys\nfor n in range(50):\n    d = f'{sys.argv[1]}/d{n % 5}'\n    os.makedirs(d, exist_ok=True)\n"
    code += "    open(f'{d}/{os.getpid()}-{n}.tmp', 'w').write(str(n) * 1000)\n"
    code += "    os.replace(f'{d}/{os.getpid()}-{n}.tmp', f'{d}/{os.getpid()}-{n}')\n"
    running = start()
    programs = [subprocess.Popen([sys.executable, "-c", code, running.out]) for _ in range(4)]
    running.until(lambda: all(program.poll() is not None for program in programs), 30)
    running.end()
    assert len(tree(running.out)) == 205
    assert tree(running.target) == tree(running.out)
    assert stat.S_ISDIR(running.target.stat().st_mode)


def test_hard_links_have_sums_of_their_own(start):
    running = start()
    (running.out / "a").write_text("one two")
    os.link(running.out / "a", running.out / "b")
    running.settle()
    with (running.out / "a").open("r+b") as file:
        file.write(b"ONE")
    running.end()
    assert {name: (running.target / name).read_text() for name in "ab"} == {"a": "ONE two", "b": "ONE two"}


def test_removals_after_the_end_are_not_carried_over(filled):
    before = tree(filled.target)
    (filled.out / "sub").mkdir()
    (filled.out / "sub/late").write_text("late")
    filled.drain.end(time.monotonic())
    for path in (*filled.out.glob("new*"), filled.out / "top", filled.out / "sub/late"):
        path.unlink()
    filled.until(lambda: filled.drain.is_drained)
    report = filled.stop()
    after = tree(filled.target)
    after.pop("sub")
    assert after == before
    assert [(left.name, left.why) for left in report.undrained] == [("sub/late", "was removed before it was drained")]


def test_the_journal_stays_short(start, monkeypatch):
    """Ten logs that grow for a week, and a file that is written anew all the time."""
    monkeypatch.setattr(journal, "LONG_BYTES", 20_000)
    monkeypatch.setattr(os, "fsync", lambda _: None)
    monkeypatch.setattr(marks, "REST_S", 0.0)
    monkeypatch.setattr(seen, "CLOSED_S", 0.0)
    running = start()
    (running.target / "others").touch()
    longest = 0
    for number in range(150):
        with (running.out / "log").open("a") as log:
            log.write(f"{number}\n")
        (running.out / "last").write_text(f"{number}")
        running.settle()
        longest = max(longest, os.stat(running.place.journal).st_size)
    assert longest < 30_000
    (running.out / "log").rename(running.out / "log.1")
    (running.out / "last").unlink()
    running.turn(0.0)
    running.stop()
    assert sorted(os.listdir(running.place.base)) == ["anchors", "journal", "scratch", "tree"]
    report = drain_late(running.place, 60.0)
    assert report is not None
    assert (report.undrained, report.findings.beside, report.findings.kept) == ([], {}, {})
    assert sorted(os.listdir(running.target)) == ["log.1", "others"]
    assert (running.target / "log.1").read_text().split() == [str(number) for number in range(150)]


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_process_that_is_killed_while_it_writes_the_journal_anew_loses_nothing(start, monkeypatch, when):
    monkeypatch.setattr(journal, "LONG_BYTES", 1)
    monkeypatch.setattr(seen, "CLOSED_S", 0.0)
    compact = journal.Journal.compact

    def killed(self):
        if when == "after":
            compact(self)
        os.kill(os.getpid(), signal.SIGKILL)

    monkeypatch.setattr(journal.Journal, "compact", killed)
    running = start()
    for number in range(3):
        (running.out / f"{number}").write_text("content")
        (running.out / f"{number}").rename(running.out / f"{number}.new")
        running.turn(0.0)
        if not number:
            running.until(lambda: running.drain._process.fds() != [])
            running.until(lambda: running.drain._process.fds() == [])
    running.settle()
    assert tree(running.target) == tree(running.out)
    running.stop()
    again = drain_late(running.place, 60.0)
    assert again is not None
    assert (again.undrained, again.files) == ([], 0)
    assert tree(running.target) == tree(running.out)
