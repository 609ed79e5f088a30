"""How long a node's processes may go without a step."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from hpcstage.elastic.seats import HANG_FACTOR, Steps


def test_the_limit_follows_the_longest_step() -> None:
    steps = Steps()
    assert not steps.are_overdue(1e6, 60.0), "nothing is known before the first step"
    for now_s in (0.0, 20.0, 21.0):
        steps.seen(now_s)
    assert not steps.are_overdue(21.0 + 20.0 * HANG_FACTOR, 60.0), "a step of 20 s is no reason for an alarm"
    assert steps.are_overdue(22.0 + 20.0 * HANG_FACTOR, 60.0)


def test_short_steps_have_the_least_limit() -> None:
    steps = Steps()
    for count in range(100):
        steps.seen(count * 0.2)
    assert not steps.are_overdue(19.8 + 60.0, 60.0)
    assert steps.are_overdue(19.9 + 60.0, 60.0)


def test_the_first_step_of_a_membership_has_no_limit() -> None:
    steps = Steps()
    steps.seen(0.0)
    steps.seen(1.0)
    steps.pause()
    assert not steps.are_overdue(1e6, 60.0)
    steps.seen(1e6)
    assert steps.longest_s == 1.0
