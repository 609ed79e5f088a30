"""Stripes of large files on their way between exchanges: a copier gets what has arrived on the node that it asks, and
never what that node does not vouch for. The test plays daemons and copiers."""

from __future__ import annotations

import os
import random
import time
from pathlib import Path
from queue import SimpleQueue
from threading import Event, Thread
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("mpi4py", reason="needs mpi4py")

from conftest import wait_for
from group_nodes import Group

from benchmarks.peernodes import MPIEXEC, Node, manifest_of, serve
from hpcstage.exchange.files import stripeservice as service
from hpcstage.plan.types import ManifestEntry
from hpcstage.protocol.arriving import ARRIVING_FILE, LEAST_STRIPE_BYTES, Priority
from hpcstage.store.arrivals import Arrival, Arrivals, SourceFacts
from hpcstage.store.arrivingrows import StripeShare
from hpcstage.store.copyfile import CopyJob, CopyWorker, Status
from hpcstage.store.counters import StatsArea
from hpcstage.store.grantedrows import GrantedRows
from hpcstage.store.largecopy import LargeCopy
from hpcstage.store.peerstripes import PeerStripes

if not MPIEXEC.exists():
    pytest.skip("needs the mpiexec of mpi4py's MPI", allow_module_level=True)

MB = LEAST_STRIPE_BYTES
SIZE = 20 * MB + 1000
SIZES = [SIZE, 20 * MB]
DATA = random.Random(0).randbytes(SIZE)
ENOUGH_S = 120.0


class Copying:
    """A large file that a copier of a node brings, with a row."""

    def __init__(self, node: Node, id_: int = 0, data: bytes = DATA) -> None:
        assert node.manifest is not None
        self.daemon, entry = GrantedRows(node.path), node.manifest.entry(id_)
        assert self.daemon.grant(id_)
        self.id, self.path, self.data = id_, node.path / "incoming" / "copier", data
        self.path.write_bytes(bytes(len(data)))
        status: Any = SimpleNamespace(
            st_size=len(data), st_mtime_ns=entry.mtime_ns, st_ctime_ns=1, st_dev=1, st_ino=id_ + 1
        )
        facts = SourceFacts(id_, status, b"incoming/copier")
        self.arrival: Arrival = Arrivals(node.path / ARRIVING_FILE).begin(facts, entry)
        assert self.arrival.is_shown

    def bring(self, *stripes: int) -> None:
        with self.path.open("r+b") as file:
            for stripe in stripes:
                os.pwrite(file.fileno(), self.data[stripe * MB : (stripe + 1) * MB], stripe * MB)
                self.arrival.arrived(stripe)


class Asking:
    """A copier of a node that asks for stripes."""

    def __init__(self, others: PeerStripes) -> None:
        self.others = others
        self.came: dict[int, bytes | None] = {}

    def ask(self, *stripes: int) -> None:
        for stripe in stripes:
            assert self.others.ask(stripe, time.monotonic()) == []

    def take(self) -> bool:
        for stripe, data in self.others.answers(0.01):
            self.came[stripe] = None if data is None else bytes(data)
        return False

    def until(self, group: Group, count: int) -> None:
        serve(group.nodes, lambda: self.take() or len(self.came) >= count, ENOUGH_S)


@pytest.fixture
def group(local_dir: Path):
    made: list[Group] = []

    def make(count: int = 2, sizes=SIZES) -> Group:
        made.append(Group(local_dir / f"g{len(made)}", count, sizes))
        return made[-1]

    yield make
    for one in made:
        one.remove()


@pytest.fixture
def asks(monkeypatch: pytest.MonkeyPatch):
    made: list[PeerStripes] = []

    def make(node: Node, nodes: tuple[int, ...] = (0, 1), size_bytes: int = SIZE) -> Asking:
        monkeypatch.chdir(node.path)
        found = PeerStripes.connect(0, size_bytes, MB, StripeShare(node.index, nodes))
        assert found is not None
        made.append(found)
        return Asking(found)

    yield make
    for one in made:
        one.close()


def part(stripe: int) -> bytes:
    return DATA[stripe * MB : (stripe + 1) * MB]


def test_stripes_come_as_they_arrive(group, asks) -> None:
    one = group()
    copying = Copying(one.nodes[1])
    copying.bring(1)
    one.start().ready()
    asking = asks(one.nodes[0])
    asking.ask(1, 3, 19)
    asking.until(one, 1)
    assert asking.came == {1: part(1)}
    assert copying.arrival.wished() == 3, "what was asked for first"
    copying.bring(3, 5, 19)
    asking.until(one, 3)
    assert asking.came == {stripe: part(stripe) for stripe in (1, 3, 19)}
    serve(one.nodes, lambda: one.nodes[1].sent_bytes == 3 * MB)
    assert one.nodes[1].sent_files == 0
    assert one.end() == 0, one.text()


