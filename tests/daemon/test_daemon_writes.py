"""Writes below a dataset: once the daemon has answered, no stale copy is visible or ever appears."""
# ruff: noqa: F811  fixtures are imported

from __future__ import annotations

import os
import signal
import socket
import threading
from pathlib import Path

import pytest
from daemon_process import Client, same, start_daemon, wait_until  # noqa: F401
from immutability import immutable

from benchmarks.copyall import run_to_end
from hpcstage.daemon.copying import inodes
from hpcstage.daemon.copying.engine import Engine
from hpcstage.daemon.copying.inodes import Inodes
from hpcstage.daemon.copying.writes import HELPER, MOST_SINGLY, Writes
from hpcstage.daemon.queue.queue import Queue
from hpcstage.daemon.queue.rates import Limits
from hpcstage.forked import Helpers
from hpcstage.plan.dataset.datasets import resolve
from hpcstage.plan.dataset.scan import scan
from hpcstage.plan.types import Budget
from hpcstage.protocol.shim import CAUGHT_UP, CLOSED, GIVEN_UP, HELD, LANDED, Answer, Kind, Reason, State
from hpcstage.store.copier import CopierSettings
from hpcstage.store.pool import CopierPool
from hpcstage.store.storedir import Store


def test_everything_below_a_renamed_directory_is_dropped(start_daemon, make_tree):
    root = make_tree()
    daemon = start_daemon(root).attach()
    daemon.staged()
    assert daemon.ask(Kind.WROTE, os.fsencode(root / "class1"))[0] is Answer.DONE
    assert list(daemon.store(root / "class1").iterdir()) == []
    assert len(list(daemon.store(root / "class0").iterdir())) == 7
    assert daemon.ask(Kind.WROTE, os.fsencode(root.parent))[0] is Answer.DONE
    assert not [p for p in daemon.store(root).rglob("*") if p.is_file()]
    daemon.end()


def test_a_write_during_the_scan_is_remembered(start_daemon, make_tree):
    root = make_tree(files=500)
    victim = root / "class0" / "file00000.bin"
    daemon = start_daemon(root)
    with daemon.connect() as early:
        daemon.send(early, Kind.WROTE, os.fsencode(victim))
        daemon.attach()
        assert daemon.receive(early)[0] is Answer.DONE
    daemon.staged()
    assert not os.path.lexists(daemon.store(victim))
    daemon.end()


def test_nothing_is_copied_before_all_early_writes_hold(start_daemon, make_tree, local_dir):
    root, node_dir = make_tree(files=600), local_dir / "node"
    node_dir.mkdir(mode=0o700)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(os.fspath(node_dir / "sock"))
        listener.listen(512)
        early = []
        for path in reversed(sorted(root.rglob("*.bin"))[:300]):  # those that are copied first come last
            early.append(Client(node_dir / "sock").connect())
            Client.send(early[-1], Kind.WROTE, os.fsencode(path))
        daemon = start_daemon(root, node_dir=node_dir, listen_fd=listener.fileno())
    daemon.attach()
    for connection in early:
        assert Client.receive(connection)[0] is Answer.DONE
        connection.close()
    daemon.staged()
    totals = daemon.end().totals
    assert totals.void == 300
    assert totals.copy_opens == 300, "a file was copied before the write that came earlier"


def test_a_copy_in_flight_never_appears(start_daemon, tmp_path):
    """A slow large file, named by a write in the middle of its copy."""
    root = tmp_path / "data"
    root.mkdir()
    (root / "big").write_bytes(os.urandom(1 << 20) * 4)
    (root / "small").write_bytes(b"x")
    daemon = start_daemon(root, max_rate_bytes_per_s=2e6).attach()
    daemon.wait_for_scan()
    wait_until(lambda: list((daemon.node_dir / "incoming").rglob("*/*")))
    assert daemon.ask(Kind.WROTE, os.fsencode(root / "big"))[0] is Answer.DONE
    assert not daemon.store(root / "big").exists()
    daemon.staged()
    assert not os.path.lexists(daemon.store(root / "big")), "the tombstone is gone, too"
    assert not list((daemon.node_dir / "incoming").rglob("*/*"))
    assert not list((daemon.node_dir / "links").iterdir())
    assert daemon.store(root / "small").exists()
    part = daemon.end()
    assert part.totals.void == 1
    assert part.totals.copied_bytes < 4 << 20


