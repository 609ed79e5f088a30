"""Parked wants: every one is answered exactly once."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hpcstage.daemon.queue.answers import Parked


@given(
    st.lists(st.tuples(st.integers(0, 5), st.floats(0, 10)), max_size=30),
    st.lists(st.tuples(st.sampled_from(["settle", "expire", "drop"]), st.integers(0, 30)), max_size=30),
)
def test_every_want_is_answered_once(wants, steps):
    parked = Parked()
    for token, (id_, deadline) in enumerate(wants):
        parked.park(id_, token, deadline)
    answered: list[int] = []
    dropped = set()
    for step, number in steps:
        if step == "settle":
            answered += parked.settle(number % 6)
        elif step == "expire":
            answered += [token for token, _ in parked.expire(number / 3)]
        elif number not in answered:
            parked.drop(number)
            dropped.add(number)
    answered += [token for token, _ in parked.expire(float("inf"))]
    assert len(answered) == len(set(answered))
    assert set(answered) | (dropped & set(range(len(wants)))) == set(range(len(wants)))
    assert len(parked) == 0
    assert parked.ids() == []
    assert parked.next_deadline() is None


def test_order_and_deadline():
    parked = Parked()
    parked.park(7, 1, 5.0)
    parked.park(7, 2, 4.0)
    parked.park(8, 3, 1.0)
    assert parked.next_deadline() == 1.0
    assert parked.expire(2.0) == [(3, 8)]
    assert parked.waits_for(7)
    assert parked.settle(7) == [1, 2]
    assert parked.settle(7) == []
