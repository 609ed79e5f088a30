"""Directories from which nothing can be removed, as on a local disk that has become read-only."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


@contextlib.contextmanager
def immutable(*directories: Path) -> Iterator[None]:
    """Makes directories that not even root can change while this lasts; skips where that cannot be had."""
    if os.geteuid() != 0 or shutil.which("chattr") is None:
        pytest.skip("needs root and chattr")
    names = list(map(os.fspath, directories))
    if subprocess.run(["chattr", "+i", *names], capture_output=True, check=False).returncode != 0:
        pytest.skip("this file system has no immutable directories")
    try:
        yield
    finally:
        subprocess.run(["chattr", "-i", *names], check=True)
