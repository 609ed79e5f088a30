"""Reading with the hint to the page cache gives what reading gives, wherever the hint cannot be given, too."""

from __future__ import annotations

import doctest
import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import REPO

from hpcstage.torch import read_file
from hpcstage.torch.samplers import pages


def test_examples_in_docstrings() -> None:
    found = doctest.testmod(pages)
    assert found.failed == 0
    assert found.attempted == 2


@pytest.mark.parametrize("size", [0, 1, 4095, 4096, 4097, 300_000])
def test_all_of_a_file(tmp_path: Path, size: int) -> None:
    path = tmp_path / "sample"
    data = os.urandom(size)
    path.write_bytes(data)
    assert read_file(path) == data
    assert read_file(str(path)) == data


def test_files_that_cannot_be_mapped() -> None:
    assert b"Linux" in read_file("/proc/version")


def test_errors_are_those_of_reading(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="missing"):
        read_file(tmp_path / "missing")
    with pytest.raises(IsADirectoryError):
        read_file(tmp_path)


def test_it_needs_no_torch() -> None:
    code = "import sys; from hpcstage.torch import read_file; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=REPO, timeout=300)
