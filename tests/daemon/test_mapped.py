"""What is known of files that programs map into memory: how much of them was read, and who waits in a page fault."""

from __future__ import annotations

import mmap
import os
import select
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from conftest import wait_for

from hpcstage.daemon.copying import mapped
from hpcstage.daemon.copying.engine import Engine
from hpcstage.daemon.copying.mapped import ALL, SAMPLES, MappedReads, Resident, Sampled
from hpcstage.daemon.copying.openfiles import LargeInUse
from hpcstage.daemon.process.slottable import slot_at
from hpcstage.daemon.queue.queue import Queue
from hpcstage.daemon.queue.rates import Limits
from hpcstage.emulator import Settings, Slowfs, unavailable
from hpcstage.forked import Helpers
from hpcstage.node import page
from hpcstage.plan.budget import BudgetFacts
from hpcstage.plan.dataset.datasets import resolve
from hpcstage.plan.dataset.scan import scan
from hpcstage.protocol import nodedir, shim
from hpcstage.store import quiet
from hpcstage.store.copier import CopierSettings
from hpcstage.store.pool import CopierPool
from hpcstage.store.quiet import FAULTS_EVERY_S, PageFaults, Quiet
from hpcstage.store.storedir import Store, budget

MB = 1 << 20
SIZE, PARTS = 32 * MB, 16
PART = SIZE // PARTS


def on_slowfs(test: Callable[..., None]) -> Callable[..., None]:
    """Marks a test that needs the emulator."""
    needs = pytest.mark.skipif(unavailable() is not None, reason=f"emulator: {unavailable()}")
    return pytest.mark.fuse(pytest.mark.compiler(needs(test)))


def test_what_came_after_it_was_missing_was_read() -> None:
    known = Sampled().then(0b0011).then(0b0111)
    assert (known.read, known.share) == (0b0100, 1 / SAMPLES)
    assert known.then(0b0110).then(0b0111).read == 0b0101, "it was dropped, and came again"
    assert known.then(0b0000).read == 0b0100, "it was read, wherever it is now"
    assert Sampled().then(ALL).then(ALL).share == 0, "all was there before"


class Looker:
    """Looks at one file, with real helpers."""

    def __init__(self, much: float) -> None:
        self.found: list[int] = []
        self.helpers = Helpers()
        self._reads = MappedReads(self.helpers, much, self.found.append)

    def begin(self, *paths: Path) -> bool:
        """Returns whether there is a helper."""
        self._reads.look(dict(zip((7,), map(os.fsencode, paths), strict=False)))
        return bool(self.helpers.names())

    def round(self, path: Path) -> list[int]:
        """Looks at the file for one helper's life. Returns the files of which much was read."""
        assert self.begin(path)
        while self.helpers.fds():
            assert select.select(self.helpers.fds(), [], [], 30)[0]
            self.helpers.receive(self.helpers.fds()[0])
        return self.found


@pytest.fixture
def source(tmp_path: Path) -> Iterator[Path]:
    """A file on storage of which the page cache holds what was read."""
    (tmp_path / "behind").mkdir()
    (tmp_path / "behind" / "large").write_bytes(os.urandom(SIZE))
    with Slowfs(tmp_path / "behind", Settings(), keep_cache=True) as slow:
        yield slow.path / "large"


@pytest.fixture(autouse=True)
def short_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mapped, "LOOK_EVERY_S", 0.01)


def touch(path: Path, share: float) -> None:
    """Reads the beginning of each part of a file that is mapped for each part."""
    for start in range(0, SIZE, PART):
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as whole:
            assert whole[start : start + int(share * PART)]


@on_slowfs
def test_a_tenth_however_often_is_not_much(source: Path) -> None:
    much, little = Looker(0.25), Looker(0.05)
    assert (much.round(source), little.round(source)) == ([], [])
    for _ in range(4):
        touch(source, 0.1)
        assert (much.round(source), little.round(source)[:1]) == ([], [7])


