"""How long an exchange sleeps: not at all beside messages that move, ever longer where nothing does."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from hpcstage.exchange.loop import BUSY_S, LAZY_SLEEP_S, LEAST_SLEEP_S, MOST_SLEEP_S, SLEEP_SHARE, Exchange
from hpcstage.exchange.service import ExchangeService


def sleep_s(still_s: float, *, is_active: bool = False, is_lazy: bool = False) -> float:
    """How long an exchange sleeps in which nothing has happened for a while."""
    post = SimpleNamespace(is_active=is_active, is_lazy=is_lazy)
    station: Any = SimpleNamespace(post=post, membership=None)
    exchange = Exchange(station, [ExchangeService(station)])
    return exchange._sleep_s(exchange._moved + still_s)


@pytest.mark.parametrize("still_s", [3e-3, 10e-3, 40e-3])
def test_messages_that_are_under_way_are_moved_on_all_the_time(still_s: float) -> None:
    """Six pieces of a MiB each way, which a network moves side by side, end together: 12 ms from now at 1 GB/s."""
    assert sleep_s(still_s, is_active=True) <= 100e-6


def test_nothing_sleeps_while_messages_come_one_after_the_other() -> None:
    assert sleep_s(BUSY_S / 2, is_active=True) == 0.0


def test_who_does_not_answer_is_asked_less_and_less() -> None:
    slept = [sleep_s(still_s, is_active=True) for still_s in (0.06, 0.1, 0.15, 1.0)]
    assert slept == sorted(slept)
    assert slept[0] < 2e-3
    assert slept[-1] == MOST_SLEEP_S


def test_an_exchange_at_rest_sleeps() -> None:
    assert sleep_s(0.0) == LEAST_SLEEP_S
    assert sleep_s(0.0, is_lazy=True) == LAZY_SLEEP_S
    assert sleep_s(40e-3) == pytest.approx(40e-3 * SLEEP_SHARE)
    assert sleep_s(10.0) == MOST_SLEEP_S
