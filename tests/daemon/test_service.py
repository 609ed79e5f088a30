"""The loop over services: each gets its requests, descriptors and turns, and one's mistake does not end the others."""

from __future__ import annotations

import os
import selectors
import socket
import threading

import pytest

from hpcstage.daemon import service
from hpcstage.daemon.process.server import Reply, open_listener
from hpcstage.daemon.service import Loop, Service
from hpcstage.forked import Helpers
from hpcstage.protocol.shim import MESSAGE, REPLY, VERSION, Answer, Kind


class Counting(Service):
    """Reads from a pipe, answers STATUS and ends the loop after so many turns by its clock."""

    kinds = frozenset({Kind.STATUS})

    def __init__(self, loop: Loop, out: int, turns: int) -> None:
        self.loop, self.out, self.left = loop, out, turns
        self.came, self.dropped_tokens = b"", []

    def handle(self, message):
        return Reply(Answer.DONE, value=len(message.payload), keep=True)

    def dropped(self, token):
        self.dropped_tokens.append(token)

    def descriptors(self):
        return {self.out: self.receive} if self.out >= 0 else {}

    def receive(self, fd):
        self.came += os.read(fd, 100)
        return False

    def work(self, now):
        self.left -= bool(self.came and self.dropped_tokens)
        self.loop.is_ending |= self.left <= 0

    def wake_after(self, now):
        return 0.001


class Mistaken(Service):
    """Every turn is a mistake, and so is every request."""

    kinds = frozenset({Kind.HELLO})

    def work(self, now):
        raise RuntimeError("a mistake")

    def handle(self, message):
        raise RuntimeError("a mistake")


@pytest.fixture
def loop(tmp_path):
    with selectors.DefaultSelector() as selector:
        loop = Loop(selector, Helpers(), open_listener(os.fspath(tmp_path / "sock"), None))
        yield loop
        loop.server.close_all()


def ask(connection, kind, payload=b""):
    connection.send(MESSAGE.pack(VERSION, kind, 0, 1) + payload)
    return Answer(REPLY.unpack(connection.recv(100))[1])


def test_a_service_gets_its_requests_descriptors_and_turns(loop, tmp_path, capfd):
    out, into = os.pipe()
    counting = Counting(loop, out, 3)
    answers = []

    def client():
        for kind in (Kind.HELLO, Kind.REQUEST, Kind.STATUS):
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
                connection.connect(os.fspath(tmp_path / "sock"))
                answers.append(ask(connection, kind))
        os.write(into, b"bytes")

    try:
        loop.serve([Mistaken(), counting])
        thread = threading.Thread(target=client)
        thread.start()
        loop.run()
        thread.join()
    finally:
        os.close(out)
        os.close(into)
    assert answers == [Answer.REFUSED, Answer.REFUSED, Answer.DONE], "a mistake, nobody's kind, and an answer"
    assert counting.came == b"bytes"
    assert len(counting.dropped_tokens) == 1, "the one connection that was kept open"
    assert "a mistake" in capfd.readouterr().err


def test_many_mistakes_in_a_short_time_end_the_loop(loop, monkeypatch, capfd):
    monkeypatch.setattr(service, "MOST_MISTAKES", 5)
    loop.serve([Mistaken()])
    for _ in range(5):
        loop.guarded(lambda: Mistaken().work(0.0))
        assert not loop.is_ending
    loop.guarded(lambda: Mistaken().work(0.0))
    assert loop.is_ending
    assert capfd.readouterr().err.count("RuntimeError: a mistake") == 6


def test_mistakes_that_are_long_past_do_not_count(loop, monkeypatch, capfd):
    monkeypatch.setattr(service, "MOST_MISTAKES", 5)
    monkeypatch.setattr(service, "MISTAKES_S", 0.0)
    for _ in range(50):
        loop.guarded(lambda: Mistaken().work(0.0))
    assert not loop.is_ending
    assert "a mistake" in capfd.readouterr().err