@on_slowfs
def test_all_is_much(source: Path) -> None:
    looker = Looker(0.25)
    assert looker.round(source) == []
    touch(source, 1.0)
    assert looker.round(source) == [7]


@on_slowfs
def test_looking_reads_nothing(source: Path) -> None:
    looker = Looker(0.01)
    for _ in range(3):
        assert looker.round(source) == []


@on_slowfs
def test_what_was_in_memory_before_does_not_count_until_it_has_gone(source: Path) -> None:
    source.read_bytes()
    looker = Looker(0.25)
    looker.round(source)
    touch(source, 1.0)
    assert looker.round(source) == []
    with source.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    assert looker.round(source) == []
    touch(source, 1.0)
    assert looker.round(source) == [7]


AS_NOBODY = """
import os, sys
from hpcstage.daemon.copying import mapped
if os.geteuid() == 0:
    os.setgroups([]), os.setgid(65534), os.setuid(65534)
path = os.fsencode(sys.argv[1])
print(mapped._watch([(7, path, mapped.Sampled())], 2, 0.0).decode())
os.access = lambda *_: True
print(mapped.Resident(path).sampled() == mapped.ALL)
"""


def test_of_a_file_of_somebody_else_nothing_is_known(tmp_path: Path) -> None:
    """The kernel says that all of it is in memory, though most is not."""
    path = Path("/bin/sh")
    if os.geteuid() == 0:
        path = tmp_path / "large"
        with path.open("wb") as file:
            file.truncate(SIZE)
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        assert Resident(os.fsencode(path)).sampled() == 0
    with path.open("rb") as readable:
        command = [sys.executable, "-c", AS_NOBODY, "/dev/fd/0"]
        done = subprocess.run(command, stdin=readable, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["[]", "True"]


def test_of_what_cannot_be_mapped_nothing_is_known_and_it_is_not_tried_again(tmp_path: Path) -> None:
    looker, other = Looker(0.25), tmp_path / "other"
    assert looker.round(tmp_path / "missing") == []
    other.write_bytes(bytes(MB))
    assert not looker.begin(other)
    assert not looker.begin()


def test_no_helper_looks_where_nothing_is_mapped(tmp_path: Path, local_dir: Path) -> None:
    """The same file is large, and open at the source, in both cases."""
    path = tmp_path / "data" / "large"
    path.parent.mkdir()
    with path.open("wb") as file:
        file.truncate(100 * MB)
    manifest = scan(resolve([os.fspath(path.parent)], Path("/"))).manifest
    store, helpers = Store(local_dir), Helpers()
    store.make()
    manifest.save(local_dir / "manifest.bin")
    pool = CopierPool(CopierSettings(local_dir, local_dir / "manifest.bin", 1), 1)
    engine = Engine(manifest, Queue(manifest.sizes, Limits(budget(local_dir, BudgetFacts()))), pool, store)
    in_use, counters = LargeInUse(engine, helpers), [0] * shim.COUNTERS
    try:
        with path.open("rb"):
            in_use.look(lambda: [os.getpid()], counters, 1.0)
            assert (engine.queue.large.may_be_mapped(1.0), helpers.names()) == ([0], [])
            counters[shim.Counter.SOURCE_MAPS] = 1
            in_use.look(lambda: [os.getpid()], counters, 2.0)
            assert helpers.names() == [mapped.HELPER]
    finally:
        helpers.close()
        pool.close()


# ---- who waits in a page fault

FAULTS = """
import mmap, sys
with open(sys.argv[1], "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as whole:
    print(flush=True)
    while True:
        for start in range(0, len(whole), 1 << 20):
            whole[start]
        whole.madvise(mmap.MADV_DONTNEED)
        print(flush=True)
"""


@pytest.fixture
def slots(local_dir: Path) -> Iterator[Callable[[int, int], None]]:
    """Sets the pid of a process in the page, and how many files of the source it has mapped."""
    page.create(local_dir / nodedir.PAGE)
    with (local_dir / nodedir.PAGE).open("r+b") as file, mmap.mmap(file.fileno(), 0) as whole:

        def put(pid: int, maps: int) -> None:
            struct.pack_into("<I", whole, shim.NEXT_NATIVE_OFFSET, 3)
            struct.pack_into("<I", whole, slot_at(1), pid)
            at = slot_at(2) + shim.COUNTERS_OFFSET + 8 * shim.Counter.SOURCE_MAPS
            struct.pack_into("<Q", whole, at, maps)

        yield put


@on_slowfs
def test_a_page_fault_is_waited_for_where_the_source_is_mapped(
    tmp_path: Path, local_dir: Path, slots: Callable[[int, int], None]
) -> None:
    """The process that faults has not mapped the file itself: it may have been forked."""
    behind = tmp_path / "behind"
    behind.mkdir()
    with (behind / "large").open("wb") as file:
        file.truncate(SIZE)
    with Slowfs(behind, Settings(data_latency_s=2.0)) as slow:
        command = [sys.executable, "-c", FAULTS, slow.path / "large"]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as faulting:
            try:
                assert faulting.stdout is not None
                assert faulting.stdout.readline()
                stat = Path(f"/proc/{faulting.pid}/stat")
                wait_for(lambda: stat.read_text().rpartition(")")[2].split()[0] == "D")
                slots(faulting.pid, 0)
                assert Quiet(local_dir / nodedir.PAGE).look(), "nobody has mapped anything"
                wait_for(lambda: stat.read_text().rpartition(")")[2].split()[0] == "D")
                slots(faulting.pid, 1)
                found = Quiet(local_dir / nodedir.PAGE)
                assert not found.look()
                assert found.quiet_ns == 0
            finally:
                faulting.kill()
        slots(os.getpid(), 1)
        assert Quiet(local_dir / nodedir.PAGE).look(), "it has threads, and none waits"


def test_the_time_in_calls_of_the_source_is_not_quiet(local_dir: Path) -> None:
    page.create(local_dir / nodedir.PAGE)
    with (local_dir / nodedir.PAGE).open("r+b") as file, mmap.mmap(file.fileno(), 0) as whole:

        def blocked(slot: int, ns: int) -> None:
            at = slot_at(slot) + shim.COUNTERS_OFFSET + 8 * shim.Counter.BLOCKED_SOURCE_NS
            struct.pack_into("<q", whole, at, ns)

        struct.pack_into("<I", whole, shim.NEXT_NATIVE_OFFSET, 3)
        began = time.monotonic_ns()
        blocked(0, 10**15)
        found = Quiet(local_dir / nodedir.PAGE)
        assert found.look(), "what was before does not count"
        before, looked = found.quiet_ns, time.monotonic_ns()
        assert before <= looked - began
        time.sleep(0.02)
        assert found.look()
        grown = found.quiet_ns - before
        assert 20_000_000 <= grown <= time.monotonic_ns() - began
        call = time.monotonic_ns()
        blocked(1, -call)
        time.sleep(0.02)
        before = found.quiet_ns
        assert not found.look()
        during = found.quiet_ns - before
        assert during <= call - looked, "only what was before the call"
        blocked(1, time.monotonic_ns() - call)
        ended = time.monotonic_ns()
        before = found.quiet_ns
        assert found.look()
        assert found.quiet_ns - before <= time.monotonic_ns() - ended + 1_000_000


def test_threads_are_looked_at_no_more_often_than_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a look takes no time."""
    looked: list[str] = []
    monkeypatch.setattr(quiet, "_waits", lambda thread: bool(looked.append(thread)))
    faults, began = PageFaults(lambda: (os.getpid(),)), time.monotonic()
    while time.monotonic() - began < 20 * FAULTS_EVERY_S:
        faults.any()
    assert 0 < looked.count(f"/proc/{os.getpid()}/task/{os.getpid()}/stat") <= 21
