"""kill -9, full and broken local disks, vanishing directories: nothing partial is visible, nothing is left running."""
# ruff: noqa: F811  fixtures are imported

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import subprocess
import time

import psutil
import pytest
from conftest import small_tmpfs
from daemon_process import same, start_daemon, wait_until  # noqa: F401

from hpcstage.protocol.shim import Answer, Kind, Reason, State

needs_root = pytest.mark.skipif(os.getuid() != 0, reason="needs root to mount")


def files_of(root):
    return sorted(p for p in root.rglob("*") if p.is_file())


@pytest.fixture
def small_disk(tmp_path):
    """A tmpfs of a given size."""
    with contextlib.ExitStack() as mounted:
        yield lambda options: mounted.enter_context(small_tmpfs(tmp_path / "disk", options))


def test_killed_copiers_are_replaced(start_daemon, make_tree):
    root = make_tree(files=600, size_bytes=30_000)
    daemon = start_daemon(root, max_rate_bytes_per_s=4e6).attach()
    daemon.wait_for_scan()
    rng = random.Random(0)
    killed: set[psutil.Process] = set()
    for _ in range(3):
        least = count(daemon) + rng.randrange(1, 100)
        wait_until(lambda least=least: count(daemon) >= least)
        assert count(daemon) < 600, "copying goes on"
        hit = {child for child in set(daemon.children()) - killed if was_killed(child)}
        assert hit, "those that were killed before have been replaced"
        killed |= hit
    daemon.staged()
    assert all(same(p, daemon.store(p)) for p in files_of(root))
    part = daemon.end()
    assert part.datasets[0].staged_files == 600


def was_killed(process) -> bool:
    """Kills it; False if it had ended by itself, as a helper does."""
    try:
        process.kill()
    except psutil.NoSuchProcess:
        return False
    return not psutil.wait_procs([process], 120)[1]


def count(daemon):
    return sum(1 for _ in (daemon.node_dir / "store").rglob("*.bin"))


def test_copiers_that_keep_dying_end_the_staging(start_daemon, make_tree):
    root = make_tree(files=100, size_bytes=30_000)
    daemon = start_daemon(root, max_rate_bytes_per_s=100_000.0).attach()
    daemon.wait_for_scan()

    def killed_all() -> bool:
        for child in daemon.children():
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        return daemon.state() is State.SETTLED

    wait_until(killed_all)
    assert daemon.request(files_of(root)[-1])[0] is Answer.DIRECT
    part = daemon.end()
    assert part.staged_s is None
    assert "local-failed" in {p.id for p in part.problems}


@pytest.mark.parametrize("seed", range(2))
def test_a_killed_daemon_leaves_nothing_running_and_nothing_partial(start_daemon, make_tree, seed):
    root = make_tree(files=600, size_bytes=30_000)
    daemon = start_daemon(root, max_rate_bytes_per_s=20e6).attach()
    daemon.wait_for_scan()
    least = random.Random(seed).randrange(1, 500)
    wait_until(lambda: count(daemon) >= least)
    children = daemon.children()
    assert children
    daemon.process.kill()
    _, alive = psutil.wait_procs(children, 120)
    assert not alive
    for path in files_of(root):
        copy = daemon.store(path)
        assert not copy.exists() or same(path, copy)
    with pytest.raises(ConnectionRefusedError):
        plain_connect(daemon)


def plain_connect(daemon):
    import socket

    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.connect(os.fspath(daemon.sock))


@pytest.mark.root
@needs_root
def test_a_full_disk_stops_admission_only(start_daemon, make_tree, small_disk):
    root = make_tree(files=200, size_bytes=100_000)
    daemon = start_daemon(root, node_dir=small_disk("size=20m"), budget_bytes=1 << 40).attach()
    daemon.staged()
    staged = [p for p in files_of(root) if daemon.store(p).exists()]
    assert 0 < len(staged) < 200
    assert all(same(p, daemon.store(p)) for p in staged)
    assert daemon.request(staged[0]) == (Answer.READY, Reason.NONE)
    missing = next(p for p in files_of(root) if p not in set(staged))
    assert daemon.request(missing) == (Answer.DIRECT, Reason.FULL)
    part = end_on_mount(daemon)
    assert part.totals.refused == 200 - len(staged)
    assert "disk-full" in {p.id for p in part.problems}


