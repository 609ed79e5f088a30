"""The walk, on real trees: everything that is no regular file, links, odd names, patterns, lists, slow storage."""

from __future__ import annotations

import contextlib
import fnmatch
import os
import resource
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcstage.emulator import Settings, Slowfs, unavailable
from hpcstage.errors import UsageError
from hpcstage.plan.dataset.datasets import resolve
from hpcstage.plan.dataset.listing import Pattern
from hpcstage.plan.dataset.scan import ScanResult, scan
from hpcstage.plan.order import orders

NO_FUSE = unavailable()


def put(root: Path, *names: str | bytes) -> None:
    for name in names:
        path = os.path.join(os.fsencode(root), os.fsencode(name))
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "wb") as file:
            file.write(os.fsencode(name))


def paths(result: ScanResult) -> list[bytes]:
    return [entry.path for entry in result.manifest.entries()]


@contextlib.contextmanager
def mounted_tmpfs(at: Path) -> Iterator[None]:
    subprocess.run(["mount", "-t", "tmpfs", "none", at], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", at], check=True)


def reasons(result: ScanResult, root: Path) -> dict[str, str]:
    return {os.fsdecode(path)[len(str(root)) + 1 :]: why for path, why in result.skipped}


def test_facts_are_those_of_stat(tmp_path: Path):
    put(tmp_path, "a/1", "b")
    os.utime(tmp_path / "b", ns=(1, 1_234_567_890_123_456_789))
    os.chmod(tmp_path / "b", 0o640)
    result = scan(resolve([str(tmp_path)], tmp_path))
    found = os.stat(tmp_path / "b")
    entry = result.manifest.entry(1)
    assert (entry.path, entry.size_bytes, entry.mtime_ns) == (b"b", 1, 1_234_567_890_123_456_789)
    assert (entry.mode, entry.inode, entry.device, entry.is_link) == (found.st_mode, found.st_ino, found.st_dev, False)
    assert result.listings == 2
    assert result.stats >= 2


def test_what_is_no_regular_file_is_left_out_with_its_reason(tmp_path: Path):
    put(tmp_path, "d/file")
    os.mkfifo(tmp_path / "d/fifo")
    (tmp_path / "d/dangling").symlink_to("nothing")
    (tmp_path / "d/self").symlink_to("self")
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(tmp_path / "d/sock"))
        result = scan(resolve([str(tmp_path / "d")], tmp_path))
    assert paths(result) == [b"file"]
    assert reasons(result, tmp_path / "d") == {
        "fifo": "not a regular file",
        "sock": "not a regular file",
        "dangling": "a dangling symbolic link",
        "self": "Too many levels of symbolic links",
    }
    assert sum(result.skipped_counts.values()) == 4


def test_links_are_followed_and_cycles_cut(tmp_path: Path):
    put(tmp_path, "d/sub/1", "outside/2", "outside/file")
    (tmp_path / "d/out").symlink_to("../outside")
    (tmp_path / "d/out-file").symlink_to("../outside/file")
    (tmp_path / "d/sub/up").symlink_to("..")
    (tmp_path / "outside/around").symlink_to("../d")
    result = scan(resolve([str(tmp_path / "d")], tmp_path))
    assert paths(result) == [b"out-file", b"out/2", b"out/file", b"sub/1"]
    links = {entry.path for entry in result.manifest.entries() if entry.is_link}
    assert links == {b"out-file"}
    assert set(result.skipped_counts) == {"a symbolic link to a directory above it"}


def test_a_link_to_what_holds_the_dataset_is_not_followed(tmp_path: Path):
    """`up -> ../..` would bring all that lies beside the dataset into it, on other file systems too."""
    put(tmp_path, "project/data/sub/1", "project/else/2", "3")
    (tmp_path / "project/data/up").symlink_to("../..")
    (tmp_path / "project/data/sub/root").symlink_to("/")
    (tmp_path / "project/else/back").symlink_to("..")
    (tmp_path / "project/data/else").symlink_to("../else")
    for argument in ("project/data", "project/data/*"):
        result = scan(resolve([argument], tmp_path))
        assert paths(result) == [b"else/2", b"sub/1"]
        assert set(result.skipped_counts) == {"a symbolic link to a directory above it"}
    (tmp_path / "l").write_text("project/data/sub\nproject/data/else\n")
    assert paths(scan(resolve([f"@{tmp_path}/l"], tmp_path))) == [b"else/2", b"sub/1"]


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root for a mount")
def test_behind_a_link_the_walk_stays_on_its_file_system(tmp_path: Path):
    put(tmp_path, "data/own/1", "else/2")
    for directory in ("else/other", "data/mounted"):
        (tmp_path / directory).mkdir()
    (tmp_path / "data/link").symlink_to("../else")
    with mounted_tmpfs(tmp_path / "else/other"), mounted_tmpfs(tmp_path / "data/mounted"):
        put(tmp_path, "else/other/3", "data/mounted/4")
        result = scan(resolve(["data"], tmp_path))
        assert paths(result) == [b"link/2", b"mounted/4", b"own/1"]
        assert reasons(result, tmp_path / "data") == {"link/other": "another file system behind a symbolic link"}
        (tmp_path / "data/straight").symlink_to("../else/other")
        assert b"straight/3" in paths(scan(resolve(["data"], tmp_path)))


