"""The engine on real files: what is published is complete and as the source is; what cannot be copied is named."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import stat
import subprocess
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from conftest import wait_for

from benchmarks.copyall import copy_all
from hpcstage.plan.dataset.datasets import resolve
from hpcstage.plan.dataset.manifest import Manifest
from hpcstage.plan.dataset.scan import scan
from hpcstage.store import copyfile
from hpcstage.store.copyfile import CopyJob, CopyOutcome, CopyWorker, Status
from hpcstage.store.counters import WRITE_NS, StatsArea
from hpcstage.store.largecopy import LargeCopy

NEEDS_C = pytest.mark.skipif(copyfile._copy is None, reason="the C function was not built")
native = pytest.mark.parametrize("native", [False, pytest.param(True, marks=NEEDS_C)], ids=["python", "c"])


def manifest_of(*arguments: Path) -> Manifest:
    return scan(resolve([os.fspath(a) for a in arguments], Path("/"))).manifest


def published(node_dir: Path) -> list[Path]:
    return sorted(p for p in (node_dir / "store").rglob("*") if not p.is_dir())


def identical(source: Path, copy: Path) -> bool:
    a, b = source.stat(), copy.stat()
    return (a.st_size, a.st_mtime_ns, a.st_mode & 0o777) == (b.st_size, b.st_mtime_ns, b.st_mode & 0o777) and (
        source.read_bytes() == copy.read_bytes()
    )


@native
def test_copies_are_as_the_source(tmp_path, local_dir, native):
    root = tmp_path / "data"
    names = [b"plain", b"with space", b"new\nline", b"not utf-8 \xff", b"deep/er/file", b"empty", b"exactly"]
    for index, name in enumerate(names):
        path = Path(os.fsdecode(os.fsencode(root) + b"/" + name))
        path.parent.mkdir(parents=True, exist_ok=True)
        size = {b"empty": 0, b"exactly": copyfile.CHUNK_BYTES}.get(name, 1000 * index + 1)
        path.write_bytes(os.urandom(size))
        path.chmod(0o400 + 0o44 * (index % 2))
        os.utime(path, ns=(1, 1_600_000_000_123_456_789 + index))
    manifest = manifest_of(root)
    result = copy_all(manifest, None, local_dir, native=native)
    assert result.files == len(names)
    assert (result.failed, result.refused, result.errors) == (0, 0, [])
    copies = published(local_dir)
    assert len(copies) == len(names)
    for copy in copies:
        source = root / copy.relative_to(local_dir / "store" / manifest.datasets[0].name)
        assert identical(source, copy)
        assert copy.lstat().st_nlink == 1
    assert result.totals.bytes == manifest.total_bytes
    assert result.totals.opens == result.totals.files == len(names)
    assert not list((local_dir / "incoming").rglob("*/*"))
    assert stat.S_IMODE((local_dir / "store" / manifest.datasets[0].name).stat().st_mode) == 0o700


@native
def test_a_copy_that_no_program_has_read_yet_is_known_by_its_times(tmp_path, local_dir, make_tree, native):
    manifest = manifest_of(make_tree(files=3))
    copy_all(manifest, None, local_dir, native=native)
    for copy in published(local_dir):
        assert copy.stat().st_atime_ns <= copy.stat().st_mtime_ns
        copy.read_bytes()
        assert copy.stat().st_atime_ns > copy.stat().st_mtime_ns or "noatime" in options_of_mount(copy)


def options_of_mount(path: Path) -> str:
    mounts = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
    return max((m for m in mounts if path.is_relative_to(m[1])), key=lambda m: len(m[1]))[3]


@native
def test_copies_of_links_have_a_second_name(tmp_path, local_dir, native):
    root = tmp_path / "data"
    root.mkdir()
    (tmp_path / "elsewhere").write_bytes(b"far away")
    (root / "target").write_bytes(b"content")
    (root / "inside").symlink_to("target")
    (root / "outside").symlink_to(tmp_path / "elsewhere")
    manifest = manifest_of(root)
    assert copy_all(manifest, None, local_dir, native=native).files == 3
    store = local_dir / "store" / manifest.datasets[0].name
    links = {name: (store / name).lstat() for name in ("target", "inside", "outside")}
    assert {name: s.st_nlink for name, s in links.items()} == {"target": 1, "inside": 2, "outside": 2}
    assert all(stat.S_ISREG(s.st_mode) for s in links.values())
    assert (store / "outside").read_bytes() == b"far away"


@native
def test_what_vanished_or_became_something_else_is_named(tmp_path, local_dir, native):
    root = tmp_path / "data"
    root.mkdir()
    for name in ("gone", "fifo", "socket", "link", "fine"):
        (root / name).write_bytes(b"x" * 100)
    manifest = manifest_of(root)
    for name in ("gone", "fifo", "socket", "link"):
        (root / name).unlink()
    os.mkfifo(root / "fifo")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(os.fspath(root / "socket"))
        (root / "link").symlink_to("fine")
        result = copy_all(manifest, None, local_dir, native=native)
    assert (result.files, result.failed) == (1, 4)
    assert [p.name for p in published(local_dir)] == ["fine"]
    texts = " ".join(e.error for e in result.errors)
    assert "No such file" in texts
    assert "not a regular file" in texts


@native
def test_content_changed_after_the_scan_is_copied_as_it_is_now(tmp_path, local_dir, native):
    root = tmp_path / "data"
    root.mkdir()
    (root / "file").write_bytes(b"old")
    manifest = manifest_of(root)
    (root / "file").write_bytes(b"new and longer")
    result = copy_all(manifest, None, local_dir, native=native)
    assert (result.files, result.size_bytes) == (1, 14)
    assert identical(root / "file", published(local_dir)[0])


RATE = 200e6
"""Of a copy in ranges, whose file has its blocks from the beginning: no faster than this, it takes a second."""


def is_half_done(node_dir: Path, size: int, until_s: float) -> bool:
    """Whether some of a file of that size has been written under a temporary name, and not all."""
    for path in (node_dir / "incoming").rglob("*/*"):
        with contextlib.suppress(FileNotFoundError):
            return 0 < path.stat().st_blocks * 512 < size or time.monotonic() < until_s
    return False


def stopped_half_way(node_dir: Path, size: int, until_s: float, copying: Future) -> psutil.Process | None:
    """The copier, stopped in the middle of the file; None if it was through before it could be stopped."""
    copiers: list[psutil.Process] = []
    while not copying.done():
        copiers = copiers or psutil.Process().children()  # takes as long as a copy does
        if copiers and is_half_done(node_dir, size, until_s):
            copiers[0].suspend()
            wait_for(lambda copier=copiers[0]: copier.status() == psutil.STATUS_STOPPED)
            if is_half_done(node_dir, size, until_s):
                return copiers[0]
            copiers[0].resume()
    return None


@pytest.mark.parametrize(
    ("native", "size", "rate", "change"),
    [
        *((False, 40 << 20, None, change) for change in ("touch", "shrink", "grow")),
        (False, 200 << 20, RATE, "shrink"),
        *(pytest.param(True, 200 << 20, RATE, change, marks=NEEDS_C) for change in ("touch", "grow")),
    ],
)
def test_of_a_source_that_changes_while_it_is_copied_the_new_is_published(
    tmp_path, local_dir, native, size, rate, change
):
    root = tmp_path / "data"
    root.mkdir()
    path = root / "file"
    copier = None
    with ThreadPoolExecutor(1) as pool:
        for attempt in range(20):
            path.write_bytes(b"x" * size)
            os.utime(path, (1, 1))
            node_dir = local_dir / str(attempt)
            node_dir.mkdir()
            until_s = time.monotonic() + size / rate / 2 if rate else 0.0
            options = {"native": native, "transfers": 4, "max_rate_bytes_per_s": rate}
            copying = pool.submit(copy_all, manifest_of(root), None, node_dir, **options)
            copier = stopped_half_way(node_dir, size, until_s, copying)
            if copier is not None:
                break
            assert copying.result().files == 1
            shutil.rmtree(node_dir)
        assert copier is not None, "no copy could be stopped half-way"
        os.truncate(path, {"touch": size, "shrink": size // 2, "grow": size + 4096}[change])
        os.utime(path)
        copier.resume()
        result = copying.result()
    assert (result.files, result.failed) == (1, 0), "it is copied anew"
    assert identical(path, node_dir / "store" / "0-data" / "file"), "as it is now"
    assert len(published(node_dir)) == 1
    assert not list((node_dir / "incoming").rglob("*/*"))


@NEEDS_C
@pytest.mark.parametrize("change", ["shrink", "grow"])
def test_a_source_that_changes_all_the_time_is_not_published_in_part(tmp_path, local_dir, change):
    """One call in C cannot be stopped half-way: it may also find a moment in which nothing changes."""
    root = tmp_path / "data"
    root.mkdir()
    path = root / "file"
    path.write_bytes(b"x" * (40 << 20))
    manifest = manifest_of(root)
    size = path.stat().st_size
    sizes = {"shrink": [size - 1, size // 2], "grow": [size + 1, size + 4096]}[change]
    stop = threading.Event()

    def disturb() -> None:
        while not stop.is_set():
            for current in sizes:
                os.truncate(path, current)
                os.utime(path)

    thread = threading.Thread(target=disturb)
    thread.start()
    try:
        result = copy_all(manifest, None, local_dir, transfers=4)
    finally:
        stop.set()
        thread.join()
    assert result.files + result.failed == 1
    assert {copy.stat().st_size for copy in published(local_dir)} <= {size, *sizes}
    if result.failed:
        assert "changed while it was copied" in result.errors[0].error
        assert published(local_dir) == []
    assert not list((local_dir / "incoming").rglob("*/*"))


def test_large_files_are_copied_in_ranges(tmp_path, local_dir):
    root = tmp_path / "data"
    root.mkdir()
    for index in range(2):
        (root / f"big{index}").write_bytes(os.urandom(1 << 20) * 80 + b"tail" * index)
    manifest = manifest_of(root)
    result = copy_all(manifest, None, local_dir, transfers=6)
    assert result.files == 2
    assert all(identical(root / copy.name, copy) for copy in published(local_dir))
    assert result.totals.reads >= 160
    assert result.totals.opens == 2


@native
def test_the_rate_cap_holds(local_dir, make_tree, native):
    manifest = manifest_of(make_tree(files=40, size_bytes=50_000))
    result = copy_all(manifest, None, local_dir, max_rate_bytes_per_s=2e6, native=native)
    assert result.files == 40
    assert result.seconds > 0.6


def test_a_large_file_keeps_to_the_rate_cap(tmp_path, local_dir):
    root = tmp_path / "data"
    root.mkdir()
    (root / "file").write_bytes(bytes(6 << 20))
    result = copy_all(manifest_of(root), None, local_dir, max_rate_bytes_per_s=5e6)
    assert result.files == 1
    assert result.seconds > 0.8


def copied(worker: CopyWorker, job: CopyJob) -> CopyOutcome:
    """As a thread of a copier does."""
    outcome = copyfile.copy(worker, job, 1 << 30)
    if outcome.status is not Status.TOO_LARGE:
        return outcome
    return LargeCopy(0, job, None, lambda _: None).copy(worker)


@native
def test_nothing_takes_the_place_of_what_is_there(tmp_path, local_dir, native):
    worker = CopyWorker(StatsArea(1).thread(0), native=native)
    source, target = tmp_path / "source", local_dir / "target"
    source.write_bytes(b"new")
    target.write_bytes(b"there before")
    job = CopyJob(os.fsencode(source), os.fsencode(local_dir / "temporary"), os.fsencode(target))
    assert copied(worker, job).status is Status.EXISTS
    assert target.read_bytes() == b"there before"
    assert not (local_dir / "temporary").exists()
    os.unlink(target)
    target.symlink_to("/nonexistent/tombstone")
    assert copied(worker, job).status is Status.EXISTS
    assert target.is_symlink()


@native
def test_a_cancelled_copy_leaves_nothing(tmp_path, local_dir, native):
    stats = StatsArea(1).thread(0)
    stats.words[7] = 1
    (tmp_path / "source").write_bytes(bytes(100))
    job = CopyJob(os.fsencode(tmp_path / "source"), os.fsencode(local_dir / "t"), os.fsencode(local_dir / "target"))
    assert copied(CopyWorker(stats, native=native), job).status is Status.CANCELLED
    assert os.listdir(local_dir) == []


@native
@pytest.mark.parametrize("size_mb", [8, 64])
def test_holes_stay_holes(tmp_path, local_dir, native, size_mb):
    """In a file that one thread copies, and in a larger one."""
    root = tmp_path / "data"
    root.mkdir()
    data_at = [(), (0,), (3 << 20, (6 << 20) + 5), (8 << 20,)]
    for number, places in enumerate(data_at):
        with (root / str(number)).open("wb") as file:
            for at in places:
                file.seek(at - min(at, 100))
                file.write(os.urandom(4096))
            file.truncate(size_mb << 20)
        if (root / str(number)).stat().st_blocks * 512 > 1 << 20:
            pytest.skip("the file system has no holes")
    result = copy_all(manifest_of(root), None, local_dir, native=native)
    assert (result.files, result.size_bytes) == (len(data_at), len(data_at) * size_mb << 20)
    for copy, places in zip(published(local_dir), data_at, strict=True):
        assert identical(root / copy.name, copy)
        assert copy.stat().st_blocks * 512 <= len(places) * (2 << 20)


@pytest.mark.root
@native
def test_a_second_write_in_one_tick_of_the_clock_is_seen(tmp_path, local_dir, native):
    """On a file system that gives both the same times: where source and copy have the same ones, they are the same."""
    place = tmp_path / "coarse"
    place.mkdir()
    subprocess.run(["mount", "-t", "ramfs", "none", place], check=True)
    try:
        source, target, size = place / "source", local_dir / "target", 256 << 10
        job = CopyJob(os.fsencode(source), os.fsencode(local_dir / "temporary"), os.fsencode(target))
        worker = CopyWorker(StatsArea(1).thread(0), native=native)
        with ThreadPoolExecutor(1) as pool:
            for attempt in range(100):
                source.write_bytes(b"x" * size)
                copying = pool.submit(copied, worker, job)
                with source.open("r+b", buffering=0) as file:
                    file.write(attempt.to_bytes(4, "little") * (size // 4))
                if copying.result().status is Status.OK:
                    is_same = source.stat().st_mtime_ns == copying.result().mtime_ns
                    assert not is_same or target.read_bytes() == source.read_bytes()
                    target.unlink()
    finally:
        subprocess.run(["umount", place], check=True)


def test_both_ways_count_alike(tmp_path, local_dir):
    if copyfile._copy is None:
        pytest.skip("the C function was not built")
    (tmp_path / "source").write_bytes(bytes(3_000_000))
    area = StatsArea(2)
    for index, native in enumerate((False, True)):
        job = CopyJob(
            os.fsencode(tmp_path / "source"),
            b"%s/t" % os.fsencode(local_dir),
            b"%s/%d" % (os.fsencode(local_dir), index),
        )
        outcome = copied(CopyWorker(area.thread(index), native=native), job)
        assert outcome.status is Status.OK
        assert outcome.size_bytes == 3_000_000
    a, b = (area.thread(i).words.tolist() for i in range(2))
    assert [a[i] for i in (0, 1, 3, 6)] == [b[i] for i in (0, 1, 3, 6)] == [3_000_000, 1, 3, 1]
    opens, reads = area.histograms()
    assert (sum(opens.values()), sum(reads.values())) == (2, 6)


def test_the_time_of_a_slow_local_disk_counts(tmp_path, local_dir, monkeypatch):
    (tmp_path / "source").write_bytes(bytes(3 << 20))
    stats, write = StatsArea(1).thread(0), os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda *what: time.sleep(0.02) or write(*what))
    job = CopyJob(*(os.fsencode(path) for path in (tmp_path / "source", local_dir / "t", local_dir / "target")))
    assert copied(CopyWorker(stats, native=False), job).status is Status.OK
    assert stats.words[WRITE_NS] >= 3 * 20_000_000


def test_a_large_copy_that_cannot_begin_says_why(tmp_path, local_dir):
    worker = CopyWorker(StatsArea(1).thread(0))
    large = LargeCopy(0, CopyJob(b"/nonexistent/x", b"t", b"target"), None, lambda _: None)
    assert large.copy(worker).status is Status.SOURCE_ERROR
