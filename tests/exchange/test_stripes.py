"""Which rows of a bundle of stripes an exchange takes: those that continue what a copier of its node waits for, from
the node that was asked. Driven by hand, without MPI."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.peernodes import Node, manifest_of
from hpcstage.exchange.files.stripeservice import StripeService
from hpcstage.exchange.lane import Lane, Wake
from hpcstage.exchange.transport.buffers import BufferPool
from hpcstage.exchange.transport.frames import BundleRow, ControlFrame, Sort, close_bundle
from hpcstage.exchange.transport.mpi import Mail
from hpcstage.protocol.arriving import LEAST_STRIPE_BYTES
from hpcstage.store.arrivingrows import StripeShare
from hpcstage.store.catalog import LateCatalog
from hpcstage.store.peerstripes import PeerStripes

MB = LEAST_STRIPE_BYTES
SIZE = 20 * MB + 100
HALF = MB // 2


class Post:
    """In place of MPI: keeps what would be sent."""

    def __init__(self) -> None:
        self.arrivals, self.sends = BufferPool(2), BufferPool(2)
        self.sent: list[tuple[ControlFrame, int]] = []

    def send(self, data: bytes, to: int, tag: int) -> None:
        self.sent.append((ControlFrame.unpack(data), to))


class Desk:
    """The exchange of node 0 of three, and a copier that brings file 0 there."""

    def __init__(self, node: Node) -> None:
        self.post = Post()
        station: Any = SimpleNamespace(
            post=self.post, lanes=SimpleNamespace(reading=Lane("test", Wake(), slow_s=60.0)), membership=range(3),
            nodes=[0, 1, 2], ended=False, place=lambda node: node or None, files_at=0.0,
        )  # fmt: skip
        self.root = LateCatalog("incoming")
        self.service = StripeService(station, self.root)
        found = PeerStripes.connect(0, SIZE, MB, StripeShare(0, (0, 1, 2)))
        assert found is not None
        self.copier = found
        assert node.manifest is not None
        self.service.ready()  # the copier is accepted
        self.service.ready()

    def ask(self, *stripes: int) -> None:
        for stripe in stripes:
            self.copier.ask(stripe, time.monotonic())
        self.service.ready()

    def comes(self, sender: int, *parts: tuple[int, bytes], size: int = SIZE, fingerprint: int | None = None) -> None:
        """A bundle with these bytes of the file, each with its place."""
        buffer, rows, at = self.post.arrivals.take(), [], 0
        for start, data in parts:
            buffer.view[at : at + len(data)] = data
            rows.append(BundleRow(0, 0, size, start, len(data), at, 0))
            at += len(data)
        assert self.root.catalog is not None
        print_ = self.root.catalog.fingerprint if fingerprint is None else fingerprint
        length = close_bundle(buffer.view, at, rows, print_, Sort.STRIPES)
        self.service.take(Mail(sender, buffer.view[:length], buffer))
        assert not buffer.users, "the buffer is given back"

    def got(self) -> dict[int, bytes | None]:
        return {stripe: None if data is None else bytes(data) for stripe, data in self.copier.answers(0.0)}


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Desk]:
    node = Node(tmp_path / "v0", 0, 3, manifest_of([SIZE, SIZE]))
    monkeypatch.chdir(node.path)
    made = Desk(node)
    yield made
    made.copier.close()
    made.service.stop()
    node.remove()


def test_a_stripe_comes_in_pieces(desk: Desk) -> None:
    desk.ask(1, 20)
    assert [(frame.sort, frame.ids, to) for frame, to in desk.post.sent] == [
        (Sort.ASK_STRIPES, (0, 1), 1),
        (Sort.ASK_STRIPES, (0, 20), 2),
    ]
    desk.comes(1, (MB, b"a" * HALF))
    assert desk.got() == {}
    desk.comes(2, (20 * MB, b"e" * 100))
    desk.comes(1, (MB + HALF, b"b" * HALF))
    assert desk.got() == {20: b"e" * 100, 1: b"a" * HALF + b"b" * HALF}


def test_bytes_that_continue_nothing_are_left(desk: Desk) -> None:
    desk.ask(1)
    desk.comes(1, (MB + HALF, b"x" * HALF))
    desk.comes(1, (MB, b"a" * HALF))
    desk.comes(1, (MB, b"x" * HALF))
    desk.comes(1, (4 * MB, b"x" * 1000), (MB + HALF, b"b" * HALF))
    assert desk.got() == {1: b"a" * HALF + b"b" * HALF}


def test_what_was_asked_of_another_node_is_left(desk: Desk) -> None:
    desk.ask(1, 4)
    desk.comes(2, (MB, b"x" * HALF))
    desk.comes(1, (MB, b"a" * HALF), (MB + HALF, b"b" * 1000))
    desk.comes(1, (MB + HALF + 1000, b"c" * (HALF - 1000)))
    assert desk.got() == {1: b"a" * HALF + b"b" * 1000 + b"c" * (HALF - 1000)}
    desk.service.take(Mail(2, memoryview(ControlFrame(Sort.NO_STRIPES, ids=(0, 4)).pack()), None))
    assert desk.got() == {}
    desk.service.take(Mail(1, memoryview(ControlFrame(Sort.NO_STRIPES, ids=(0, 4)).pack()), None))
    assert desk.got() == {4: None}


def test_a_row_that_is_too_long_or_of_another_file_is_left(desk: Desk) -> None:
    desk.ask(1)
    desk.comes(1, (MB, b"x" * 1000), size=SIZE + 1)
    desk.comes(1, (MB, b"x" * 1000), fingerprint=7)
    desk.comes(1, (MB, b"a" * HALF))
    desk.comes(1, (MB + HALF, b"x" * (HALF + 1)))
    desk.comes(1, (MB + HALF, b"b" * HALF))
    assert desk.got() == {1: b"a" * HALF + b"b" * HALF}


def test_nobody_is_asked_for_what_a_file_does_not_have(desk: Desk) -> None:
    desk.ask(22)
    assert desk.post.sent == []
    assert desk.got() == {22: None}


@pytest.mark.parametrize("is_late", [False, True])
def test_a_refusal_of_a_node_that_was_given_up_is_none_of_the_next_one(desk: Desk, is_late: bool) -> None:
    def refuse(stripe: int) -> None:
        desk.service.take(Mail(1, memoryview(ControlFrame(Sort.NO_STRIPES, ids=(0, stripe)).pack()), None))

    desk.ask(1, 4)
    refuse(1)
    assert desk.got() == {1: None, 4: None}
    desk.copier.ask(4, time.monotonic())
    if not is_late:
        refuse(4)
    desk.service.ready()
    if is_late:
        refuse(4)
    assert desk.got() == {}
    desk.comes(2, (4 * MB, b"e" * HALF))
    desk.comes(2, (4 * MB + HALF, b"f" * HALF))
    assert desk.got() == {4: b"e" * HALF + b"f" * HALF}
    assert desk.copier.lost == {1}