def test_directories_that_link_to_each_other_come_to_an_end(tmp_path: Path):
    names = "abcdefgh"
    put(tmp_path, *(f"d/{name}/file" for name in names))
    for one in names:
        for other in names:
            (tmp_path / f"d/{one}/{other}-").symlink_to(f"../{other}")
    result = scan(resolve(["d"], tmp_path))
    assert len(names) <= len(paths(result)) <= len(names) * 65
    assert "more than 64 names by symbolic links" in result.skipped_counts


@pytest.mark.skipif(os.geteuid() == 0, reason="root can read any directory")
def test_unreadable_directory_is_told(tmp_path: Path):
    put(tmp_path, "d/ok", "d/no/1")
    (tmp_path / "d/no").chmod(0)
    result = scan(resolve([str(tmp_path / "d")], tmp_path))
    (tmp_path / "d/no").chmod(0o700)
    assert reasons(result, tmp_path / "d") == {"no": "directory: Permission denied"}


def test_a_time_that_64_bits_do_not_hold_costs_its_file_only(tmp_path: Path):
    root = tmp_path / "data"
    put(root, "a", "late", "z")
    late_s = 10_000_000_000
    os.utime(root / "late", (late_s, late_s))
    if (root / "late").stat().st_mtime < late_s:
        pytest.skip("this file system holds no such time")
    result = scan(resolve([str(root)], tmp_path))
    assert paths(result) == [b"a", b"z"]
    assert result.skipped == [(os.fsencode(root / "late"), "a modification time after the year 2262")]


def test_where_no_more_threads_can_be_started_those_that_work_do_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    root = tmp_path / "data"
    put(root, *(f"d{n % 7}/f{n}" for n in range(300)))
    started: list[threading.Thread] = []
    refused: list[threading.Thread] = []
    start = threading.Thread.start

    def limited(thread: threading.Thread) -> None:
        if len(started) == 2:
            refused.append(thread)
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", limited)
    monkeypatch.setattr("hpcstage.plan.dataset.scan.GROW_AFTER_S", 0.0)
    result = scan(resolve([str(root)], tmp_path))
    assert (len(result.manifest), result.threads, len(started), len(refused)) == (300, 2, 2, 1)


def test_excluded_directories(tmp_path: Path):
    put(tmp_path, "1", "hpcstage-runs/x/2", "deep/keep")
    result = scan(resolve([str(tmp_path)], tmp_path), exclude=[os.fsencode(tmp_path.resolve() / "hpcstage-runs")])
    assert paths(result) == [b"1", b"deep/keep"]


def test_files_and_globs_take_only_what_they_name(tmp_path: Path):
    put(tmp_path, "a/1.jpg", "a/2.txt", "b/3.jpg", "b/.hidden.jpg", "b/c/4.jpg", "n0/x/5", "n1/6", "m/7")
    take = lambda *arguments: paths(scan(resolve([str(tmp_path / a) for a in arguments], tmp_path)))  # noqa: E731
    assert take("*/*.jpg") == [b"a/1.jpg", b"b/3.jpg"]
    assert take("**/*.jpg") == [b"a/1.jpg", b"b/3.jpg", b"b/c/4.jpg"]
    assert take("n*") == [b"n0/x/5", b"n1/6"]
    assert take("a/2.txt", "b/[0-9].jpg", "n1/?") == [b"2.txt", b"3.jpg", b"6"]
    assert take("a/2.txt", "*/[13].jpg") == [b"a/1.jpg", b"a/2.txt", b"b/3.jpg"]
    assert take("b/.h*") == [b".hidden.jpg"]
    with pytest.raises(UsageError, match="matches no file"):
        take("*.nothing")


