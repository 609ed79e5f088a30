"""The new disk of each sample, and that no device is left of it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from benchmarks import disk
from benchmarks.disk import FreshDisk, fresh_disk


def devices_below(directory: Path) -> list[str]:
    words = ["losetup", "--list", "--noheadings", "--output", "BACK-FILE"]
    lines = subprocess.run(words, check=True, capture_output=True, text=True).stdout.splitlines()
    return [line for line in lines if os.fspath(directory) in line]


@pytest.fixture
def loop(tmp_path: Path) -> FreshDisk:
    fresh = FreshDisk(tmp_path)
    try:
        fresh.renew()
        if not fresh.is_loop:
            pytest.skip("needs root, mkfs.ext4 and a loop device")
    finally:
        fresh.end()
    return FreshDisk(tmp_path)


def test_each_is_empty_and_nothing_is_left(tmp_path: Path, loop: FreshDisk) -> None:
    with fresh_disk(tmp_path) as fresh:
        (fresh.renew() / "file").write_bytes(b"x")
        assert "file" not in os.listdir(fresh.renew())
        assert devices_below(tmp_path)
    assert not devices_below(tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_device_that_was_attached_and_not_mounted_goes(
    tmp_path: Path, loop: FreshDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ended(image: Path) -> str | None:
        attach(image)
        raise KeyboardInterrupt

    attach = disk._attach
    monkeypatch.setattr(disk, "_attach", ended)
    with pytest.raises(KeyboardInterrupt):
        loop.renew()
    assert devices_below(tmp_path)
    loop.end()
    assert not devices_below(tmp_path)
    assert not list(tmp_path.iterdir())
