"""Copies pass from a giver to the copiers of another node, and whatever goes wrong ends at the source."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from conftest import GLOO, wait_for

pytest.importorskip("torch")

from hpcstage.elastic.passing import process
from hpcstage.elastic.passing.giver import ANSWER, REQUEST, REQUEST_BYTES
from hpcstage.elastic.passing.pair import ANSWER_S, BLOCK_BYTES, CONNECT_S, Pair, PairError
from hpcstage.elastic.passing.receiver import Receiver
from hpcstage.plan.dataset.manifest import Manifest
from hpcstage.plan.types import Dataset, DatasetKind, Entry
from hpcstage.protocol import nodedir
from hpcstage.protocol.passing import Wanted
from hpcstage.store import passed
from hpcstage.store.copyfile import CopyJob, CopyOutcome, CopyWorker, Status
from hpcstage.store.counters import StatsArea
from hpcstage.store.passed import PassedCopies

pytestmark = [pytest.mark.torch, pytest.mark.slow, pytest.mark.timeout(120)]
KEY, OTHER = "17" * 32, "18" * 32
ADDRESS = "127.0.0.1"
FILES = {"small": 10_000, "empty": 0, "large": 2 * BLOCK_BYTES + 5, "stale": 100, "absent": 100}


class Nodes:
    """Two node directories, of which the first has copies, and the processes between them."""

    def __init__(self, root: Path) -> None:
        self.source, self.gives, self.gets = root / "source", root / "gives", root / "gets"
        for directory in (self.source, self.gives / nodedir.STORE / "source", self.gets / nodedir.STORE):
            directory.mkdir(parents=True)
        for name, size in FILES.items():
            (self.source / name).write_bytes(os.urandom(size))
            if name != "absent":
                shutil.copy2(self.source / name, self.gives / nodedir.STORE / "source" / name)
        os.utime(self.gives / nodedir.STORE / "source" / "stale", ns=(0, 0))
        dataset = Dataset("source", DatasetKind.DIRECTORY, os.fsencode(self.source), (), ())
        Manifest.build([dataset], map(self.entry, FILES)).save(self.gives / nodedir.MANIFEST)
        self.worker = CopyWorker(StatsArea(1).thread(0))
        self.processes: list[subprocess.Popen[bytes]] = []

    def entry(self, name: str, **changed: Any) -> Entry:
        found = (self.source / name).stat()
        entry = Entry(
            0,
            os.fsencode(name),
            found.st_size,
            found.st_mtime_ns,
            found.st_mode,
            found.st_dev,
            found.st_ino,
            is_link=False,
            ctime_ns=found.st_ctime_ns,
        )
        return replace(entry, **changed)

    def start(self, module: str, directory: Path, **more: str) -> subprocess.Popen[bytes]:
        started = process.start(module, node_dir=os.fspath(directory), address=ADDRESS, **more)
        self.processes.append(started)
        return started

    def giver(self, key: str = KEY) -> tuple[subprocess.Popen[bytes], int]:
        giver = self.start("giver", self.gives, key=key)
        assert giver.stdout is not None
        return giver, int(giver.stdout.readline())

    def receiver(self, *givers: tuple[int, str]) -> subprocess.Popen[bytes]:
        receiver = self.start("receiver", self.gets)
        for port, key in givers:
            process.tell(receiver, address=ADDRESS, port=port, key=key)
        wait_for((self.gets / "passing").exists, 30, "the receiver's socket")
        return receiver

    def copy(self, copies: PassedCopies, name: str, **changed: Any) -> CopyOutcome | None:
        store = self.gets / nodedir.STORE
        job = CopyJob(*map(os.fsencode, (self.source / name, self.gets / "temporary", store / name)))
        found = copies.copy(self.worker, job, self.entry(name, **changed))
        assert not (self.gets / "temporary").exists()
        assert (store / name).exists() == (found is not None and found.status is Status.PASSED)
        return found

    def end(self) -> None:
        for one in self.processes:
            process.end(one, 10)


@pytest.fixture
def nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Nodes]:
    for name, value in GLOO.items():
        monkeypatch.setenv(name, value)
    made = Nodes(tmp_path)
    monkeypatch.chdir(made.gets)
    yield made
    made.end()


@pytest.fixture
def copies(nodes: Nodes) -> Iterator[PassedCopies]:
    made = PassedCopies()
    yield made
    close(made)


def close(copies: PassedCopies) -> None:
    """Closes the connection of this thread, which a copier's threads keep to their end."""
    if connection := getattr(copies._own, "connection", None):
        connection.close()