def test_globs_through_links(tmp_path: Path):
    put(tmp_path, "real/1.jpg", "real/2.txt")
    (tmp_path / "link").symlink_to("real")
    (tmp_path / "real/3.jpg").symlink_to("2.txt")
    (tmp_path / "real/3.txt").symlink_to("nowhere")
    result = scan(resolve([str(tmp_path / "l*/*.jpg")], tmp_path))
    assert paths(result) == [b"link/1.jpg", b"link/3.jpg"]
    assert result.skipped == []


def test_a_list_takes_what_it_names_and_directories_whole(tmp_path: Path):
    put(tmp_path, "d/1", "d/2", "d/sub/3", "d/sub/4", "e/5")
    (tmp_path / "d/link").symlink_to("1")
    (tmp_path / "l").write_text("d/2\nd/gone\nd/link\nd/sub\nd/2\n")
    resolved = resolve([f"@{tmp_path}/l"], tmp_path)
    result = scan(resolved)
    assert paths(result) == [b"2", b"link", b"sub/3", b"sub/4"]
    assert result.manifest.entry(1).is_link
    assert result.skipped_counts == {"No such file or directory": 1}
    given_order, unknown, _ = orders.build(result.manifest, None, lists=resolved.lists)
    assert (list(given_order.ids), unknown) == ([0, 1, 2, 3], 1)


def test_an_error_that_is_not_of_a_file_is_told(tmp_path: Path):
    put(tmp_path, "d/a/1", "d/b/2")
    resolved = resolve(["d"], tmp_path)
    assert scan(resolved).unanswered == ""
    pid = os.fork()
    if pid == 0:
        resource.setrlimit(resource.RLIMIT_NOFILE, (0, 0))
        os._exit(0 if scan(resolved).unanswered == f"{tmp_path}/d: Too many open files" else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


@pytest.mark.fuse
@pytest.mark.skipif(NO_FUSE is not None, reason=str(NO_FUSE))
def test_latency_is_hidden(tmp_path: Path):
    put(tmp_path, *(f"d/{i % 20}/{i}" for i in range(2000)))
    with Slowfs(tmp_path / "d", Settings(metadata_latency_s=0.01)) as slow:
        started = time.monotonic()
        result = scan(resolve([str(slow.path)], tmp_path))
        seconds = time.monotonic() - started
    assert len(result.manifest) == 2000
    # One after the other would be 2020 operations of 10 ms at least: 20 s.
    assert seconds < 10.0
    assert result.threads > 8


@pytest.mark.slow
def test_many_names_from_a_list(tmp_path: Path, local_dir: Path):
    """The same few files are looked at again and again."""
    names = []
    for i in range(1000):
        put(local_dir, f"d/{i}")
        names.append(os.fsencode(local_dir / "d" / str(i)))
    listed = tmp_path / "list"
    # Spellings below one root: duplicates are looked at, and taken once.
    listed.write_bytes(b"\n".join(names * 200))
    before_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    started = time.process_time()  # other tests may have the processors at that time
    resolved = resolve([f"@{listed}"], tmp_path)
    result = scan(resolved)
    found, unknown, _ = orders.build(result.manifest, None, lists=resolved.lists)
    seconds = time.process_time() - started
    assert (len(result.manifest), len(found.ids), unknown) == (1000, 1000, 0)
    assert seconds < 40
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kb < 200_000


# ---- patterns alone

PART = st.text(alphabet="ab*?.", min_size=1, max_size=3).filter(lambda p: p not in (".", "..") and "**" not in p)
NAME = st.text(alphabet="ab.", min_size=1, max_size=3).filter(lambda p: p not in (".", ".."))


def matches(pattern: str, name: str) -> bool:
    return fnmatch.fnmatchcase(name, pattern) and (pattern.startswith(".") or not name.startswith("."))


def walk(pattern: str, path: list[str]) -> bool:
    compiled = Pattern(pattern.encode())
    positions = compiled.start
    for directory in path[:-1]:
        positions = compiled.into(positions, directory.encode())
    return bool(positions) and compiled.takes_file(positions, path[-1].encode())


@given(st.lists(PART, min_size=1, max_size=3), st.lists(NAME, min_size=1, max_size=3))
def test_patterns_match_component_by_component(pattern: list[str], path: list[str]):
    expected = len(path) >= len(pattern) and all(map(matches, pattern, path))
    assert walk("/".join(pattern), path) == expected


@given(st.lists(NAME.filter(lambda n: not n.startswith(".")), min_size=1, max_size=4), PART)
def test_two_stars_are_any_number_of_directories(path: list[str], last: str):
    taken_whole = any(matches(last, part) for part in path)
    assert walk(f"**/{last}", path) == taken_whole
