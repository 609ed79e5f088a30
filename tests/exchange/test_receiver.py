"""What a node takes from others: rows that it asked that sender for, under its own manifest, and nothing else."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from benchmarks.peernodes import Node, manifest_of
from hpcstage.exchange.files.filereading import Outgoing
from hpcstage.exchange.files.receiver import Receiver
from hpcstage.exchange.lane import Lane, Wake
from hpcstage.exchange.transport.buffers import BufferPool
from hpcstage.exchange.transport.frames import ControlFrame, Sort, open_bundle
from hpcstage.exchange.transport.mpi import Mail
from hpcstage.protocol.exchange import Missed, Why
from hpcstage.store.catalog import Catalog

SIZES = [100, 200, 300, 400]
OTHER = [100, 200, 300, 401]
CONTENTS = [bytes([index]) * size for index, size in enumerate(SIZES)]


class Outbox:
    """In place of MPI: keeps what would be sent."""

    def __init__(self) -> None:
        self.arrivals = BufferPool(2)
        self.sent: list[tuple[ControlFrame, int]] = []

    def send(self, data: bytes, to: int, tag: int) -> None:
        self.sent.append((ControlFrame.unpack(data), to))


class Desk:
    """Node 0 of three, whose receiver is driven by hand; nodes 1 and 2 fill bundles."""

    def __init__(self, top: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.monkeypatch = monkeypatch
        self.nodes = [Node(top / f"v{index}", index, 3, manifest_of(SIZES)) for index in range(3)]
        for node in self.nodes:
            (node.path / "incoming/peer").mkdir()
            for id_, content in enumerate(CONTENTS) if node.index else ():
                node.stage(id_, content)
        self.lane = Lane("test", Wake(), slow_s=60.0)
        self.outbox = Outbox()
        self.receiver = Receiver(self.outbox, self.lane, [10, 11, 12])  # type: ignore[arg-type]
        self.catalog = self.catalog_of(self.nodes[0])

    def catalog_of(self, node: Node) -> Catalog:
        self.monkeypatch.chdir(node.path)
        return Catalog(Path("manifest.bin"), b"incoming/peer/")

    def comes(self, sender: int, ids: list[int]) -> None:
        """A bundle of these ids arrives."""
        outgoing, buffer = Outgoing(), self.outbox.arrivals.take()
        outgoing.ids.extend(ids)
        filled = outgoing.fill(buffer, self.catalog_of(self.nodes[sender]))
        assert len(filled.rows) == len(ids)
        bundle = open_bundle(buffer.view[: filled.length])
        self.monkeypatch.chdir(self.nodes[0].path)
        self.receiver.bundle(Mail(sender, buffer.view, buffer), bundle, self.catalog)
        self.lane.collect()
        assert not buffer.users, "the buffer is given back"

    def stored(self) -> dict[int, bytes]:
        return {id_: self.nodes[0].file(id_).read_bytes() for id_ in range(4) if self.nodes[0].file(id_).exists()}

    def remove(self) -> None:
        for node in self.nodes:
            node.remove()


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    made = Desk(tmp_path, monkeypatch)
    yield made
    made.remove()


def test_what_was_asked_for_is_stored(desk: Desk):
    desk.receiver.fetch(1, [2, 0], desk.catalog)
    assert [(control.sort, control.ids, to) for control, to in desk.outbox.sent] == [(Sort.ASK, (2, 0), 1)]
    desk.comes(1, [0, 2])
    assert desk.stored() == {0: CONTENTS[0], 2: CONTENTS[2]}
    assert sorted(got.id for got in desk.receiver.got) == [0, 2]
    assert {got.node for got in desk.receiver.got} == {11}


def test_rows_that_were_not_asked_for_are_left(desk: Desk):
    desk.receiver.fetch(1, [2], desk.catalog)
    desk.comes(1, [0, 2, 3])
    assert desk.stored() == {2: CONTENTS[2]}
    desk.comes(1, [0, 2])
    assert desk.stored() == {2: CONTENTS[2]}, "nor what has come before"
    assert [got.id for got in desk.receiver.got] == [2]


def test_what_was_asked_of_another_node_is_left(desk: Desk):
    desk.receiver.fetch(1, [2], desk.catalog)
    desk.comes(2, [2])
    assert desk.stored() == {}
    assert desk.receiver.got == []
    desk.comes(1, [2])
    assert desk.stored() == {2: CONTENTS[2]}


def test_what_was_refused_is_left_when_it_comes_all_the_same(desk: Desk):
    desk.receiver.fetch(1, [2], desk.catalog)
    desk.receiver.refused(2, Why.LOST, [2])
    assert desk.receiver.missed == [], "by somebody else"
    desk.receiver.refused(1, Why.LOST, [2, 3])
    assert desk.receiver.missed == [Missed(11, Why.LOST, (2,))]
    desk.lane.collect()
    desk.comes(1, [2])
    assert desk.stored() == {}


def test_a_bundle_of_another_manifest_is_left(desk: Desk):
    desk.receiver.fetch(1, [0, 2], desk.catalog)
    manifest_of(OTHER).save(desk.nodes[1].path / "manifest.bin")
    desk.comes(1, [0, 2])
    assert desk.stored() == {}
    assert desk.receiver.got == []
    assert os.listdir(desk.nodes[0].path / "incoming/peer") == []