def test_copies_that_the_giver_has_pass(nodes: Nodes, copies: PassedCopies) -> None:
    giver, port = nodes.giver()
    receiver = nodes.receiver((port, KEY))
    for name in ("small", "empty", "large"):
        found, there = nodes.copy(copies, name), nodes.source / name
        assert found is not None
        assert (found.status, found.size_bytes) == (Status.PASSED, FILES[name])
        copy = nodes.gets / nodedir.STORE / name
        assert copy.read_bytes() == there.read_bytes()
        assert (copy.stat().st_mtime_ns, copy.stat().st_mode) == (there.stat().st_mtime_ns, there.stat().st_mode)
        copy.unlink()
    assert nodes.copy(copies, "absent") is None
    assert nodes.copy(copies, "stale") is None, "the copy is not of the file that the source has"
    assert nodes.copy(copies, "small", ctime_ns=5) is None, "the giver's manifest says something else of the file"
    assert nodes.copy(copies, "small", is_link=True) is None
    (nodes.gets / nodedir.STORE / "small").mkdir()
    exists = copies.copy(
        nodes.worker,
        CopyJob(os.fsencode(nodes.source / "small"), b"temporary", b"store/small"),
        nodes.entry("small"),
    )
    assert exists is not None
    assert exists.status is Status.EXISTS
    assert giver.stdin is not None
    giver.stdin.close()
    assert giver.wait(10) == 0, "it ends with the agent that started it"
    assert nodes.copy(copies, "large") is None
    assert receiver.poll() is None


def asked(port: int, key: str, wanted: Wanted) -> bool:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    store = TCPStore(ADDRESS, port, None, False, timedelta(seconds=10), wait_for_workers=False)
    pair, packed = Pair(store, 1, ADDRESS, bytes.fromhex(key)), wanted.pack()
    REQUEST.pack_into(pair.data, 0, len(packed))
    pair.data[REQUEST.size : REQUEST.size + len(packed)] = packed
    pair.send(REQUEST_BYTES)
    pair.receive(ANSWER.size)
    return bool(ANSWER.unpack_from(pair.data)[0])


def test_nobody_gets_a_byte_without_the_key(nodes: Nodes) -> None:
    entry = nodes.entry("small")
    wanted = Wanted(os.fsencode(nodes.source / "small"), entry.size_bytes, entry.mtime_ns, entry.ctime_ns)
    _, port = nodes.giver()
    assert asked(port, KEY, wanted)
    giver, port = nodes.giver()
    with pytest.raises(PairError):
        asked(port, OTHER, wanted)
    assert giver.wait(10) == 1


def test_a_receiver_that_takes_long_to_come_is_awaited(nodes: Nodes, copies: PassedCopies) -> None:
    giver, port = nodes.giver()
    with pytest.raises(subprocess.TimeoutExpired):
        giver.wait(CONNECT_S + 1)
    nodes.receiver((port, KEY))
    assert nodes.copy(copies, "small") is not None


def test_nothing_is_taken_from_a_giver_without_the_key(nodes: Nodes, copies: PassedCopies) -> None:
    (false, its_port), (_, port) = nodes.giver(OTHER), nodes.giver()
    nodes.receiver((its_port, KEY))
    assert nodes.copy(copies, "small") is None
    assert false.wait(10) == 1
    process.tell(nodes.processes[-1], address=ADDRESS, port=port, key=KEY)
    wait_for(lambda: nodes.copy(copies, "small") is not None, 30, "a copy of the right giver")


def test_a_giver_that_does_not_answer_costs_one_bounded_wait(nodes: Nodes, copies: PassedCopies) -> None:
    giver, port = nodes.giver()
    nodes.receiver((port, KEY))
    assert nodes.copy(copies, "empty") is not None
    giver.send_signal(signal.SIGSTOP)
    began_s = time.monotonic()
    assert nodes.copy(copies, "small") is None
    assert ANSWER_S <= time.monotonic() - began_s < passed.ANSWER_S
    began_s = time.monotonic()
    assert nodes.copy(copies, "large") is None
    assert time.monotonic() - began_s < ANSWER_S / 2, "it is given up"
    giver.send_signal(signal.SIGCONT)
    assert giver.wait(10) == 1, "it ends when the receiver has gone from it"


