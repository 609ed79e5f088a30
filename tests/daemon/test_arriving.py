"""What a daemon and its copiers show of large files on their way: never a byte that is not the source's."""

from __future__ import annotations

import mmap
import os
import signal
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from conftest import wait_for
from copyingnode import CopyingNode, Row
from hypothesis import given
from hypothesis import strategies as st

from hpcstage.daemon.process.slottable import slot_at
from hpcstage.daemon.queue.rates import Limits
from hpcstage.daemon.queue.states import FileState
from hpcstage.emulator import Settings, Slowfs, unavailable
from hpcstage.node import page
from hpcstage.plan.budget import BudgetFacts
from hpcstage.plan.rule import MOST_CHUNK_BYTES, FileReads, Front
from hpcstage.plan.types import ManifestEntry
from hpcstage.protocol import arriving as wire
from hpcstage.protocol import nodedir, shim
from hpcstage.protocol.arriving import Priority, StripeState
from hpcstage.store.arrivals import Arrival, Arrivals, SourceFacts
from hpcstage.store.arrivingrows import StripeShare
from hpcstage.store.copyfile import CopyJob, CopyWorker, Status
from hpcstage.store.counters import CANCEL, StatsArea
from hpcstage.store.grantedrows import GrantedRows
from hpcstage.store.largecopy import LargeCopy
from hpcstage.store.storedir import budget
from hpcstage.store.stripechoice import RANGE_BYTES

MB = wire.LEAST_STRIPE_BYTES
SIZE = 12 * MB + 1000


def facts_of(path: Path, id_: int = 3) -> tuple[SourceFacts, ManifestEntry]:
    found = path.stat()
    listed = ManifestEntry(0, b"", found.st_size, found.st_mtime_ns, 0, 0, 0, False, found.st_ctime_ns)
    return SourceFacts(id_, found, b"incoming/0.0/%d" % id_), listed


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "file"
    path.write_bytes(os.urandom(3 * MB + 1))
    return path


def test_a_row_is_what_the_layout_says(tmp_path: Path, file: Path) -> None:
    daemon = GrantedRows(tmp_path)
    assert (tmp_path / wire.ARRIVING_FILE).stat().st_blocks * 512 >= wire.ARRIVING_BYTES
    assert daemon.grant(3)
    assert not Row(tmp_path, 0).holds, "granted, and not shown yet"
    facts, listed = facts_of(file)
    arrival = Arrivals(tmp_path / wire.ARRIVING_FILE).begin(facts, listed)
    row, found = Row(tmp_path, 0), file.stat()
    assert row.holds
    assert (row.device, row.inode, row.size, row.id) == (found.st_dev, found.st_ino, 3 * MB + 1, 3)
    assert (row.mtime, row.ctime, row.stripe_bytes) == (found.st_mtime_ns, found.st_ctime_ns, MB)
    assert row.incoming == tmp_path / "incoming/0.0/3"
    assert row.stripes == [StripeState.ABSENT] * 4
    arrival.coming(range(1, 3))
    arrival.arrived(2)
    assert Row(tmp_path, 0).stripes == [StripeState.ABSENT, StripeState.COMING, StripeState.ARRIVED, StripeState.ABSENT]
    assert (arrival.first_absent(), arrival.first_absent(1), arrival.first_absent(4)) == (0, 3, None)
    daemon.withdraw((3,))
    assert not Row(tmp_path, 0).holds


def test_a_row_is_another_files_only_when_its_copier_is_through(tmp_path: Path, file: Path) -> None:
    """A copier that has not heard yet that its file was written to shows nothing any more, and harms no other row."""
    daemon, copier = GrantedRows(tmp_path), Arrivals(tmp_path / wire.ARRIVING_FILE)
    assert daemon.grant(3)
    daemon.withdraw((3,))
    assert daemon.grant(4)
    facts, listed = facts_of(file)
    assert not copier.begin(facts, listed).is_shown
    assert copier.begin(*facts_of(file, 4)).is_shown
    assert not Row(tmp_path, 0).holds
    assert Row(tmp_path, 1).holds
    daemon.ended(3, is_stored=False)
    assert daemon.grant(5)
    copier.begin(*facts_of(file, 5))
    assert Row(tmp_path, 0).id == 5
    assert Row(tmp_path, 0).shown > Row(tmp_path, 1).shown, "no number is given twice"


