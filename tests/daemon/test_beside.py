"""When large files are copied beside a program that reads others at the source."""

from __future__ import annotations

import pytest
from hpcstage.daemon.queue.beside import LEAST_SPRINT_S, SPRINT_AFTER_S, TRIAL_WAIT_S, Beside, BytesRead, PaceBeside

MB = 1_000_000


class Looks:
    """One a second."""

    def __init__(self) -> None:
        self.beside = Beside()
        self.now = 0.0
        self.program = self.copied = self.program_s = 0.0

    def after(
        self,
        seconds: float,
        program: int,
        copied: int = 0,
        *,
        in_calls: float = 0.5,
        every: float = 1,
        reads: bool = True,
    ) -> PaceBeside:
        """`in_calls`: the program is so many seconds of each in calls that read."""
        for _ in range(int(seconds / every)):
            self.now += every
            self.program += program * MB * every
            self.copied += copied * MB * every
            self.program_s += in_calls * every
            read = BytesRead(self.now, int(self.program), int(self.copied), program_s=self.program_s)
            self.beside.look(read, reads=reads, copies=copied > 0)
        return self.beside.pace


@pytest.fixture
def looks():
    return Looks()


def until_full(looks: Looks, **each_second: float) -> None:
    while looks.after(1, **each_second) is not PaceBeside.FULL:
        assert looks.now < 2 * SPRINT_AFTER_S


def test_first_it_is_seen_how_the_program_reads_alone(looks):
    assert looks.after(2, program=30) is PaceBeside.NOT
    assert looks.after(1, program=30) is PaceBeside.YIELDING


def test_what_was_under_way_is_waited_for(looks):
    assert looks.after(5, program=20, copied=10) is PaceBeside.NOT
    assert looks.after(3, program=30) is PaceBeside.YIELDING


def test_a_source_with_nothing_to_spare(looks):
    looks.after(3, program=30)
    assert looks.after(4, program=15, copied=15) is PaceBeside.NOT
    assert looks.after(int(TRIAL_WAIT_S) - 2, program=30) is PaceBeside.NOT
    assert looks.after(5, program=30) is PaceBeside.YIELDING
    assert looks.after(4, program=15, copied=15) is PaceBeside.NOT
    assert looks.after(int(TRIAL_WAIT_S) + 5, program=30) is PaceBeside.NOT, "twice as long"


def test_a_source_with_much_to_spare(looks):
    looks.after(3, program=30)
    assert looks.after(SPRINT_AFTER_S - 2, program=30, copied=30) is PaceBeside.YIELDING
    assert looks.after(4, program=30, copied=30) is PaceBeside.FULL
    assert looks.after(30, program=30, copied=300, in_calls=0.6) is PaceBeside.FULL


def test_reads_that_take_longer_beside_a_copy_that_does_not_yield(looks):
    """Less is read by less than what is copied, and yet each read takes seven times as long."""
    looks.after(3, program=7, in_calls=1.0)
    until_full(looks, program=7, copied=1, in_calls=1.0)
    assert looks.beside.is_sprinting
    assert looks.after(LEAST_SPRINT_S, program=1, copied=18, in_calls=1.0, every=LEAST_SPRINT_S) is PaceBeside.YIELDING
    assert not looks.beside.is_sprinting
    assert looks.after(2 * SPRINT_AFTER_S - 2, program=7, copied=1, in_calls=1.0) is PaceBeside.YIELDING, (
        "twice as long"
    )
    assert looks.after(4, program=7, copied=1, in_calls=1.0) is PaceBeside.FULL


def test_computing_says_nothing_about_the_source(looks):
    looks.after(3, program=30)
    until_full(looks, program=30, copied=30)
    assert looks.after(1, program=0, copied=90, in_calls=0.0, every=LEAST_SPRINT_S) is PaceBeside.FULL
    assert looks.beside.is_sprinting
    assert looks.after(LEAST_SPRINT_S, program=30, copied=90, every=LEAST_SPRINT_S) is PaceBeside.FULL
    assert not looks.beside.is_sprinting


def test_without_a_copy_nothing_is_to_be_seen_soon(looks):
    looks.after(3, program=30)
    until_full(looks, program=30, copied=30)
    assert looks.beside.is_sprinting
    assert looks.after(1, program=30) is PaceBeside.YIELDING
    assert not looks.beside.is_sprinting
    assert looks.after(5, program=30, copied=30) is PaceBeside.FULL, "it is seen with the next copy"


def test_a_program_whose_reads_are_not_counted(looks):
    looks.after(3, program=0, in_calls=0.0)
    assert looks.after(20, program=0, copied=30, in_calls=0.0) is PaceBeside.FULL


def test_it_begins_anew_when_the_program_reads_copies(looks):
    looks.after(3, program=30)
    assert looks.after(1, program=0, copied=30, reads=False) is PaceBeside.NOT
    assert looks.after(2, program=30) is PaceBeside.NOT
    assert looks.after(1, program=30) is PaceBeside.YIELDING
