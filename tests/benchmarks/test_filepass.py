"""Files passed with no exchange: all come, whole, whatever their size, one way and both ways; nothing hangs."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks.filepass import BLOCK, Line, passed
from benchmarks.peernodes import MPIEXEC
from benchmarks.programs import CommandFailed

pytest.importorskip("mpi4py")

PROGRAM = (MPIEXEC, "-n", "2")
SIZES = (0, 1, 1000, BLOCK - 1, BLOCK, 2 * BLOCK + 7)


def lines_of(directory: Path, receivers: Sequence[int]) -> list[Line]:
    directory.mkdir()
    made = []
    for number, size in enumerate(SIZES):
        for to in receivers:
            source, target = directory / f"from {number} {to}", directory / f"to {number} {to}"
            source.write_bytes(os.urandom(size))
            made.append((to, source, target))
    return made


@pytest.mark.parametrize("receivers", [(0, 1), (1,)])
def test_all_come_whole_in_each_pass(tmp_path: Path, receivers: Sequence[int]) -> None:
    passes = [lines_of(tmp_path / name, receivers) for name in ("warm", "measured")]
    seconds = passed(passes, tmp_path, PROGRAM, {})
    assert len(seconds) == 2
    assert min(seconds) > 0
    for _, source, target in (line for lines in passes for line in lines):
        assert target.read_bytes() == source.read_bytes()
    assert not list(tmp_path.glob("*/*.part")), "a file has its name when it is whole"


def test_one_that_fails_ends_both(tmp_path: Path) -> None:
    lines = lines_of(tmp_path / "one", (0, 1))
    lines[0][2].with_name(f"{lines[0][2].name}.part").touch()
    with pytest.raises(CommandFailed, match="FileExistsError"):
        passed([lines], tmp_path, PROGRAM, {})
