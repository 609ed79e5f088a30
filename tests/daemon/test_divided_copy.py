"""A node's part of a file that is divided: its own stripes stay, those of others come for readers and go again. A real
copier, and a stand-in for the exchange."""

from __future__ import annotations

import os
import select
import signal
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from copyingnode import CopyingNode, Row

from hpcstage.daemon.queue.rates import Limits
from hpcstage.daemon.queue.states import FileState, NodeShare
from hpcstage.exchange.files.stripeport import StripePort
from hpcstage.plan.placement.division import LEAST_WINDOW, WINDOW_BYTES, own_bytes, room_bytes
from hpcstage.plan.types import Budget
from hpcstage.protocol import arriving as wire
from hpcstage.protocol.arriving import Priority
from hpcstage.store import copyfile, dividedcopy

MB = wire.LEAST_STRIPE_BYTES
STRIPES = 91
SIZE = (STRIPES - 1) * MB + 1000
PLACE, NODES = 1, 2
OWN, OTHERS = list(range(1, STRIPES, 2)), list(range(0, STRIPES, 2))
WINDOW = WINDOW_BYTES // MB
SLACK = 2 * MB
"""The file system may take more than what is written."""


class Exchange:
    """Gives what copiers ask for, as another node would, but for what it refuses."""

    def __init__(self, source: Path) -> None:
        """Listens in the working directory."""
        self.refuses = False
        self.asked: list[int] = []
        self._content = source.read_bytes()
        self._port = StripePort()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        while not self._ended.is_set():
            select.select([self._port.fileno()], [], [], 0.05)
            for link, one in self._port.take()[0]:
                assert one.node == 1 - PLACE
                self.asked.append(one.stripe)
                if not self.refuses:
                    link.put(one.slot, 0, memoryview(self._content)[one.stripe * MB : (one.stripe + 1) * MB])
                link.answer(one.stripe, one.slot, is_here=not self.refuses)

    def end(self) -> None:
        self._ended.set()
        self._thread.join()
        self._port.close()


def evicted(node_dir: Path) -> int:
    """How often stripes have gone, plus one."""
    data = (node_dir / wire.ARRIVING_FILE).read_bytes()
    return int(struct.unpack_from("<I", data, wire.ARRIVING_HEADER_BYTES + wire.EVICTED_OFFSET)[0])


class Node(CopyingNode):
    """One file of which this node keeps every second stripe."""

    def __init__(self, tmp_path: Path, node_dir: Path, rate: float | None = None) -> None:
        super().__init__(tmp_path, node_dir, SIZE, Limits(Budget(200 * MB, 100), shared=True), rate=rate)
        room = room_bytes(SIZE, PLACE, NODES)
        self.queue.divide(NodeShare((), (), (), Budget(40 * MB, 10), {0: room}, PLACE, NODES))
        self.queue.from_peers.linked = True

    def put(self, offset: int, value: int) -> None:
        """As a reader or an exchange writes a word of the row."""
        with (self.node_dir / wire.ARRIVING_FILE).open("r+b") as file:
            file.seek(wire.ARRIVING_HEADER_BYTES + offset)
            file.write(struct.pack("<I", value))

    def reads(self, stripe: int, reader: int = 0) -> None:
        """As a reader in order says what it needs next."""
        self.until(lambda: self.row().holds)
        self.put(wire.READERS_OFFSET + 4 * reader, stripe + 1)

    def check(self) -> list[int]:
        """Returns the stripes that have arrived, which are the source's, as a reader sees it."""
        content, count = self.source.read_bytes(), -1
        while count != evicted(self.node_dir):
            count, row = evicted(self.node_dir), self.row()
            arrived = row.arrived if row.holds else []
            with row.incoming.open("rb") as file:
                found = {stripe: os.pread(file.fileno(), MB, stripe * MB) for stripe in arrived}
        assert all(data == content[stripe * MB : (stripe + 1) * MB] for stripe, data in found.items())
        return arrived

    @property
    def is_kept(self) -> bool:
        return 0 in self.queue.divided.kept

    @property
    def taken_bytes(self) -> int:
        """What the incoming file takes on the disk."""
        return self.row().incoming.stat().st_blocks * 512