def test_no_word_is_seen_half_written(tmp_path: Path, file: Path) -> None:
    daemon, copier = GrantedRows(tmp_path), Arrivals(tmp_path / wire.ARRIVING_FILE)
    assert daemon.grant(3, priority=Priority.FOLLOWS)
    arrival = copier.begin(*facts_of(file))
    pid = os.fork()
    if not pid:
        for _ in range(100_000):
            daemon.tell(3, Priority.ASIDE)
            daemon.tell(3, Priority.FOLLOWS)
        os._exit(0)
    seen = set[Priority]()
    while os.waitpid(pid, os.WNOHANG) == (0, 0):
        seen.update(arrival.priority for _ in range(1000))
    assert seen <= {Priority.ASIDE, Priority.FOLLOWS}


def test_rows_of_complete_copies_make_way(tmp_path: Path, file: Path) -> None:
    daemon, copier = GrantedRows(tmp_path), Arrivals(tmp_path / wire.ARRIVING_FILE)
    for id_ in range(wire.ARRIVING_ROWS):
        assert daemon.grant(id_)
    assert not daemon.grant(100)
    copier.begin(*facts_of(file, 7))
    daemon.ended(7, is_stored=True)
    assert Row(tmp_path, 7).holds, "it serves on"
    assert daemon.grant(100)
    assert not Row(tmp_path, 7).holds
    daemon.ended(100, is_stored=True)
    daemon.withdraw((100,))
    daemon.ended(8, is_stored=False)
    assert daemon.grant(101)
    assert daemon.grant(102)
    assert not daemon.grant(103)


def test_what_readers_say_stays_while_transfers_of_their_file_come_and_go(tmp_path: Path, file: Path) -> None:
    daemon, copier = GrantedRows(tmp_path), Arrivals(tmp_path / wire.ARRIVING_FILE)
    assert daemon.ask(3, 77, 3 * MB)
    assert (Row(tmp_path, 0).inode, Row(tmp_path, 0).size, Row(tmp_path, 0).id) == (77, 3 * MB, 3)
    says(tmp_path, read=2 * MB, run=MB, at=9)
    daemon.set_faults(3, 5)
    assert daemon.reads(3) == FileReads(3 * MB, 2 * MB, 5, 0, (Front(9, MB), *[Front(0, 0)] * 3))
    assert daemon.grant(3, priority=Priority.ASIDE)
    arrival = copier.begin(*facts_of(file))
    assert (arrival.is_shown, arrival.priority) == (True, Priority.ASIDE)
    arrival.arrived(0)
    assert arrival.reads() == daemon.reads(3)
    first = Row(tmp_path, 0).shown
    daemon.ended(3, is_stored=False)
    assert not Row(tmp_path, 0).holds
    assert daemon.reads(3).credit_bytes == 2 * (2 * MB + 5)
    assert daemon.grant(3)
    arrival = copier.begin(*facts_of(file))
    assert Row(tmp_path, 0).shown > first
    assert Row(tmp_path, 0).arrived == []


def test_rows_of_what_was_read_least_make_way(tmp_path: Path) -> None:
    daemon = GrantedRows(tmp_path)
    for id_ in range(wire.ARRIVING_ROWS):
        assert daemon.ask(id_)
        daemon.set_faults(id_, 1 + (id_ * 7 + 5) % wire.ARRIVING_ROWS)
    least = min(range(wire.ARRIVING_ROWS), key=lambda id_: daemon.reads(id_).credit_bytes)
    assert daemon.grant(100)
    assert least not in daemon.ids
    assert daemon.reads(100).credit_bytes == 0
    assert daemon.reads(least) == FileReads(0)


