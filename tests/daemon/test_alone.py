"""What the source gives to one reader alone: the first transfers one at a time, and a few opens afterwards."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from hpcstage.daemon.copying.alone import FIRST_S, LEAST_FILES, MOST_S, Alone, reopen
from hpcstage.record.parts.part import AlonePart
from hpcstage.store.copyfile import Status
from hpcstage.store.messages import Result

MS = 1_000_000


def copied(id_: int, status: Status = Status.OK) -> Result:
    return Result(id_, status, size_bytes=1000, open_ns=2 * MS, read_ns=8 * MS)


def test_the_first_files_go_one_at_a_time_and_then_all_that_may() -> None:
    alone = Alone()
    for number in range(LEAST_FILES):
        now = number * 0.01
        assert alone.may_begin(32, 0, now) == 1
        assert alone.may_begin(31, 1, now) == 0
        alone.took(copied(number), now + 0.01)
    assert alone.may_begin(32, 0, 0.1) == 32
    assert alone.wake_after(0.1) is None
    assert alone.record() == AlonePart(files=8, open_ns=16 * MS, read_ns=64 * MS)


def test_a_slow_source_is_not_waited_for() -> None:
    alone = Alone()
    assert alone.may_begin(32, 0, 10.0) == 1
    assert alone.wake_after(10.1) == pytest.approx(FIRST_S - 0.1)
    assert alone.may_begin(31, 1, 10.0 + FIRST_S) == 31
    alone.took(copied(0), 11.0)
    assert alone.record() == AlonePart()  # others were beside it


def test_however_long_it_takes_it_ends() -> None:
    alone = Alone()
    alone.may_begin(32, 0, 0.0)
    alone.took(copied(0), 0.2)
    assert alone.may_begin(32, 0, 0.2) == 1
    assert alone.may_begin(31, 1, 0.2 + MOST_S) == 31


def test_what_failed_says_nothing() -> None:
    alone = Alone()
    alone.may_begin(32, 0, 0.0)
    alone.took(copied(0, Status.SOURCE_ERROR), 0.01)
    assert alone.record() == AlonePart()


def test_opens_afterwards_tell_what_an_open_takes_and_that_memory_keeps_the_files(tmp_path: Path) -> None:
    paths = []
    for index in range(3):
        path = tmp_path / str(index)
        path.write_bytes(os.urandom(20_000))
        path.read_bytes()
        paths.append(os.fsencode(path))
    files, open_ns, kept_share = json.loads(reopen([*paths, b"/nonexistent"]))
    assert files == 3
    assert 0 < open_ns < 1e9
    assert kept_share == 1.0
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)
    assert json.loads(reopen(paths))[2] == 0.0