@pytest.mark.root
@needs_root
def test_default_budget_leaves_room_on_the_disk(start_daemon, make_tree, small_disk):
    root = make_tree(files=300, size_bytes=100_000)
    disk = small_disk("size=24m")
    daemon = start_daemon(root, node_dir=disk).attach()
    daemon.staged()
    assert os.statvfs(disk).f_bavail * 4096 > 2_000_000
    part = end_on_mount(daemon)
    assert part.errors == ()
    assert part.used_bytes <= part.budget_bytes


@pytest.mark.root
@needs_root
def test_a_disk_that_becomes_read_only(start_daemon, make_tree):
    root = make_tree(files=200, size_bytes=50_000)
    daemon = start_daemon(root, max_rate_bytes_per_s=1e6).attach()
    daemon.wait_for_scan()
    wait_until(lambda: count(daemon) > 2)
    with read_only(daemon.node_dir / "store"), read_only(daemon.node_dir / "incoming"):
        daemon.staged()
        staged = [p for p in files_of(root) if daemon.store(p).exists()]
        assert daemon.request(staged[0]) == (Answer.READY, Reason.NONE)
        assert daemon.request(files_of(root)[-1])[0] is Answer.DIRECT
    part = daemon.end()
    assert "cannot write the copy" in str(part.errors)
    assert "local-failed" in {p.id for p in part.problems}


@contextlib.contextmanager
def read_only(path):
    """A file system with a mapped page cannot be remounted; a read-only mount of a directory of it can be laid over."""
    if subprocess.run(["mount", "--bind", path, path], capture_output=True, timeout=300, check=False).returncode:
        pytest.skip("cannot mount")
    try:
        subprocess.run(["mount", "-o", "remount,bind,ro", path], check=True, timeout=300)
        yield
    finally:
        subprocess.run(["umount", "-l", path], check=True, timeout=300)


def end_on_mount(daemon):
    """A mount point itself cannot be removed, so this does not ask whether the directory is gone."""
    assert daemon.ask(Kind.END, connection=daemon.wrapper)[0] is Answer.LAST
    assert daemon.wrapper.recv(10) == b""
    assert daemon.process.wait(300) == 0
    assert os.listdir(daemon.node_dir) == []
    return daemon.part()


def test_a_vanished_node_directory(start_daemon, make_tree):
    root = make_tree(files=100, size_bytes=50_000)
    daemon = start_daemon(root, max_rate_bytes_per_s=500_000.0).attach()
    daemon.wait_for_scan()
    with daemon.connect() as waiting:
        while daemon.node_dir.exists():  # a copier may just make a file there
            shutil.rmtree(daemon.node_dir, ignore_errors=True)
        daemon.send(daemon.wrapper, Kind.STAGED)
        assert daemon.receive(daemon.wrapper)[0] is Answer.DONE
        daemon.send(waiting, Kind.REQUEST, os.fsencode(files_of(root)[-1]))
        assert daemon.receive(waiting)[0] is Answer.DIRECT
    part = daemon.end()
    assert "local-failed" in {p.id for p in part.problems}


def test_an_unwritable_run_directory(start_daemon, make_tree, tmp_path):
    daemon = start_daemon(make_tree(), run_dir="/proc/nonexistent/run").attach()
    daemon.staged()
    answer, _, _ = daemon.ask(Kind.END, connection=daemon.wrapper)
    assert answer is Answer.LAST
    assert daemon.wrapper.recv(10) == b""
    assert daemon.process.wait(300) == 0
    assert not daemon.node_dir.exists()


def test_idle_costs_nothing(start_daemon, make_tree):
    daemon = start_daemon(make_tree()).attach()
    daemon.staged()
    process = psutil.Process(daemon.process.pid)
    before = sum(process.cpu_times()[:2])
    start = time.monotonic()
    while time.monotonic() - start < 3:  # a measured interval, not a synchronisation
        signal.sigtimedwait([], 0.5)
    assert (sum(process.cpu_times()[:2]) - before) / 3 < 0.03
    daemon.end()
