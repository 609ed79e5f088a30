"""Requests that wait: every one is answered exactly once."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hpcstage.daemon.process.server import Reply
from hpcstage.daemon.queue.answers import Answers
from hpcstage.daemon.queue.queue import Queue
from hpcstage.daemon.queue.rates import Limits
from hpcstage.plan.types import Budget
from hpcstage.protocol.shim import Answer, Reason

QUEUE = Queue([1] * 9, Limits(Budget(1 << 40, 1 << 30)))


def recording() -> tuple[Answers, dict[int, Reply]]:
    """Returns answers, and what each token was told."""
    told: dict[int, Reply] = {}

    def answer(token: int, reply: Reply) -> None:
        assert token not in told, "answered twice"
        told[token] = reply

    return Answers(answer), told


@given(
    st.lists(st.tuples(st.integers(0, 5), st.floats(0, 10)), max_size=30),
    st.lists(st.tuples(st.sampled_from(["settle", "expire", "drop"]), st.integers(0, 30)), max_size=30),
    st.booleans(),
)
def test_every_request_is_answered_once(requests, steps, ends):
    answers, told = recording()
    for token, (id_, deadline) in enumerate(requests):
        answers.park(id_, token, deadline)
    dropped = set()
    for step, number in steps:
        if step == "settle":
            answers.settle(number % 6, QUEUE)
        elif step == "expire":
            answers.expire(number / 3)
        elif number not in told:
            answers.drop(number)
            dropped.add(number)
    if ends:
        answers.end(Reason.SETTLED)
    answers.expire(float("inf"))
    assert told.keys() | (dropped & set(range(len(requests)))) == set(range(len(requests)))
    assert answers.requested() == []
    assert answers.next_deadline() is None


def test_order_and_deadline():
    answers, told = recording()
    answers.park(7, 1, 5.0)
    answers.park(7, 2, 4.0)
    answers.park(8, 3, 1.0)
    assert answers.next_deadline() == 1.0
    assert answers.expire(2.0) == [8]
    assert answers.waits_for(7)
    answers.settle(7, QUEUE)
    answers.settle(7, QUEUE)
    assert list(told) == [3, 1, 2]
    assert told[1] == Reply(Answer.DIRECT, Reason.LATER)