@pytest.fixture
def node(tmp_path: Path, local_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Node]:
    monkeypatch.chdir(local_dir)
    monkeypatch.setattr(dividedcopy, "AGAIN_S", 0.2)  # before copiers are forked
    found = Node(tmp_path, local_dir)
    yield found
    found.pool.close()


@pytest.fixture
def exchange(node: Node) -> Iterator[Exchange]:
    found = Exchange(node.source)
    yield found
    found.end()


def test_a_node_keeps_its_own_stripes(node: Node) -> None:
    node.until(lambda: node.is_kept)
    assert node.check() == OWN
    assert node.queue.divided.kept[0] == own_bytes(SIZE, PLACE, NODES)
    assert node.taken_bytes <= own_bytes(SIZE, PLACE, NODES) + SLACK
    assert (node.pool.assigned, node.queue.settled) == (0, True)
    assert node.queue.states.of(0) is FileState.REMOTE
    assert node.engine.copies.status(0) is None, "it is never published"
    assert node.pool.stats.totals().bytes == own_bytes(SIZE, PLACE, NODES), "nothing else is read"


def test_what_readers_need_comes_and_goes(node: Node, exchange: Exchange) -> None:
    assert WINDOW > LEAST_WINDOW
    node.reads(0)
    node.until(lambda: node.is_kept and len(node.row().arrived) == len(OWN) + WINDOW)
    assert node.check() == sorted([*OWN, *OTHERS[:WINDOW]])
    for reader, stripe in ((0, 10), (1, 50), (0, 60), (1, 90)):
        node.reads(stripe, reader)
        after = OTHERS[OTHERS.index(stripe) :][: WINDOW // 2]
        node.until(lambda after=after: set(after) <= set(node.row().arrived))  # type: ignore[misc]
        assert set(node.row().arrived) >= set(OWN)
    node.until(lambda: len(node.check()) == len(OWN) + WINDOW)
    assert node.taken_bytes <= room_bytes(SIZE, PLACE, NODES) + SLACK
    assert node.pool.stats.received >= (WINDOW + 5) * MB
    assert node.pool.stats.totals().bytes == own_bytes(SIZE, PLACE, NODES)


def test_bytes_of_a_stripe_that_went_take_no_space(node: Node, exchange: Exchange) -> None:
    node.reads(0)
    node.until(lambda: node.is_kept and set(OTHERS[:WINDOW]) <= set(node.row().arrived))
    node.reads(64)
    node.until(lambda: 90 in node.row().arrived and 62 not in node.row().arrived)
    with node.row().incoming.open("rb") as file:
        node.until(lambda: not any(os.pread(file.fileno(), MB, 62 * MB)))
    assert 62 not in node.row().arrived


def test_what_other_nodes_do_not_give_is_left_and_asked_for_again(node: Node, exchange: Exchange) -> None:
    exchange.refuses = True
    node.reads(0)
    node.until(lambda: node.is_kept and len(exchange.asked) >= 2 * WINDOW)
    assert set(node.check()) == set(OWN)
    exchange.refuses = False
    node.until(lambda: set(OTHERS[:WINDOW]) <= set(node.row().arrived))


def test_without_an_exchange_the_own_stripes_are_served(node: Node) -> None:
    node.reads(0)
    node.until(lambda: node.is_kept)
    assert set(node.check()) == set(OWN)
    late = Exchange(node.source)
    try:
        node.until(lambda: set(OTHERS[:WINDOW]) <= set(node.row().arrived))
    finally:
        late.end()
    node.reads(40)
    assert set(node.check()) >= set(OWN)


def test_while_others_read_only_what_is_wished_for_is_brought(
    tmp_path: Path, local_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(local_dir)
    node = Node(tmp_path, local_dir, rate=20 * MB)
    try:
        node.queue.large.read_elsewhere((0,), 0, time.monotonic())
        node.until(lambda: node.row().holds)
        node.put(wire.WISHED_OFFSET, 70 + 1)
        node.until(lambda: bool(node.row().arrived))
        assert min(node.check()) == 71
        node.until(lambda: node.check() == list(range(71, STRIPES, 2)))
        node.engine.arriving.set_priority(0, Priority.FULL)
        node.until(lambda: node.is_kept)
    finally:
        node.pool.close()


def test_while_others_read_in_any_order_nothing_is_brought(node: Node) -> None:
    node.queue.large.read_elsewhere((0,), 0, time.monotonic())
    node.until(lambda: node.row().holds)
    assert struct.unpack_from(
        "<I", (node.node_dir / wire.ARRIVING_FILE).read_bytes(), wire.ARRIVING_HEADER_BYTES + wire.PRIORITY_OFFSET
    ) == (Priority.BELOW_OTHER_NODES,)
    assert not node.row().arrived
    node.engine.arriving.set_priority(0, Priority.FULL)
    node.until(lambda: node.is_kept)


def test_a_file_that_is_written_to_is_withdrawn_at_once(node: Node, exchange: Exchange) -> None:
    node.reads(0)
    node.until(lambda: node.is_kept)
    used = node.queue.budget.used_bytes
    with node.row().incoming.open("rb") as opened:
        node.engine.void([0])
        assert not node.row().holds
        node.until(lambda: not list(node.queue.divided.ids))
        assert os.fstat(opened.fileno()).st_size == 0, "whoever has it open keeps no space"
    assert used - node.queue.budget.used_bytes == room_bytes(SIZE, PLACE, NODES)
    assert node.queue.states.of(0) is FileState.VOID
    assert not node.pool.stats.totals().files


def test_parts_end_where_the_store_does(node: Node) -> None:
    node.until(lambda: node.is_kept)
    incoming = node.row().incoming
    node.engine.end_divided()
    assert not node.row().holds
    node.until(lambda: not list(node.queue.divided.ids))
    assert not incoming.exists()
    assert (node.queue.divided.next(time.monotonic()), node.queue.settled) == ([], True)


def check_change(node: Node) -> None:
    """The source changes, and nothing of it is shown any more."""
    with node.source.open("r+b") as file:
        file.seek(SIZE - 100)
        file.write(b"changed")
    node.put(wire.READERS_OFFSET, 1)
    node.until(lambda: node.queue.states.of(0) is FileState.FAILED)
    assert not node.row().holds
    assert list(node.engine.failures.kinds) == ["the source changed while it was copied"]


def test_a_file_that_changes_while_own_stripes_come(
    tmp_path: Path, local_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(local_dir)
    node = Node(tmp_path, local_dir, rate=20 * MB)
    try:
        node.until(lambda: node.row().holds and len(node.row().arrived) >= 2)
        check_change(node)
    finally:
        node.pool.close()


def test_a_file_that_changes_while_stripes_of_others_come(node: Node, exchange: Exchange) -> None:
    node.until(lambda: node.is_kept)
    check_change(node)


def test_bytes_are_freed_when_no_reader_counts_them_any_more(
    tmp_path: Path, local_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Watches the copier: what is freed has gone before, and that was counted before."""
    free = copyfile.punch
    counts: list[int] = []

    def watched(target: int, start: int, length: int) -> bool:
        row = Row(local_dir, 0)
        if row.arrived:  # else it is tried whether the file system can free bytes at all
            counts.append(evicted(local_dir))
            is_right = start // MB not in row.arrived and counts[-1] == len(counts) + 1
            with (local_dir / ("freed" if is_right else "wrong")).open("a") as file:
                print(start // MB, file=file)
        return free(target, start, length)

    monkeypatch.chdir(local_dir)
    monkeypatch.setattr(copyfile, "punch", watched)
    node = Node(tmp_path, local_dir)
    exchange = Exchange(node.source)
    try:
        node.reads(0)
        node.until(lambda: set(OTHERS[:WINDOW]) <= set(node.row().arrived))
        node.reads(64)
        node.until(lambda: (local_dir / "freed").exists() or (local_dir / "wrong").exists())
        assert not (local_dir / "wrong").exists()
    finally:
        exchange.end()
        node.pool.close()


def test_a_copier_that_is_killed_begins_again(node: Node) -> None:
    node.until(lambda: node.is_kept)
    first = node.row().shown
    os.kill(node.pool.members[0].pid, signal.SIGKILL)
    node.until(lambda: node.row().holds and node.row().shown != first)
    node.until(lambda: node.is_kept)
    assert node.check() == OWN
