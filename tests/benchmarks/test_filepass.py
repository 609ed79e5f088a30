"""Files passed with no exchange: all come, whole, whatever their size, by one process and by a socket."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from benchmarks.filepass import BLOCK, Pass, passed

SIZES = (0, 1, 1000, BLOCK - 1, BLOCK, 2 * BLOCK + 7)


def files_of(directory: Path) -> list[tuple[Path, Path]]:
    directory.mkdir()
    made = []
    for number, size in enumerate(SIZES):
        source, target = directory / f"from {number}", directory / f"to {number}"
        source.write_bytes(os.urandom(size))
        made.append((source, target))
    return made


@pytest.mark.parametrize("address", [None, "127.0.0.1"])
def test_both_ways_at_the_same_time(tmp_path: Path, address: str | None) -> None:
    ways = [files_of(tmp_path / name) for name in ("one", "other")]
    assert passed([Pass(files, address) for files in ways], tmp_path) > 0
    for source, target in (pair for files in ways for pair in files):
        assert target.read_bytes() == source.read_bytes()


@pytest.mark.parametrize("address", [None, "127.0.0.1"])
def test_one_that_fails_says_so(tmp_path: Path, address: str | None) -> None:
    files = files_of(tmp_path / "one")
    files[0][1].touch()
    with pytest.raises(RuntimeError, match="ended with 1"):
        passed([Pass(files, address)], tmp_path)


def test_a_receiver_whose_sender_never_comes_is_ended(tmp_path: Path) -> None:
    sides = ((), ()), (("false",), ())
    with pytest.raises(RuntimeError, match="before it began"):
        passed(
            [Pass(files_of(tmp_path / name), "127.0.0.1", side) for name, side in zip("ab", sides, strict=True)],
            tmp_path,
        )