def says(node_dir: Path, row: int = 0, read: int = 0, run: int = 0, at: int = 0, reader: int = 0) -> None:
    """As a reader does."""
    start = wire.ARRIVING_HEADER_BYTES + row * wire.ARRIVING_ROW_BYTES
    with (node_dir / wire.ARRIVING_FILE).open("r+b") as file:
        os.pwrite(file.fileno(), wire.ARRIVING_READ.pack(0, read), start + wire.READ_OFFSET)
        os.pwrite(file.fileno(), wire.FRONT.pack(at, run), start + wire.FRONTS_OFFSET + reader * wire.FRONT.size)


@pytest.mark.parametrize("what", ["size_bytes", "mtime_ns", "ctime_ns"])
def test_a_file_that_is_not_as_listed_is_not_shown(tmp_path: Path, file: Path, what: str) -> None:
    from dataclasses import replace

    daemon, copier = GrantedRows(tmp_path), Arrivals(tmp_path / wire.ARRIVING_FILE)
    assert daemon.grant(3)
    facts, listed = facts_of(file)
    assert not copier.begin(facts, replace(listed, **{what: getattr(listed, what) - 1})).is_shown
    assert not Row(tmp_path, 0).shown
    assert copier.begin(facts, replace(listed, ctime_ns=0)).is_shown


def test_without_space_nothing_is_shown(tmp_path: Path, file: Path) -> None:
    daemon = GrantedRows(tmp_path / "missing")
    assert daemon.grant(3)
    arrival = Arrivals(tmp_path / "missing" / wire.ARRIVING_FILE).begin(*facts_of(file))
    arrival.arrived(0)
    assert not arrival.is_shown
    assert daemon.reads(3).credit_bytes == 0


@pytest.mark.parametrize("size", [0, 1, MB, MB + 1, MB * wire.ROW_STRIPES, MB * wire.ROW_STRIPES + 1, 1 << 45])
def test_the_stripes_of_any_file_fit(size: int) -> None:
    arrival = Arrival(size)
    assert 1 <= arrival.stripes <= wire.ROW_STRIPES
    assert (arrival.stripes - 1) * arrival.stripe_bytes < max(size, 1) <= arrival.stripes * arrival.stripe_bytes


# ---- a real copier


