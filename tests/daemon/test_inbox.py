"""What comes before there is a manifest: nothing is lost that matters, and writes come first."""

from __future__ import annotations

from hpcstage.daemon.inbox import MOST_LIMITED, Inbox
from hpcstage.daemon.service import Message
from hpcstage.protocol import exchange
from hpcstage.protocol.shim import Kind

REQUEST, OTHER = Message(1, Kind.REQUEST, 7, b"/data/a"), Message(2, Kind.REQUEST, 7, b"/data/b")
WROTE, LANDED = Message(3, Kind.WROTE, 7, b"/data/a"), Message(4, Kind.LANDED, 7, bytes(16))
EPOCH, ORDER = Message(5, Kind.EPOCH, 7, b""), Message(6, Kind.ORDER, 7, b"list")
STAGED = Message(8, Kind.STAGED, 7, b"")


def filled(*items):
    inbox = Inbox()
    for item in items:
        assert inbox.keep(item)
    return inbox


def test_writes_are_taken_alone_and_the_rest_in_order():
    written, ask = exchange.Written(1, 7, (3, 4)), exchange.Ask(1, (5,))
    inbox = filled(REQUEST, EPOCH, WROTE, ask, written, ORDER, LANDED, OTHER)
    assert inbox.take_writes() == [WROTE, written, LANDED]
    assert inbox.take() == [REQUEST, EPOCH, ask, ORDER, OTHER]
    assert inbox.take() == inbox.take_writes() == []


def test_requests_that_have_waited_long_enough_leave_the_rest():
    inbox = filled(REQUEST, STAGED, WROTE, OTHER)
    assert inbox.take_requests() == [REQUEST, OTHER]
    assert inbox.take() == [STAGED, WROTE]


def test_a_connection_that_ends_takes_along_what_waits_for_an_answer_only():
    inbox = filled(REQUEST, WROTE, STAGED, OTHER)
    for token in (REQUEST.token, WROTE.token, STAGED.token):
        inbox.drop(token)
    assert inbox.take() == [WROTE, OTHER]


def test_a_group_that_ends_takes_along_what_it_asked_for_only():
    written = exchange.Written(1, 7, (3,))
    inbox = filled(exchange.Ask(1, (5,)), REQUEST, exchange.Ask(2, (6,)), written)
    assert inbox.take_asks() == [exchange.Ask(1, (5,)), exchange.Ask(2, (6,))]
    assert inbox.take() == [REQUEST, written]


def test_orders_are_limited_and_writes_are_not():
    inbox = Inbox()
    assert all(inbox.keep(EPOCH) for _ in range(MOST_LIMITED))
    assert not inbox.keep(ORDER)
    asks = [exchange.Ask(1, (5,))] * MOST_LIMITED
    assert all(inbox.keep(ask) for ask in asks)
    assert not inbox.keep(asks[0])
    assert len(inbox.take_asks()) == MOST_LIMITED
    assert inbox.keep(asks[0])
    assert all(inbox.keep(WROTE) for _ in range(2 * MOST_LIMITED))
    assert len(inbox.take()) == 3 * MOST_LIMITED + 1