def test_a_receiver_that_does_not_answer_is_asked_no_more(
    nodes: Nodes, copies: PassedCopies, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(passed, "ANSWER_S", 0.5)
    nodes.receiver().send_signal(signal.SIGSTOP)
    assert [nodes.copy(copies, "small") for _ in range(passed.MOST_FAILURES)] == [None] * passed.MOST_FAILURES
    shutil.rmtree(nodes.gets)  # nothing is tried there any more
    job = CopyJob(b"source", b"temporary", b"target")
    assert copies.copy(nodes.worker, job, nodes.entry("small")) is None


def during_a_transfer(nodes: Nodes, copies: PassedCopies, act: Callable[[], None]) -> CopyOutcome | None:
    """Returns the outcome of a copy in the middle of which something happens."""
    found: list[CopyOutcome | None] = []

    def copy() -> None:
        found.append(nodes.copy(copies, "large"))
        close(copies)

    thread = threading.Thread(target=copy)
    thread.start()
    wait_for((nodes.gets / "temporary").exists, 10, "the transfer")
    act()
    thread.join(30)
    return found[0]


def test_a_receiver_that_is_killed_in_a_transfer_leaves_nothing(nodes: Nodes, copies: PassedCopies) -> None:
    giver, port = nodes.giver()
    receiver = nodes.receiver((port, KEY))
    assert nodes.copy(copies, "small") is not None
    giver.send_signal(signal.SIGSTOP)
    assert during_a_transfer(nodes, copies, receiver.kill) is None
    giver.send_signal(signal.SIGCONT)
    assert giver.wait(10) == 1


def test_a_giver_that_is_killed_in_a_transfer_ends_it_at_once(nodes: Nodes, copies: PassedCopies) -> None:
    giver, port = nodes.giver()
    nodes.receiver((port, KEY))
    assert nodes.copy(copies, "small") is not None
    giver.send_signal(signal.SIGSTOP)
    began_s = time.monotonic()
    assert during_a_transfer(nodes, copies, giver.kill) is None
    assert time.monotonic() - began_s < ANSWER_S


def test_givers_end_when_nothing_is_asked_for_any_more(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    giver, port = nodes.giver()
    receiver = Receiver(ADDRESS)
    receiver.told({"address": ADDRESS, "port": port, "key": KEY})
    entry = nodes.entry("empty")
    wanted = Wanted(os.fsencode(nodes.source / "empty"), entry.size_bytes, entry.mtime_ns, entry.ctime_ns)
    assert receiver.get(wanted, -1)
    receiver.look()
    assert receiver.get(wanted, -1), "it is kept as long as files are asked for"
    monkeypatch.setattr("hpcstage.elastic.passing.receiver.IDLE_S", 0.0)
    receiver.look()
    assert giver.wait(10) == 1
    assert not receiver.get(wanted, -1)


def test_a_transfer_that_is_cancelled_ends(nodes: Nodes, copies: PassedCopies) -> None:
    giver, port = nodes.giver()
    nodes.receiver((port, KEY))
    assert nodes.copy(copies, "small") is not None
    giver.send_signal(signal.SIGSTOP)

    def cancel() -> None:
        from hpcstage.store.counters import CANCEL

        nodes.worker.stats.words[CANCEL] = 1

    found = during_a_transfer(nodes, copies, cancel)
    assert found is not None
    assert found.status is Status.CANCELLED


@pytest.mark.parametrize("comes", [False, True])
def test_a_giver_that_comes_is_waited_for(comes: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hpcstage.elastic.passing.receiver.ANSWERED_S", 0.1)
    monkeypatch.setattr("hpcstage.protocol.passing.COMING_S", 1.0)
    receiver = Receiver(ADDRESS)
    if comes:
        receiver.told({"comes": True})
    began_s = time.monotonic()
    assert not receiver.get(Wanted(b"/never", 0, 0, 0), -1)
    assert (time.monotonic() - began_s >= 0.9) is comes
