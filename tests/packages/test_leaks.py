"""What counts as left behind by a test."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import REPO

MOUNT = "mount -t tmpfs hpcstage-slowfs-$0-1 {place} && exec {pytest}"
TEST = """
import os, signal

def test_beside_whom_another_session_ends():
    os.kill({maker}, signal.SIGKILL)
    while "Z" not in open("/proc/{maker}/stat").read().split()[2]:
        pass
"""


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to mount")
def test_a_mount_that_was_there_before_is_none_that_a_test_left(tmp_path: Path, local_dir: Path) -> None:
    """A namespace of tests has copies of the mounts that others had made, and keeps them when those have ended."""
    shutil.copy(REPO / "tests" / "conftest.py", tmp_path)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    own = f"{sys.executable} -m pytest -q -p no:cacheprovider {tmp_path}"
    words = ["unshare", "--mount", "--propagation", "private", "sh", "-c", MOUNT.format(place=local_dir, pytest=own)]
    with subprocess.Popen(["sleep", "infinity"], env={**os.environ, "HPCSTAGE_TEST_SESSION": "another"}) as maker:
        (tmp_path / "test_it.py").write_text(TEST.format(maker=maker.pid))
        done = subprocess.run(
            [*words, str(maker.pid)], cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False
        )
        maker.kill()
    assert "1 passed in " in done.stdout, done.stdout + done.stderr
