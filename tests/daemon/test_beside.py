"""When large files are copied beside a program that reads others at the source."""

from __future__ import annotations

import pytest

from hpcstage.daemon.queue.large import TRIAL_WAIT_S, Beside, BytesRead

MB = 1_000_000


class Looks:
    """One a second."""

    def __init__(self) -> None:
        self.beside = Beside()
        self.now = 0.0
        self.program = self.copied = 0

    def after(self, seconds: int, program: int, copied: int = 0, *, reads: bool = True) -> bool:
        for _ in range(seconds):
            self.now += 1
            self.program += program * MB
            self.copied += copied * MB
            self.beside.look(BytesRead(self.now, self.program, self.copied), reads=reads, copies=copied > 0)
        return self.beside.is_allowed


@pytest.fixture
def looks():
    return Looks()


def test_first_it_is_seen_how_the_program_reads_alone(looks):
    assert not looks.after(2, program=30)
    assert looks.after(1, program=30)


def test_what_was_under_way_is_waited_for(looks):
    assert not looks.after(5, program=20, copied=10)
    assert looks.after(3, program=30)


def test_a_source_with_nothing_to_spare(looks):
    looks.after(3, program=30)
    assert not looks.after(4, program=15, copied=15)
    assert not looks.after(int(TRIAL_WAIT_S) - 2, program=30)
    assert looks.after(5, program=30)
    assert not looks.after(4, program=15, copied=15)
    assert not looks.after(int(TRIAL_WAIT_S) + 5, program=30), "twice as long"


def test_a_source_with_something_to_spare(looks):
    looks.after(3, program=30)
    assert looks.after(20, program=25, copied=30)


def test_a_program_whose_reads_are_not_counted(looks):
    looks.after(3, program=0)
    assert looks.after(20, program=0, copied=30)


def test_it_begins_anew_when_the_program_reads_copies(looks):
    looks.after(3, program=30)
    assert not looks.after(1, program=0, copied=30, reads=False)
    assert not looks.after(2, program=30)
    assert looks.after(1, program=30)
