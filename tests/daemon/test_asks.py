"""Asks to other nodes and of other nodes: credits, answers, nodes that do not answer."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hpcstage.daemon.peers.asks import (
    FIRST_FILES,
    LEAST_FILES,
    LONG_S,
    MOST_LATE,
    SILENT_S,
    UNREADY_S,
    Asks,
    by_owner,
)
from hpcstage.daemon.peers.offers import Offers
from hpcstage.daemon.queue.queue import Queue
from hpcstage.daemon.queue.rates import Limits
from hpcstage.plan.types import Budget
from hpcstage.protocol.exchange import Ask


def asks(files=64, size_bytes=1000):
    return Asks(files, size_bytes)


def test_credits_come_back_with_answers():
    out = asks()
    out.asked(1, 5, 400, 0.0)
    out.asked(2, 6, 500, 0.0)
    assert out.free()[1] == 100
    assert out.free()[0] == FIRST_FILES - 2
    assert out.answered(1, 0.1)
    assert not out.answered(1, 0.1), "once only"
    assert out.free()[1] == 500
    assert len(out.ids) == 1


def test_the_window_follows_how_long_answers_take():
    out = asks()
    for id_ in range(200):
        out.asked(id_, 0, 1, float(id_))
        out.answered(id_, id_ + 0.01)
    assert out.free()[0] == 64
    for id_ in range(200):
        out.asked(id_, 0, 1, 300.0 + id_)
        out.answered(id_, 300.0 + id_ + 2 * LONG_S)
    assert out.free()[0] == LEAST_FILES


def test_silent_nodes_are_given_up():
    out = asks()
    out.asked(1, 5, 10, 0.0)
    out.asked(2, 5, 10, 0.0)
    out.asked(3, 6, 10, 0.0)
    out.answered(2, SILENT_S)
    assert sorted(out.give_up(SILENT_S + 1)) == [3]
    assert not out.trusts(6, SILENT_S + 1)
    assert out.trusts(5, SILENT_S + 1)
    out.heard(6, SILENT_S + 2)
    assert out.trusts(6, SILENT_S + 2)


def test_waits_in_vain_end_the_trust():
    out = asks()
    for id_ in range(MOST_LATE):
        assert out.trusts(5, 0.0)
        out.asked(id_, 5, 10, 0.0)
        gone = out.late(5, 1.0)
    assert gone == list(range(MOST_LATE)), "what it was asked for is given up"
    assert not out.trusts(5, 1.0)
    assert not out.answered(0, 2.0)
    out.heard(5, 2.0)
    assert out.trusts(5, 2.0)


def test_nodes_without_a_manifest_are_asked_again_for_a_bounded_time():
    out = asks()
    out.asked(1, 5, 10, 0.0)
    now, tries = 0.0, 0
    while out.unready(1, now):
        wait_s = out.wake_after(now)
        assert wait_s is not None
        assert 0 < wait_s < 2.001
        assert out.due(now) == []
        now += wait_s
        assert out.due(now) == [1]
        tries += 1
    assert UNREADY_S < now < UNREADY_S + 3
    assert tries < 40
    assert len(out.ids) == 0
    assert not out.trusts(5, now)


FILES = 6


def asked(*pairs: tuple[int, int]) -> tuple[Queue, Offers]:
    """A node that other nodes, the second ones, have asked for files."""
    queue = Queue([1] * FILES, Limits(Budget(1 << 20, 10)))
    offers = Offers(queue, FILES, lambda _: None)
    for id_, node in pairs:
        offers.asked(Ask(node, (id_,)), 0.0)
    assert not list(offers.take()), "they wait"
    return queue, offers


def told(queue: Queue, offers: Offers) -> list[tuple[int, int]]:
    queue.void(range(FILES))
    offers.voided(range(FILES))
    found = [(id_, offer.node) for offer in offers.take() for id_ in offer.ids]
    offers.voided(range(FILES))
    assert not list(offers.take()), "once"
    return sorted(found)


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 3)), max_size=40))
def test_every_asker_is_told_once(pairs):
    assert told(*asked(*pairs)) == sorted(set(pairs))


def test_askers_that_leave():
    queue, offers = asked((1, 7), (1, 8), (2, 7))
    offers.drop(7)
    assert told(queue, offers) == [(1, 8)]


def test_by_owner():
    assert by_owner([4, 2, 9], [1, 0, 1]) == {1: [4, 9], 0: [2]}