def test_who_waits_for_a_file_that_is_written_goes_to_the_source(start_daemon, tmp_path):
    root = tmp_path / "data"
    root.mkdir()
    (root / "big").write_bytes(bytes(6 << 20))
    daemon = start_daemon(root, max_rate_bytes_per_s=3e6).attach()
    daemon.wait_for_scan()
    with daemon.connect() as waiting:
        daemon.send(waiting, Kind.REQUEST, os.fsencode(root / "big"))
        assert daemon.ask(Kind.WROTE, os.fsencode(root / "big"))[0] is Answer.DONE
        assert daemon.receive(waiting)[:2] == (Answer.DIRECT, Reason.VOID)
    daemon.end()


def test_writes_at_any_moment(start_daemon, make_tree):
    """Every file is written to once while it may be waiting, in flight or staged: none is visible after the answer."""
    root = make_tree(files=400, size_bytes=3000)
    files = sorted(p for p in root.rglob("*") if p.is_file())
    daemon = start_daemon(root).attach()
    daemon.wait_for_scan()
    seen: list[str] = []
    written: list = []
    stop = threading.Event()

    def look() -> None:
        while not stop.is_set():
            seen.extend(os.fspath(path) for path in written[:] if daemon.store(path).exists())

    watcher = threading.Thread(target=look)
    watcher.start()
    try:
        for path in files[::-2]:
            assert daemon.ask(Kind.WROTE, os.fsencode(path))[0] is Answer.DONE
            written.append(path)
        daemon.staged()
    finally:
        stop.set()
        watcher.join()
    assert seen == []
    assert daemon.state() is State.SETTLED
    kept = [p for p in files if p not in set(written)]
    assert all(same(p, daemon.store(p)) for p in kept)
    assert not [p for p in written if os.path.lexists(daemon.store(p))]
    daemon.end()


def files_below(directory: Path) -> list[Path]:
    """All that can be seen, whatever disappears meanwhile."""
    return [Path(top) / name for top, _, names in os.walk(directory) for name in names]


def test_many_at_once_are_out_of_sight_before_they_are_deleted(start_daemon, make_tree):
    root = make_tree(files=3 * (MOST_SINGLY + 100), size_bytes=100)
    daemon = start_daemon(root).attach()
    daemon.staged()
    assert len(files_below(daemon.store(root / "class1"))) == MOST_SINGLY + 100
    assert daemon.ask(Kind.WROTE, os.fsencode(root / "class1"))[0] is Answer.DONE
    assert not daemon.store(root / "class1").exists()
    assert len(files_below(daemon.store(root / "class0"))) == MOST_SINGLY + 100
    assert daemon.ask(Kind.WROTE, os.fsencode(root.parent))[0] is Answer.DONE
    assert files_below(daemon.node_dir / "store") == []
    assert daemon.request(root / "class0" / "file00000.bin") == (Answer.DIRECT, Reason.VOID)
    wait_until(lambda: not list((daemon.node_dir / "gone").iterdir()))
    assert daemon.ask(Kind.WROTE, os.fsencode(root))[0] is Answer.DONE, "again does no harm"
    part = daemon.end()
    assert part.totals.void == 3 * (MOST_SINGLY + 100)


def test_second_names_of_links_go_too(start_daemon, tmp_path):
    root = tmp_path / "data"
    root.mkdir()
    (tmp_path / "one").write_bytes(b"x" * 100)
    for index in range(MOST_SINGLY + 10):
        (root / f"link{index:05d}").symlink_to(tmp_path / "one")
    daemon = start_daemon(root).attach()
    daemon.staged()
    links = daemon.node_dir / "links"
    assert len(list(links.iterdir())) == MOST_SINGLY + 10
    assert daemon.ask(Kind.WROTE, os.fsencode(root))[0] is Answer.DONE
    assert files_below(daemon.node_dir / "store") == []
    wait_until(lambda: not list(links.iterdir()))
    daemon.end()


@pytest.mark.parametrize("copied", [1, 400])
def test_many_at_once_while_they_are_copied(start_daemon, make_tree, copied):
    """What is in flight when its dataset is renamed never appears, neither then nor later."""
    files = MOST_SINGLY + 500
    root = make_tree(files=files, size_bytes=500)
    daemon = start_daemon(root, transfers=16, max_rate_bytes_per_s=500_000.0).attach()
    daemon.wait_for_scan()
    store = daemon.node_dir / "store"
    wait_until(lambda: len(files_below(store)) >= copied)
    assert daemon.ask(Kind.WROTE, os.fsencode(root))[0] is Answer.DONE
    visible = [path for path in files_below(store) if path.exists()]
    daemon.staged()
    assert visible == []
    assert files_below(store) == [], "no copy and no tombstone is left"
    assert not list((daemon.node_dir / "links").iterdir())
    assert not list((daemon.node_dir / "incoming").rglob("*/*"))
    part = daemon.end()
    assert part.totals.void == files