def test_the_end_of_a_file_is_shorter(group, asks) -> None:
    one = group(3)
    Copying(one.nodes[2]).bring(20)
    one.start().ready()
    asking = asks(one.nodes[0], (0, 1, 2))
    asking.ask(20)
    asking.until(one, 1)
    assert asking.came == {20: DATA[20 * MB :]}


def test_a_whole_copy_gives_stripes_too(group, asks) -> None:
    one = group()
    one.nodes[1].stage(0, DATA)
    one.start().ready()
    asking = asks(one.nodes[0])
    asking.ask(*range(1, 21, 2))
    asking.until(one, 10)
    assert asking.came == {stripe: part(stripe) for stripe in range(1, 21, 2)}


def test_more_is_asked_for_than_there_is_room_for(group, asks) -> None:
    """A slot is used again, once its stripe was taken."""
    one = group()
    one.nodes[1].stage(0, DATA)
    one.start().ready()
    asking = asks(one.nodes[0])
    asking.others.share = StripeShare(0, (1,))
    asking.ask(*range(16))
    assert not asking.others.has_room
    asking.until(one, 16)
    asking.ask(*range(16, 21))
    asking.until(one, 21)
    assert asking.came == {stripe: part(stripe) for stripe in range(21)}


def test_what_nobody_has_is_refused(group, asks) -> None:
    one = group()
    one.start().ready()
    asking = asks(one.nodes[0])
    asked_at = time.monotonic()
    asking.ask(1, 3)
    asking.until(one, 2)
    assert asking.came == {1: None, 3: None}
    assert time.monotonic() - asked_at >= service.GRACE_S, "its copying may yet begin"
    assert (asking.others.lost, asking.others.reader(1)) == ({1}, 0)


def test_nothing_comes_of_a_row_that_was_taken_away(group, asks) -> None:
    one = group()
    copying = Copying(one.nodes[1])
    copying.bring(1, 3)
    one.start().ready()
    copying.daemon.withdraw((0,))
    asking = asks(one.nodes[0])
    asking.ask(1)
    asking.until(one, 1)
    assert asking.came == {1: None}


def test_nothing_comes_of_another_size_or_manifest(group, asks) -> None:
    one = group()
    manifest_of([SIZE, 20 * MB + 1]).save(one.nodes[1].path / "manifest.bin")
    one.nodes[1].stage(0, DATA)
    one.start().ready()
    asking = asks(one.nodes[0])
    asking.ask(1)
    asking.until(one, 1)
    assert asking.came == {1: None}
    other = asks(one.nodes[0], size_bytes=SIZE + 1)
    other.ask(1)
    other.until(one, 1)
    assert other.came == {1: None}


def test_what_was_given_up_harms_nothing(group, asks) -> None:
    """A copier asks, is killed, and another one asks for the same and more."""
    one = group()
    copying = Copying(one.nodes[1])
    one.start().ready()
    first = asks(one.nodes[0])
    first.ask(1, 3)
    serve(one.nodes, lambda: copying.arrival.wished() is not None)
    first.others.close()
    second = asks(one.nodes[0])
    second.ask(1, 5)
    copying.bring(1, 3, 5)
    second.until(one, 2)
    assert second.came == {1: part(1), 5: part(5)}


def test_a_node_that_ends_gives_nothing_more(group, asks) -> None:
    one = group(3)
    copying = Copying(one.nodes[1])
    one.start().ready()
    asking = asks(one.nodes[0], (0, 1, 2))
    asking.ask(1, 4)
    serve(one.nodes, lambda: copying.arrival.wished() is not None)
    one.nodes[1].end()
    asking.until(one, 2)
    assert asking.came == {1: None, 4: None}
    one.nodes[2].stage(0, DATA)
    assert asking.others.reader(4) == 2, "its stripes are divided among the others"
    asking.ask(4)
    del asking.came[4]
    asking.until(one, 2)
    assert asking.came[4] == part(4)


def test_without_an_exchange_all_is_read_at_the_source(group, asks, monkeypatch: pytest.MonkeyPatch) -> None:
    one = group()
    monkeypatch.chdir(one.nodes[0].path)
    assert PeerStripes.connect(0, SIZE, MB, StripeShare(0, (0, 1))) is None
    one.start().ready()
    asking = asks(one.nodes[0])
    asking.ask(1)
    one.kill_exchanges()
    serve(one.nodes, lambda: asking.take() or bool(asking.came), ENOUGH_S, may_lose=True)
    assert asking.came == {1: None}
    assert not asking.others.has_room
    assert all(asking.others.is_own(stripe) for stripe in range(21))


