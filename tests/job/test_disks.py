"""Windows of reading ahead, as the kernel tells them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hpcstage.job.disks import device_kind, window_bytes

MOUNTS = b"""22 1 254:0 / / rw,relatime - ext4 /dev/vda rw
40 22 0:35 / /scratch\\040one rw shared:7 master:1 - fuse.slowfs slowfs rw,user_id=0
41 22 0:36 / /lustre rw - lustre 10.0.0.1@o2ib:/lustre rw
42 22 0:37 rw - broken
"""


@pytest.mark.parametrize(
    ("number", "kind"), [(b"254:0", "ext4"), (b"0:35", "fuse"), (b"0:36", "lustre"), (b"0:3", None), (b"/", None)]
)
def test_the_file_system_of_a_device(number: bytes, kind: str | None) -> None:
    assert device_kind(MOUNTS, number) == kind


def test_a_device_whose_file_system_is_not_read_ahead_has_no_window() -> None:
    assert window_bytes(os.stat("/proc").st_dev) is None
    assert window_bytes(os.makedev(4095, 1048575)) is None


def test_the_window_of_a_device_is_that_of_the_kernel(tmp_path: Path) -> None:
    device = tmp_path.stat().st_dev
    told = Path(f"/sys/class/bdi/{os.major(device)}:{os.minor(device)}/read_ahead_kb")
    if not told.exists() or window_bytes(device) is None:
        pytest.skip("the kernel does not say how far it reads ahead of files in the temporary directory")
    assert window_bytes(device) == int(told.read_text()) * 1024
