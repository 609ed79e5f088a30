"""The probe on real disks: plausible on fast ones, right on emulated slow ones, bounded on ones that hang."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from hpcstage.emulator import Settings, Slowfs, unavailable
from hpcstage.plan.dataset.datasets import resolve
from hpcstage.plan.dataset.manifest import Manifest
from hpcstage.plan.dataset.scan import scan
from hpcstage.plan.order import orders
from hpcstage.preview.probe import Copying, probe

NO_FUSE = unavailable()
fuse = [pytest.mark.fuse, pytest.mark.skipif(NO_FUSE is not None, reason=str(NO_FUSE))]
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
        started = time.monotonic()
        found = probe(manifest, range(50), local_dir, Copying(), limit_s=1.0)
        assert time.monotonic() - started < 3
        slow.change(metadata_latency_s=0.0)
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
def test_a_file_that_the_limit_cuts_short_is_not_counted(make_tree: Callable[..., Path], local_dir: Path, what: str):
    root = make_tree(files=4, size_bytes=30_000_000)
    with Slowfs(root, Settings(bandwidth_bytes_per_s=20e6)) as slow:
        rates = probe(manifest_of(slow.path), range(4), local_dir, Copying(), limit_s=1.0).rates
    assert rates.copy_files_per_s is None
    assert rates.source_files_per_s is None
    assert rates.copy_bytes_per_s == pytest.approx(20e6, rel=0.35)
    assert os.listdir(local_dir) == []
