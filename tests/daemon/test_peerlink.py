"""The connection to the exchange: nothing waits, and its end is told once, in its turn."""

from __future__ import annotations

import selectors
import socket
import threading
from collections.abc import Iterator

import pytest

from hpcstage.daemon.peers import exchangelink
from hpcstage.daemon.peers.exchangelink import MOST_OUT, PeerLink
from hpcstage.protocol import exchange


class Side:
    """A daemon's side of a link, with its loop."""

    def __init__(self) -> None:
        own, self.other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.selector = selectors.DefaultSelector()
        self.messages: list[exchange.Message] = []
        self.ends: list[str] = []
        self.link = PeerLink(own, self.selector, self.messages.append, self.ends.append)

    def turn(self) -> None:
        for key, _ in self.selector.select(0.1):
            key.data()


@pytest.fixture
def side() -> Iterator[Side]:
    """See Side."""
    found = Side()
    yield found
    found.link.close()
    found.other.close()
    found.selector.close()


def test_messages_both_ways(side):
    side.link.send(exchange.Fetch(3, (1, 2)))
    assert exchange.unpack(side.other.recv(1000)) == exchange.Fetch(3, (1, 2))
    side.other.send(exchange.pack(exchange.Sent(2, 3, 4)))
    got = [exchange.Got(1, id_, 5, 6) for id_ in range(3)]
    side.other.send(next(exchange.pack_all(got)))
    side.turn()
    assert side.messages == [exchange.Sent(2, 3, 4), *got]
    side.link.close()
    assert side.other.recv(10) == b""
    assert side.ends == []


def test_what_has_no_room_goes_later_and_in_order(side):
    sent = [exchange.Fetch(0, tuple(range(n, n + 1000))) for n in range(300)]
    for message in sent:
        side.link.send(message)
    received = []
    while len(received) < len(sent):
        received.append(exchange.unpack(side.other.recv(exchange.MAX_MESSAGE_BYTES)))
        if not len(received) % 10:
            side.turn()
    assert received == sent


def test_an_exchange_that_does_not_read_is_given_up(side):
    for number in range(MOST_OUT + 2000):
        side.link.send(exchange.Offer(number, exchange.Why.NONE, tuple(range(100))))
        assert side.ends == [], "who sends is not interrupted"
    side.turn()
    assert side.ends == ["the exchange does not read what it is told"]
    side.link.send(exchange.End())


def test_the_end_is_told_once(side):
    side.other.close()
    side.link.send(exchange.End())
    assert side.ends == []
    side.turn()
    assert len(side.ends) == 1
    assert not side.selector.get_map()


def test_the_last_message_comes_where_the_socket_was_full(side):
    sent = [exchange.Fetch(0, tuple(range(n, n + 1000))) for n in range(300)]
    for message in sent:
        side.link.send(message)
    received = []

    def read():
        while data := side.other.recv(exchange.MAX_MESSAGE_BYTES):
            received.append(exchange.unpack(data))

    reader = threading.Thread(target=read)
    reader.start()
    side.link.finish(exchange.End())
    reader.join(20)
    assert received == [*sent, exchange.End()]
    assert side.ends == []


def test_an_exchange_that_reads_nothing_holds_up_no_end(side, monkeypatch):
    monkeypatch.setattr(exchangelink, "FINISH_S", 0.1)
    for number in range(MOST_OUT // 2):
        side.link.send(exchange.Offer(number, exchange.Why.NONE, tuple(range(100))))
    side.link.finish(exchange.End())
    assert not side.selector.get_map()
    assert side.ends == []