class Node(CopyingNode):
    """One file, or several, that take some seconds."""

    def __init__(self, tmp_path: Path, node_dir: Path, rate: float | None = 6e6, files: int = 1) -> None:
        limits = Limits(budget(node_dir, BudgetFacts()), max_rate_bytes_per_s=rate)
        super().__init__(tmp_path, node_dir, SIZE, limits, rate=rate, files=files)

    def state(self) -> FileState:
        return self.engine.queue.states.of(0)

    def reads_on(self) -> None:
        """A program has the file open at the source."""
        self.queue.estimates.all_bytes_per_s = 1e6
        self.engine.queue.large.is_large = lambda _: True  # type: ignore[method-assign]  # smaller than real ones
        self.engine.queue.large.reads.opened(0, time.monotonic())
        self.engine.follow(time.monotonic())

    def reads_no_more(self) -> None:
        self.engine.queue.large.reads.drop([0])
        self.engine.follow(time.monotonic())

    def until_followed(self, condition: Callable[[], bool]) -> None:
        """Runs the engine until then, and has the program read on meanwhile."""

        def step() -> bool:
            self.reads_on()
            return condition()

        self.reads_on()  # before anything may begin
        self.until(step)

    def while_followed(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        self.until_followed(lambda: time.monotonic() >= until)

    def copied(self) -> int:
        return self.pool.stats.totals().bytes

    def check(self) -> list[int]:
        """Returns the stripes that have arrived, which are the source's."""
        row = self.row()
        content, arrived = self.source.read_bytes(), row.arrived if row.holds else []
        if not arrived:
            return []
        copy = Path(os.fsdecode(self.engine.copies.path(0)))
        with (row.incoming if row.incoming.exists() else copy).open("rb") as file:
            for stripe in arrived:
                assert os.pread(file.fileno(), MB, stripe * MB) == content[stripe * MB : (stripe + 1) * MB]
        return arrived


@pytest.fixture
def node(tmp_path: Path, local_dir: Path) -> Iterator[Node]:
    found = Node(tmp_path, local_dir)
    yield found
    found.pool.close()


def test_what_a_copier_shows_is_the_sources(node: Node) -> None:
    node.until(lambda: node.row().holds and len(node.check()) >= 2)
    assert node.row().inode == node.source.stat().st_ino
    node.until(lambda: len(node.check()) >= 5)
    node.until(lambda: node.state() is FileState.STORED)
    assert node.row().holds, "open files of programs may go on with it"
    assert node.row().arrived == list(range(13))
    assert Path(os.fsdecode(node.engine.copies.path(0))).read_bytes() == node.source.read_bytes()


def test_what_another_node_needs_comes_first(node: Node) -> None:
    node.until(lambda: node.row().holds and len(node.row().arrived) >= 1)
    with (node.node_dir / wire.ARRIVING_FILE).open("r+b") as file:
        file.seek(wire.ARRIVING_HEADER_BYTES + wire.WISHED_OFFSET)
        file.write(struct.pack("<I", 9 + 1))
    node.until(lambda: 9 in node.check())
    before = node.row().arrived
    assert len([stripe for stripe in before if stripe < 9]) <= 5, "the rest of the range was put back"
    node.until(lambda: node.state() is FileState.STORED)
    assert node.row().arrived == list(range(13))


@pytest.fixture
def reading(local_dir: Path) -> Iterator[mmap.mmap]:
    """The page, in which one process is in a call that the source answers. Two others have not been in any."""
    page.create(local_dir / nodedir.PAGE)
    with (local_dir / nodedir.PAGE).open("r+b") as file, mmap.mmap(file.fileno(), 0) as mapped:
        struct.pack_into("<I", mapped, shim.NEXT_NATIVE_OFFSET, 4)
        set_blocked(mapped, -time.monotonic_ns())
        yield mapped


def set_blocked(mapped: mmap.mmap, ns: int) -> None:
    at = slot_at(2) + shim.COUNTERS_OFFSET + 8 * shim.Counter.BLOCKED_SOURCE_NS
    struct.pack_into("<q", mapped, at, ns)


@pytest.fixture
def read(tmp_path: Path, local_dir: Path, reading: mmap.mmap) -> Iterator[Node]:
    """A program of the node has the file open at the source, and nothing else is done there."""
    found = Node(tmp_path, local_dir, 80e6)
    found.reads_on()
    yield found
    found.pool.close()


def test_what_stands_aside_comes_while_programs_leave_the_source_alone(read: Node, reading: mmap.mmap) -> None:
    says(read.node_dir, read=4 * MB)
    read.until_followed(lambda: read.row().holds)
    read.while_followed(0.3)
    assert read.copied() == 0
    set_blocked(reading, 1000)
    read.until_followed(lambda: len(read.check()) >= 6)
    assert set(read.row().stripes) <= {StripeState.ABSENT, StripeState.ARRIVED}, "nobody waits for it"


def test_never_is_more_copied_than_twice_what_was_read(read: Node, reading: mmap.mmap) -> None:
    set_blocked(reading, 1000)
    for stripes in (1, 2, 4):
        says(read.node_dir, read=stripes * MB)
        read.until_followed(lambda stripes=stripes: read.copied() >= 2 * stripes * MB)
        read.while_followed(0.3)
        assert read.copied() <= 2 * stripes * MB + MOST_CHUNK_BYTES
    says(read.node_dir, read=SIZE)
    read.until_followed(lambda: read.state() is FileState.STORED)
    assert read.row().arrived == list(range(13))


def test_what_follows_a_reader_comes_whatever_programs_do(read: Node) -> None:
    """One is in a call of the source all the time."""
    says(read.node_dir, read=MB, run=9 * MB, at=2 * MB + 1)
    read.until_followed(lambda: len(read.check()) >= 8)
    read.while_followed(0.3)
    assert read.check() == list(range(3, 12)), "as much as it has read in a row, from the next stripe on"
    says(read.node_dir, read=MB, run=9 * MB, at=12 * MB)
    read.until_followed(lambda: read.check() == list(range(3, 13)))
    says(read.node_dir, read=MB, run=0, at=0)
    read.while_followed(0.3)
    assert read.check() == list(range(3, 13)), "a jump"


def test_all_is_copied_once_no_program_reads(read: Node) -> None:
    says(read.node_dir, read=MB)
    read.until_followed(lambda: read.row().holds)
    read.reads_no_more()
    read.until(lambda: read.state() is FileState.STORED)
    assert read.check() == list(range(13))


@pytest.mark.parametrize("way", ["nothing is copied", "it stands aside", "it is given up"])
def test_a_copy_beside_a_reader_can_be_ended(read: Node, reading: mmap.mmap, way: str) -> None:
    says(read.node_dir, read=MB if way == "it stands aside" else 2 * MB)
    read.until_followed(lambda: read.row().holds)
    if way == "nothing is copied":
        set_blocked(reading, 1000)
        read.until_followed(lambda: read.copied() >= 4 * MB)
    if way == "it is given up":
        read.pool.cancel(0)
        read.pool.flush()
    else:
        read.engine.void([0])
    read.until(lambda: not read.pool.assigned)
    assert not read.check()


def test_nothing_of_a_file_that_changes_is_shown(node: Node) -> None:
    node.until(lambda: node.row().holds and len(node.check()) >= 2)
    known = len(node.row().arrived)
    with node.source.open("r+b") as file:
        file.seek(SIZE - 100)
        file.write(b"changed")
    node.until(lambda: not node.row().holds)
    assert len(node.row().arrived) <= known + 1, "at most one whose source was looked at before the change"
    node.until(lambda: node.state() is FileState.STORED)  # it is tried again, and is not as it was listed
    assert not node.row().holds
    assert not node.row().shown
    assert node.engine.copies.status(0).st_size == SIZE


def test_a_file_that_is_written_to_is_withdrawn_at_once(node: Node) -> None:
    node.until(lambda: node.row().holds and len(node.check()) >= 2)
    with node.row().incoming.open("rb") as opened:
        node.engine.void([0])
        assert not node.row().holds
        node.until(lambda: not node.pool.assigned)
        assert os.fstat(opened.fileno()).st_size == 0, "whoever has it open keeps no space"
    assert not node.row().holds
    assert node.engine.copies.status(0) is None


def test_a_copy_that_is_voided_later_is_withdrawn(node: Node) -> None:
    node.until(lambda: node.state() is FileState.STORED)
    assert node.row().holds
    node.engine.void([0])
    assert not node.row().holds


def test_a_copier_that_is_killed_leaves_only_what_is_right(node: Node) -> None:
    node.until(lambda: node.row().holds and len(node.check()) >= 3)
    first = node.row().shown
    os.kill(node.pool.members[0].pid, signal.SIGKILL)
    node.check()
    node.until(lambda: node.row().holds and node.row().shown != first)  # another copier begins anew
    node.check()
    node.until(lambda: node.state() is FileState.STORED)
    assert node.check() == list(range(13))


def test_a_copier_that_lost_its_daemon_shows_nothing_more(node: Node) -> None:
    node.until(lambda: node.row().holds and len(node.check()) >= 2)
    member = node.pool.members[0]
    os.close(member.commands)  # as the end of the daemon does
    wait_for(lambda: Path(f"/proc/{member.pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX")
    arrived = node.check()
    assert 2 <= len(arrived) < 13
    member.commands = os.open(os.devnull, os.O_RDONLY)


def test_two_readers_are_followed_alike(tmp_path: Path) -> None:
    source, order = tmp_path / "large", list[int]()
    source.write_bytes(bytes(40 * MB))
    assert GrantedRows(tmp_path).grant(0, priority=Priority.FOLLOWS)
    says(tmp_path, run=9 * MB)
    says(tmp_path, run=9 * MB, at=20 * MB, reader=1)
    large = copy_of(tmp_path, source, lambda _: None)
    show, worker = Arrival.arrived, CopyWorker(StatsArea(1).thread(0))

    def arrived(arrival: Arrival, stripe: int) -> None:
        order.append(stripe)
        show(arrival, stripe)
        large.cancelled = len(order) == 18

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Arrival, "arrived", arrived)
        assert large.copy(worker).status is Status.CANCELLED
    assert order == [at + stripe for stripe in range(9) for at in (0, 20)]


def test_a_copy_that_was_cancelled_before_it_began_ends_though_nothing_of_it_is_to_be_copied(tmp_path: Path) -> None:
    source, stats = tmp_path / "large", StatsArea(1).thread(0)
    source.write_bytes(bytes(MB))
    assert GrantedRows(tmp_path).grant(0, priority=Priority.FOLLOWS)
    stats.words[CANCEL] = 1
    assert copy_of(tmp_path, source, lambda _: None).copy(CopyWorker(stats)).status is Status.CANCELLED
    assert not (tmp_path / "incoming").exists()


def test_whatever_goes_wrong_in_a_thread_that_helps_ends_the_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    source, stats, helping, went_wrong = tmp_path / "large", StatsArea(2), list[threading.Thread](), threading.Event()
    source.write_bytes(bytes(3 * RANGE_BYTES))
    assert GrantedRows(tmp_path).grant(0)
    show = Arrival.arrived

    def invite(large: LargeCopy) -> None:
        helping.append(threading.Thread(target=large.help, args=(CopyWorker(stats.thread(1)),)))
        helping[-1].start()

    def arrived(arrival: Arrival, stripe: int) -> None:
        if threading.current_thread() in helping:
            went_wrong.set()
            raise ValueError("a mistake")
        show(arrival, stripe)
        if helping:
            assert went_wrong.wait(60)

    monkeypatch.setattr(Arrival, "arrived", arrived)
    outcome = copy_of(tmp_path, source, invite).copy(CopyWorker(stats.thread(0)))
    for thread in helping:
        thread.join(60)
    assert outcome.status is Status.LOCAL_ERROR
    assert not (tmp_path / "copy").exists()
    assert not (tmp_path / "incoming").exists()
    assert "a mistake" in capfd.readouterr().err


needs_fuse = pytest.mark.skipif(unavailable() is not None, reason="no FUSE here")


def copy_of(node: Path, source: Path, invite: Callable[[LargeCopy], object]) -> LargeCopy:
    """A copy that is shown in the first row."""

    def show(status: os.stat_result) -> Arrival:
        listed = ManifestEntry(
            0, b"", status.st_size, status.st_mtime_ns, status.st_mode, 0, 0, False, status.st_ctime_ns
        )
        return Arrivals(node / wire.ARRIVING_FILE).begin(SourceFacts(0, status, b"incoming"), listed)

    job = CopyJob(os.fsencode(source), os.fsencode(node / "incoming"), os.fsencode(node / "copy"))
    return LargeCopy(0, job, None, invite, show=show)


@pytest.mark.fuse
@pytest.mark.compiler
@needs_fuse
def test_what_a_reader_needs_next_is_brought_by_several_threads(tmp_path: Path) -> None:
    """Each brings one stripe after the other. A single one would be no faster than the reader itself."""
    behind, node = tmp_path / "behind", tmp_path / "node"
    behind.mkdir()
    node.mkdir()
    (behind / "large").write_bytes(bytes(2 * RANGE_BYTES + MB))
    assert GrantedRows(node).grant(0, priority=Priority.FOLLOWS)
    says(node, run=wire.ROW_STRIPES * MB)
    invited: list[LargeCopy] = []
    with Slowfs(behind, Settings(data_latency_s=0.002)) as slow:
        large = copy_of(node, slow.path / "large", invited.append)
        worker = CopyWorker(StatsArea(1).thread(0))
        assert large.copy(worker).status is Status.OK
    assert invited == [large, large]


@pytest.mark.fuse
@pytest.mark.compiler
@needs_fuse
def test_the_kernel_reads_ahead_of_what_follows_and_not_of_what_stands_aside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    behind, node = tmp_path / "behind", tmp_path / "node"
    behind.mkdir()
    node.mkdir()
    (behind / "large").write_bytes(bytes(40 * MB))
    page.create(node / nodedir.PAGE)
    monkeypatch.chdir(node)  # as a copier does
    assert GrantedRows(node).grant(0, priority=Priority.ASIDE)
    says(node, read=MB // 2)
    with Slowfs(behind, Settings()) as slow:
        large = copy_of(node, slow.path / "large", lambda _: None)
        worker = CopyWorker(StatsArea(1).thread(0))
        working = threading.Thread(target=large.copy, args=(worker,))
        working.start()
        try:
            wait_for(lambda: Row(node, 0).arrived == [0])
            assert slow.counters().read_bytes == MB
            says(node, read=MB // 2, run=9 * MB, at=8 * MB)
            wait_for(lambda: Row(node, 0).arrived == [0, *range(8, 17)])
            wait_for(lambda: slow.counters().read_bytes > 10 * MB)
        finally:
            large.cancelled = True
            working.join(60)
    assert large.outcome.status is Status.CANCELLED


# ---- a file that several nodes bring together


@given(
    st.sets(st.integers(0, wire.MOST_SHARING - 1), min_size=2, max_size=40).map(lambda found: tuple(sorted(found))),
    st.data(),
)
def test_each_stripe_is_one_nodes(nodes: tuple[int, ...], data: st.DataObject) -> None:
    own = data.draw(st.sampled_from(nodes))
    share = StripeShare(own, nodes)
    assert StripeShare.unpack(share.pack()) == share
    lost = data.draw(st.sets(st.sampled_from(nodes), max_size=len(nodes) - 1)) - {own}
    readers = [share.reader(stripe, lost) for stripe in range(3 * len(nodes) ** 2)]
    assert set(readers) == set(nodes) - lost, "all that are there take part"
    assert all(reader == nodes[stripe % len(nodes)] or nodes[stripe % len(nodes)] in lost for stripe, reader in
               enumerate(readers)), "who is there reads the same whoever is lost"  # fmt: skip


def test_a_row_tells_who_brings_the_file(tmp_path: Path, file: Path) -> None:
    daemon, copier = GrantedRows(tmp_path), Arrivals(tmp_path / wire.ARRIVING_FILE)
    assert daemon.grant(3, share=StripeShare(5, (0, 5, 511)))
    assert copier.begin(*facts_of(file)).share == StripeShare(5, (0, 5, 511))
    daemon.ended(3, is_stored=False)
    assert daemon.grant(3)
    assert copier.begin(*facts_of(file)).share is None


@pytest.mark.parametrize(
    "packed", [wire.SHARE.pack(0, 2, b"\1"), wire.SHARE.pack(1, 2, b"\5"), wire.SHARE.pack(0, 1, b"\1")]
)
def test_a_share_that_makes_no_sense_is_none(packed: bytes) -> None:
    assert StripeShare.unpack(packed) is None
