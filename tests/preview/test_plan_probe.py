"""The probe on real disks: plausible on fast ones, right on emulated slow ones, bounded on ones that hang."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil
import pytest

from hpcstage.emulator import Settings, Slowfs, unavailable
from hpcstage.plan.dataset.datasets import resolve
from hpcstage.plan.dataset.manifest import Manifest
from hpcstage.plan.dataset.scan import scan
from hpcstage.plan.order import orders
from hpcstage.preview import probe as preview_probe
from hpcstage.preview.probe import Copying, probe
from hpcstage.store.copier import CopierSettings
from hpcstage.store.pool import CopierPool

NO_FUSE = unavailable()
fuse = [pytest.mark.fuse, pytest.mark.skipif(NO_FUSE is not None, reason=str(NO_FUSE))]
LARGE = preview_probe.LARGE_BYTES + 1
KNOWN = {
    "source_bytes_per_s", "source_files_per_s", "reader_file_s", "reader_bytes_per_s", "local_bytes_per_s",
    "local_file_s", "copy_bytes_per_s", "copy_files_per_s",
}  # fmt: skip


def manifest_of(root: Path) -> Manifest:
    return scan(resolve([str(root)], root)).manifest


def test_everything_is_measured_and_nothing_is_left(make_tree: Callable[..., Path], local_dir: Path):
    manifest = manifest_of(make_tree(files=100, size_bytes=50_000))
    found = probe(manifest, orders.build(manifest, None).order.ids, local_dir, Copying(), limit_s=1.0)
    assert set(found.rates.sources) == KNOWN
    for name in KNOWN:
        assert getattr(found.rates, name) > 0
        assert found.rates.sources[name].startswith("probe: ")
    assert found.seconds < 2
    assert os.listdir(local_dir) == []


def test_without_a_local_directory(make_tree: Callable[..., Path]):
    manifest = manifest_of(make_tree(files=10))
    found = probe(manifest, range(10), None, Copying(), limit_s=0.5)
    assert found.rates.local_bytes_per_s is None
    assert found.rates.source_bytes_per_s is not None
    assert "no local directory to write to: the local disk was not measured" in found.notes


def test_empty_files_have_a_time_and_no_bandwidth(make_tree: Callable[..., Path], local_dir: Path):
    manifest = manifest_of(make_tree(files=20, size_bytes=0))
    rates = probe(manifest, range(20), local_dir, Copying(), limit_s=0.5).rates
    assert rates.reader_bytes_per_s is None
    assert rates.reader_file_s is not None
    assert rates.reader_file_s > 0


def test_one_file_is_enough(make_tree: Callable[..., Path], local_dir: Path):
    manifest = manifest_of(make_tree(files=1, size_bytes=5_000_000))
    assert set(probe(manifest, [0], local_dir, Copying(), limit_s=0.5).rates.sources) == KNOWN


def test_nothing_to_probe_with_and_vanished_files(make_tree: Callable[..., Path], local_dir: Path):
    root = make_tree(files=3)
    manifest = manifest_of(root)
    assert probe(manifest, [], local_dir, Copying()).notes == ("no files to probe with",)
    for path in root.glob("*/*"):
        path.unlink()
    found = probe(manifest, range(3), local_dir, Copying(), limit_s=0.5)
    assert found.rates.sources == {}
    assert "the sample could not be read" in found.notes


@pytest.mark.parametrize("what", fuse_params := [pytest.param("slow", marks=fuse)])
def test_emulated_storage_is_measured_right(make_tree: Callable[..., Path], local_dir: Path, what: str):
    root = make_tree(files=600, size_bytes=100_000)
    with Slowfs(root, Settings(bandwidth_bytes_per_s=50e6, metadata_latency_s=0.002, data_latency_s=0.002)) as slow:
        manifest = manifest_of(slow.path)
        rates = probe(manifest, orders.build(manifest, None).order.ids, local_dir, Copying()).rates
    assert rates.reader_file_s is not None
    assert rates.source_bytes_per_s is not None
    assert rates.reader_bytes_per_s is not None
    assert rates.source_bytes_per_s == pytest.approx(50e6, rel=0.25)
    assert 0.002 <= rates.reader_file_s < 0.015
    assert rates.reader_bytes_per_s < 60e6


@pytest.mark.parametrize("what", fuse_params)
def test_a_hanging_source_does_not_hold_us(make_tree: Callable[..., Path], local_dir: Path, what: str):
    root = make_tree(files=50)
    with Slowfs(root, Settings()) as slow:
        manifest = manifest_of(slow.path)
        slow.change(metadata_latency_s=5.0)
        before = {p.pid for p in psutil.Process().children()}
        started = time.monotonic()
        found = probe(manifest, range(50), local_dir, Copying(), limit_s=1.0)
        assert time.monotonic() - started < 3
        slow.change(metadata_latency_s=0.0)
        for copier in psutil.Process().children():
            if copier.pid not in before:
                os.waitpid(copier.pid, 0)  # one that hung in the kernel was left to it
    assert any("hangs" in note for note in found.notes)
    assert found.rates.source_bytes_per_s is None


def test_the_cap_of_the_run_holds_for_the_probe(make_tree: Callable[..., Path], local_dir: Path):
    manifest = manifest_of(make_tree(files=200, size_bytes=50_000))
    rates = probe(manifest, range(200), local_dir, Copying(max_rate_bytes_per_s=1e6), limit_s=1.0).rates
    assert rates.copy_bytes_per_s is not None
    assert rates.source_bytes_per_s is not None
    assert rates.reader_bytes_per_s is not None
    assert rates.copy_bytes_per_s < 1.5e6
    assert rates.source_bytes_per_s >= rates.reader_bytes_per_s, "the cap is on copying, not on the source"


@pytest.mark.parametrize("what", fuse_params)
def test_a_file_that_the_limit_cuts_short_counts_in_part(make_tree: Callable[..., Path], local_dir: Path, what: str):
    root = make_tree(files=4, size_bytes=30_000_000)
    with Slowfs(root, Settings(bandwidth_bytes_per_s=20e6)) as slow:
        rates = probe(manifest_of(slow.path), range(4), local_dir, Copying(), limit_s=1.0).rates
    assert rates.copy_bytes_per_s == pytest.approx(20e6, rel=0.35)
    assert rates.copy_files_per_s == pytest.approx(rates.copy_bytes_per_s / 30e6, rel=0.1)
    assert rates.source_files_per_s is not None
    assert os.listdir(local_dir) == []


def test_the_local_disk_is_measured_where_no_copy_ends_in_time(make_tree: Callable[..., Path], local_dir: Path):
    manifest = manifest_of(make_tree(files=4, size_bytes=40_000_000))
    found = probe(manifest, range(4), local_dir, Copying(max_rate_bytes_per_s=40e6), limit_s=0.5)
    assert set(found.rates.sources) == KNOWN
    assert found.rates.sources["copy_files_per_s"].endswith("in flight, parts of files")
    assert any("a file of the probe's own" in note for note in found.notes)
    assert found.rates.local_bytes_per_s is not None
    assert os.listdir(local_dir) == []


def test_copiers_have_ended_when_copies_are_read_back(
    make_tree: Callable[..., Path], local_dir: Path, monkeypatch: pytest.MonkeyPatch
):
    manifest = manifest_of(make_tree(files=4, size_bytes=40_000_000))
    running: list[int] = []
    read_back = preview_probe._read_back

    def counted(paths: Sequence[bytes], limit_s: float) -> preview_probe.AloneReading | None:
        running.extend(p.pid for p in psutil.Process().children() if p.pid not in before)
        return read_back(paths, limit_s)

    before = {p.pid for p in psutil.Process().children()}
    monkeypatch.setattr(preview_probe, "_read_back", counted)
    found = probe(manifest, range(4), local_dir, Copying(max_rate_bytes_per_s=40e6), limit_s=0.5)
    assert found.rates.local_bytes_per_s is not None
    assert running == []


def test_little_is_written_among_temporary_files(
    make_tree: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    manifest = manifest_of(make_tree(files=60, size_bytes=4_000_000))
    monkeypatch.setattr(tempfile, "tempdir", os.fspath(tmp_path))
    found = probe(manifest, range(60), None, Copying(), limit_s=2.0)
    copies = int(found.rates.sources["source_bytes_per_s"].split()[-2])
    assert 1 <= copies <= preview_probe.SCRATCH_BYTES // 4_000_000
    assert found.seconds < 1.5, "the copiers are not waited for once they have enough"


def test_one_large_file_is_enough_among_temporary_files(
    make_tree: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    manifest = manifest_of(make_tree(files=6, size_bytes=preview_probe.SCRATCH_BYTES))
    monkeypatch.setattr(tempfile, "tempdir", os.fspath(tmp_path))
    rates = probe(manifest, range(6), None, Copying(), limit_s=2.0).rates
    assert rates.sources["source_bytes_per_s"].endswith(" 1 files")


def test_no_room_for_copies_is_said(make_tree: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    manifest = manifest_of(make_tree(files=4))
    monkeypatch.setattr(tempfile, "tempdir", os.fspath(tmp_path / "none"))
    found = probe(manifest, range(4), None, Copying(), limit_s=0.5)
    assert any(note.startswith("there was no room for copies") for note in found.notes)
    assert "the sample could not be read" not in found.notes
    assert found.rates.reader_bytes_per_s is not None


def test_it_does_not_begin_where_a_program_reads_a_large_file(make_tree: Callable[..., Path], local_dir: Path):
    manifest = manifest_of(make_tree(files=4, size_bytes=LARGE))
    found = probe(manifest, range(4), local_dir, Copying(), opened=lambda: [manifest.source_path(0)])
    assert (found.rates.sources, found.notes) == ({}, (preview_probe.GAVE_WAY,))
    assert os.listdir(local_dir) == []


def test_it_gives_way_to_a_program_that_begins_to_read_a_large_file(make_tree: Callable[..., Path], local_dir: Path):
    manifest = manifest_of(make_tree(files=4, size_bytes=LARGE))
    looks: list[bool] = []

    def opened() -> list[bytes]:
        looks.append(any(local_dir.glob("*/incoming/*/*")))  # the copiers are at work
        return [manifest.source_path(0)] if looks[-1] else []

    found = probe(manifest, range(4), local_dir, Copying(max_rate_bytes_per_s=10e6), limit_s=10.0, opened=opened)
    assert looks.count(True) == 1, "it does not begin again"
    assert found.notes == (preview_probe.GAVE_WAY,)
    assert found.rates.copy_bytes_per_s is None
    assert found.rates.source_bytes_per_s == found.rates.reader_bytes_per_s
    assert os.listdir(local_dir) == []


def test_it_does_not_give_way_to_a_program_that_reads_small_files(make_tree: Callable[..., Path], local_dir: Path):
    manifest = manifest_of(make_tree(files=4, size_bytes=5_000_000))
    opened = [*map(manifest.source_path, range(4)), b"/elsewhere"]
    found = probe(manifest, range(4), local_dir, Copying(), limit_s=0.5, opened=lambda: opened)
    assert set(found.rates.sources) == KNOWN
    with (local_dir / "large").open("wb") as file:
        file.truncate(LARGE)
    manifest = manifest_of(local_dir)
    assert probe(manifest, range(1), None, Copying(), limit_s=0.5, opened=lambda: opened).rates.sources


def test_a_probes_copier_that_dies_is_not_replaced(make_tree: Callable[..., Path], local_dir: Path):
    manifest_of(make_tree(files=1)).save(local_dir / "manifest.bin")
    pool = CopierPool(CopierSettings(local_dir, local_dir / "manifest.bin", 2, is_probe=True), 1)
    try:
        os.kill(pool.members[0].pid, signal.SIGKILL)
        (fd,) = pool.fds()
        assert select.select([fd], [], [], 10)[0]
        assert pool.receive(fd) == []
        assert (pool.fds(), pool.slots) == ([], 0)
    finally:
        pool.close()


def test_copiers_end_when_not_all_can_be_started(local_dir: Path):
    code = """
import os, resource
from pathlib import Path
from hpcstage.store.copier import CopierSettings
from hpcstage.store.pool import CopierPool
before = len(os.listdir("/proc/self/fd"))
resource.setrlimit(resource.RLIMIT_NOFILE, (before + 5, before + 5))
try:
    CopierPool(CopierSettings(Path("."), Path("manifest.bin"), 1), 4)
except OSError:
    assert len(os.listdir("/proc/self/fd")) == before, os.listdir("/proc/self/fd")
    try:
        os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        print("all ended")
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=local_dir, capture_output=True, text=True, check=False)
    assert done.stdout == "all ended\n", done.stderr


def test_the_daemon_starts_without_the_modules_that_make_plans():
    code = (
        "import sys, hpcstage.daemon.main; print([name for name in sys.modules if name.startswith('hpcstage.preview')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