# ---- a copier that brings its share


class Copier:
    """The copy of the file that node 0 brings with node 1, by two threads."""

    def __init__(
        self, node: Node, source: Path, monkeypatch: pytest.MonkeyPatch, priority: Priority = Priority.FULL
    ) -> None:
        monkeypatch.chdir(node.path)
        source.write_bytes(DATA)
        self.rows = GrantedRows(node.path)
        assert self.rows.grant(0, priority=priority, share=StripeShare(0, (0, 1)))
        (node.path / "incoming").mkdir(exist_ok=True)
        self.source, self.copy, self.area = source, node.path / "copy", StatsArea(2)
        job = CopyJob(os.fsencode(source), b"incoming/0", b"copy")
        self._invited: SimpleQueue[LargeCopy] = SimpleQueue()
        self._ended = Event()
        self.large = LargeCopy(0, job, None, self._invited.put, show=self._show)

    def _show(self, status: os.stat_result) -> Arrival:
        listed = ManifestEntry(
            0, b"", status.st_size, status.st_mtime_ns, status.st_mode, 0, 0, False, status.st_ctime_ns
        )
        return Arrivals(Path(ARRIVING_FILE)).begin(SourceFacts(0, status, b"incoming/0"), listed)

    def _lead(self) -> None:
        self.large.copy(CopyWorker(self.area.thread(0)))
        self._ended.set()

    def _help(self) -> None:
        self._invited.get().help(CopyWorker(self.area.thread(1)))

    def begin(self) -> None:
        for work in (self._lead, self._help):
            Thread(target=work, daemon=True).start()

    def until_ended(self) -> None:
        assert self._ended.wait(ENOUGH_S)


def test_a_copier_reads_its_share_and_gets_the_rest(group, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = group()
    Copying(one.nodes[1]).bring(*range(1, 21, 2))
    one.start().ready()
    copier = Copier(one.nodes[0], tmp_path / "source", monkeypatch)
    copier.begin()
    copier.until_ended()
    assert copier.large.outcome.status is Status.OK
    assert copier.copy.read_bytes() == DATA
    assert copier.area.totals().bytes == SIZE - 10 * MB
    assert copier.area.received == 10 * MB


def test_a_program_that_ends_while_nothing_is_to_be_asked_for_ends_no_asking(
    group, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Just after the thread that asks has found that no reader needs a stripe, none stands in the way of all."""
    one = group()
    Copying(one.nodes[1]).bring(*range(1, 21, 2))
    one.start().ready()
    copier = Copier(one.nodes[0], tmp_path / "source", monkeypatch, Priority.FOLLOWS)
    ask = LargeCopy._ask_for_more

    def ask_and_end(large: LargeCopy, others: PeerStripes) -> bool:
        asked = ask(large, others)
        copier.rows.tell(0, Priority.FULL)
        return asked

    monkeypatch.setattr(LargeCopy, "_ask_for_more", ask_and_end)
    copier.begin()
    copier.until_ended()
    assert copier.copy.read_bytes() == DATA
    assert copier.area.received == 10 * MB


@pytest.mark.parametrize("how", ["the node ends", "the exchanges are killed"])
def test_a_copier_reads_what_a_lost_node_does_not_give(
    group, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    one = group()
    copying = Copying(one.nodes[1])
    copying.bring(1, 3)
    one.start().ready()
    copier = Copier(one.nodes[0], tmp_path / "source", monkeypatch)
    copier.begin()
    wait_for(lambda: copier.area.received == 2 * MB, ENOUGH_S)
    assert not copier.copy.exists()
    if how == "the node ends":
        one.nodes[1].end()
    else:
        one.kill_exchanges()
    copier.until_ended()
    assert copier.copy.read_bytes() == DATA
    assert copier.area.totals().bytes == SIZE - 2 * MB


@pytest.mark.parametrize("why", ["the source changes", "it is given up"])
def test_a_copy_that_comes_to_nothing_does_not_wait_for_others(
    group, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    one = group()
    copying = Copying(one.nodes[1])
    one.start().ready()
    copier = Copier(one.nodes[0], tmp_path / "source", monkeypatch)
    copier.begin()
    wait_for(lambda: copying.arrival.wished() is not None, ENOUGH_S)
    if why == "the source changes":
        os.utime(copier.source, ns=(1, 1))
        copying.bring(1)
    else:
        copier.large.cancelled = True
    copier.until_ended()
    assert copier.large.outcome.status is (Status.CHANGED if why == "the source changes" else Status.CANCELLED)
    assert not copier.copy.exists()
    assert copier.area.received == 0