def test_the_room_of_many_is_free_once_they_are_deleted(local_dir, make_tree):
    root = make_tree(files=MOST_SINGLY + 100, size_bytes=100)
    manifest = scan(resolve([os.fspath(root)], Path("/"))).manifest
    store, helpers = Store(local_dir), Helpers()
    store.make()
    manifest.save(local_dir / "manifest.bin")
    pool = CopierPool(CopierSettings(local_dir, local_dir / "manifest.bin", 8), 1)
    try:
        pool.open_manifest()
        queue = Queue(manifest.sizes, Limits(Budget(1 << 40, 1 << 30)))
        engine = Engine(manifest, queue, pool, store)
        run_to_end(engine)
        writes = Writes(helpers, engine, Inodes(manifest, helpers, own_scan=True), lambda _: None)
        writes.void(os.fsencode(root))
        assert files_below(local_dir / "store") == []
        assert queue.budget.used_files == MOST_SINGLY + 100, "they are still on the disk"
        assert helpers.wait(HELPER, 30.0)
        assert (queue.budget.used_files, queue.budget.used_bytes) == (0, 0)
    finally:
        helpers.close()
        pool.close()


def test_what_cannot_be_renamed_is_dropped_one_by_one(start_daemon, make_tree):
    root = make_tree(files=MOST_SINGLY + 200, size_bytes=100)
    daemon = start_daemon(root).attach()
    daemon.staged()
    (daemon.node_dir / "gone").write_bytes(b"a file in its place")
    assert daemon.ask(Kind.WROTE, os.fsencode(root))[0] is Answer.DONE
    assert files_below(daemon.node_dir / "store") == []
    daemon.end()


def test_two_who_put_directories_aside_take_different_names(tmp_path):
    stores = [Store(tmp_path), Store(tmp_path)]
    stores[0].make()
    for name in (b"a", b"b"):
        os.makedirs(stores[0].path(name) + b"/below")
    asides = [stores[0].put_aside(b"a"), stores[1].put_aside(b"b")]
    assert [os.listdir(aside) for aside in asides if aside] == [[b"below"], [b"below"]]
    assert len(set(asides)) == 2


def test_a_tombstone_looks_like_a_link_of_the_source(tmp_path):
    store = Store(tmp_path)
    store.make()
    assert store.bar(3, b"d/x/file")
    path = store.path(b"d/x/file")
    assert os.lstat(path).st_nlink == 2
    assert not os.path.exists(path)
    assert store.bar(3, b"d/x/file"), "twice does no harm"
    store.unbar(3, b"d/x/file")
    assert not os.path.lexists(path)
    assert os.listdir(tmp_path / "links") == []


def test_a_tombstone_takes_the_place_of_a_copy_that_was_faster(tmp_path):
    store = Store(tmp_path)
    store.make()
    os.makedirs(store.path(b"d"))
    with open(store.path(b"d/file"), "wb") as file:
        file.write(b"stale")
    assert store.bar(1, b"d/file")
    assert not os.path.exists(store.path(b"d/file"))


def test_a_copy_that_cannot_be_removed_closes_the_store(start_daemon, make_tree, tmp_path):
    root = make_tree()
    victim = root / "class0" / "file00000.bin"
    daemon = start_daemon(root, node_dir=tmp_path / "node").attach()
    daemon.staged()
    with immutable(daemon.store(victim).parent):
        assert daemon.ask(Kind.WROTE, os.fsencode(victim))[0] is Answer.DONE
        assert daemon.store(victim).exists()
        assert daemon.gate()[CLOSED], "before the answer"
    part = daemon.end()
    (problem,) = part.problems
    assert problem.id == "store-closed"
    assert "file00000.bin" in problem.text
    assert "check the local disk" in problem.remedy


def test_a_program_that_closes_the_store_is_told_of(start_daemon, make_tree):
    daemon = start_daemon(make_tree()).attach()
    daemon.poke(CLOSED, 1)
    (problem,) = daemon.end().problems
    assert problem.id == "store-closed"
    assert "local disk" not in problem.remedy


