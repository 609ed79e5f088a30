"""What is said of processes that have ended and are not told apart any more."""

from __future__ import annotations

import os

from hpcstage.daemon.process.slots import MOST_PARENTS, MOST_TRAINERS, Retired
from hpcstage.daemon.programs import Accounts
from hpcstage.record.parts.rows import ProcessPart


def process(pid: int, parent: int = 1, **counters: int) -> ProcessPart:
    """A row of the page."""
    return ProcessPart(pid, parent, "native", counters)


def test_sums_have_a_row_for_each_parent_until_there_are_many() -> None:
    retired = Retired()
    for pid in range(10_000):
        retired.add(
            process(pid + 10, pid % 1000 + 1, hit_opens=2, attach_ns=100 + pid, exit_ns=150 + pid, readers=pid % 3)
        )
    rows = retired.rows()
    assert len(rows) == MOST_PARENTS + 1
    assert sum(row.processes for row in rows) == 10_000
    assert sum(row.counters["hit_opens"] for row in rows) == 20_000
    assert sum(row.counters["life_ns"] for row in rows) == 10_000 * 50
    rest = next(row for row in rows if row.processes > 10)
    assert (rest.pid, rest.parent_pid, rest.processes) == (0, 0, 10_000 - 10 * MOST_PARENTS)
    assert (rest.counters["attach_ns"], rest.counters["exit_ns"], rest.counters["readers"]) == (164, 10_149, 2)


def test_training_processes_are_told_apart_until_there_are_many() -> None:
    retired = Retired()
    for pid in range(10, 110):
        row = process(pid, loader_steps=3)
        assert retired.tells_apart(row) == (pid < 10 + MOST_TRAINERS)
        retired.add(row)
    assert [row.pid for row in retired.rows()] == [*range(10, 10 + MOST_TRAINERS), 0]
    assert sum(row.counters["loader_steps"] for row in retired.rows()) == 300


def test_what_a_process_read_is_counted_once_whatever_it_ran() -> None:
    """A program that runs another has two rows of one pid, and one counter of the kernel."""
    pid = os.getpid()
    accounts = Accounts()
    accounts.look([pid])
    read = accounts.own_bytes
    assert read > 1000
    accounts.told([process(pid, own_read_bytes=read + 100), process(pid, own_read_bytes=read + 900, is_again=1)])
    assert accounts.own_bytes == read + 900
    accounts.told([process(7, local_read_bytes=300), process(8, own_read_bytes=50)])
    assert accounts.own_bytes == read + 950