def test_what_is_in_flight_and_cannot_be_barred_holds_everything(start_daemon, tmp_path):
    """The tombstone of a file that is written to while it is copied finds no room."""
    root = tmp_path / "data"
    root.mkdir()
    (root / "big").write_bytes(os.urandom(1 << 20) * 4)
    daemon = start_daemon(root, max_rate_bytes_per_s=4e6, node_dir=tmp_path / "node").attach()
    daemon.wait_for_scan()
    wait_until(lambda: list((daemon.node_dir / "incoming").rglob("*/*")))
    with immutable(daemon.node_dir / "links"):
        assert daemon.ask(Kind.WROTE, os.fsencode(root / "big"))[0] is Answer.DONE
        assert daemon.gate()[HELD] == 1
        daemon.staged()
    assert not daemon.store(root / "big").exists()
    assert daemon.gate()[HELD] == 0
    daemon.end()


def test_who_did_not_wait_is_caught_up_with(start_daemon, make_tree):
    """A write is sent to a daemon that hangs: once it lives again the copy is gone before anything is served."""
    root = make_tree()
    victim = root / "class0" / "file00000.bin"
    daemon = start_daemon(root).attach()
    daemon.staged()
    daemon.process.send_signal(signal.SIGSTOP)
    with daemon.connect() as connection:
        daemon.send(connection, Kind.WROTE, os.fsencode(victim))
    daemon.poke(GIVEN_UP, 77)
    assert daemon.store(victim).exists()
    daemon.process.send_signal(signal.SIGCONT)
    wait_until(lambda: daemon.gate()[CAUGHT_UP] == 77)
    assert not daemon.store(victim).exists()
    daemon.end()


def test_all_names_of_a_file_are_dropped(start_daemon, make_tree):
    """By the path of one, by the inode alone, and of a directory whose files have names elsewhere."""
    root = make_tree(files=9)
    names = sorted(root.rglob("*.bin"))
    for index, name in enumerate(names):
        (root / f"hard{index}").hardlink_to(name)
        (root / f"soft{index}").symlink_to(name)
    daemon = start_daemon(root).attach()
    daemon.staged()

    def kept(index):
        paths = (names[index], root / f"hard{index}", root / f"soft{index}")
        return [path for path in paths if daemon.store(path).exists()]

    assert daemon.ask(Kind.WROTE, os.fsencode(root / "hard0"))[0] is Answer.DONE
    assert (kept(0), len(kept(1))) == ([], 3)
    inode = os.stat(names[1])
    assert daemon.ask(Kind.LANDED, LANDED.pack(inode.st_dev, inode.st_ino))[0] is Answer.DONE
    assert kept(1) == []
    assert daemon.ask(Kind.LANDED, LANDED.pack(inode.st_dev + 1, os.stat(names[2]).st_ino))[0] is Answer.DONE
    assert len(kept(2)) == 3, "another device"
    assert daemon.ask(Kind.WROTE, os.fsencode(root / "class2"))[0] is Answer.DONE
    assert [len(kept(index)) for index in range(9)] == [0, 0, 3, 3, 3, 3, 0, 0, 0]
    daemon.end()


def test_what_was_opened_before_the_scan_is_not_served(start_daemon, make_tree, tmp_path):
    root = make_tree()
    victim = os.stat(root / "class0" / "file00000.bin")
    node = tmp_path / "node"
    node.mkdir()
    (node / "early").write_bytes(LANDED.pack(1, 1) + LANDED.pack(victim.st_dev, victim.st_ino))
    daemon = start_daemon(root, node_dir=node).attach()
    daemon.staged()
    assert daemon.request(root / "class0" / "file00000.bin") == (Answer.DIRECT, Reason.VOID)
    assert daemon.end().totals.void == 1


@pytest.mark.parametrize("at_once", [0, 10_000])
def test_inodes_are_found_with_and_without_the_index(tmp_path, monkeypatch, at_once):
    monkeypatch.setattr(inodes, "MOST_AT_ONCE", at_once)
    (tmp_path / "d").mkdir()
    for index in range(300):
        (tmp_path / f"d/{index}").touch()
        (tmp_path / f"d/{index % 100}-{index}").hardlink_to(tmp_path / f"d/{index}")
    manifest = scan(resolve([os.fspath(tmp_path / "d")], tmp_path)).manifest
    helpers = Helpers()
    found = Inodes(manifest, helpers, own_scan=True)
    for _ in range(2):
        for id_ in range(len(manifest)):
            entry = manifest.entry(id_)
            same = [i for i in range(len(manifest)) if manifest.inodes[i] == entry.inode]
            assert sorted(found.ids(entry.device, entry.inode)) == same == list(found.same_as((id_,)))
        helpers.wait(inodes.HELPER, 30.0)
    assert found.same_as(range(100)) == sorted({i for id_ in range(100) for i in found.same_as((id_,))})
    helpers.close()
