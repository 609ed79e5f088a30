"""Large files that are on their way: what has arrived is read from the incoming file, everything else from the source.

The incoming file holds other bytes than the source, so that what is read tells where it came from.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from shimlab import COMING_BYTES as SIZE
from shimlab import Action, Coming, Lab, Responder, ready, stepped

from hpcstage.plan.types import ManifestEntry
from hpcstage.protocol import shim
from hpcstage.protocol.arriving import ARRIVING_FILE, LEAST_STRIPE_BYTES
from hpcstage.store.arrivals import Arrivals, SourceFacts
from hpcstage.store.grantedrows import GrantedRows

pytest_plugins = ("shimfixtures",)
MB = LEAST_STRIPE_BYTES
TOOLS = """
import mmap, threading
MB = 1 << 20
def whence(data):  # where bytes came from
    found = set(bytes(data))
    return {frozenset(b"c"): "copy", frozenset(b"s"): "source", frozenset(): "nothing"}.get(frozenset(found), "both")
"""


@pytest.fixture
def coming(native_lab: Lab) -> Coming:
    """A node whose one file is on its way; nothing of it has arrived."""
    found = Coming(native_lab)
    native_lab.install().state(shim.State.SETTLED)
    return found


def through(lab: Lab, code: str, *args: Any, actions: Sequence[Action] = ()) -> Any:
    """What the code said last; at each of its steps the next action is done."""
    return stepped(lab, TOOLS + code, *args, actions=actions)


READS = {
    "pread": "os.pread(fd, 100, MB + 50)",
    "preadv": "(os.preadv(fd, [out], MB + 50), out)[1]",
    "preadv2": "(os.preadv(fd, [out], MB + 50, 0), out)[1]",
    "read": "(os.lseek(fd, MB + 50, 0), os.read(fd, 100))[1]",
    "readv": "(os.lseek(fd, MB + 50, 0), os.readv(fd, [out]), out)[2]",
    "raw": "(raw.seek(MB + 50), raw.read(100))[1]",
    "buffered": "(buffered.seek(MB + 50), buffered.read(100))[1]",
}


@pytest.mark.parametrize("way", READS)
def test_what_has_arrived_is_read_there(coming: Coming, way: str) -> None:
    code = f"""
import io
fd, out = os.open(src("file"), os.O_RDONLY), bytearray(100)
raw = io.FileIO(fd, closefd=False)
buffered = open(src("file"), "rb")
found = []
for _ in range(5):
    found.append(whence({READS[way]}))
    step()
buffered = open(src("file"), "rb")
found.append(whence({READS[way]}))
say([found, os.fstat(fd).st_size])
"""
    actions = [coming.begin, lambda: coming.arrive(0, 2), lambda: coming.arrive(1), coming.void, lambda: None]
    found, size = through(coming.lab, code, actions=actions)
    expected = ["source", "source", "source", "copy", "source", "source"]
    if way == "buffered":  # its buffer is read again only where it ends
        found, expected = found[::5], expected[::5]
    assert (found, size) == (expected, SIZE)
    if way != "buffered":
        assert coming.daemon.reads(7).read_bytes == 300
        assert coming.lab.counters()["arrived_read_bytes"] == 100


@pytest.mark.parametrize("stripes", [(), (0, 1, 2), (1, 2, 3), (0, 1, 2, 3, 4)])
def test_a_range_is_read_in_one_place(coming: Coming, stripes: tuple[int, ...]) -> None:
    """Ranges over the edges of stripes, and over the end of the file."""
    code = """
fd = os.open(src("file"), os.O_RDONLY)
ranges = [(MB - 1, 2), (MB, MB), (MB, MB + 1), (2 * MB, 2 * MB), (0, 3 * MB), (0, 9 * MB), (4 * MB, 5000), (8 * MB, 10)]
parts = [os.pread(fd, n, at) for at, n in ranges]
say([(whence(part), len(part)) for part in parts])
"""
    coming.begin()
    if stripes:
        coming.arrive(*stripes)
    expected = []
    for at, n in [(MB - 1, 2), (MB, MB), (MB, MB + 1), (2 * MB, 2 * MB), (0, 3 * MB), (0, 9 * MB), (4 * MB, 5000)]:
        end = min(at + n, SIZE)
        is_there = set(range(at // MB, (end - 1) // MB + 1)) <= set(stripes)
        expected.append(["copy" if is_there else "source", end - at])
    assert through(coming.lab, code) == [*expected, ["nothing", 0]]


def test_an_offset_goes_on_through_both_files(coming: Coming) -> None:
    coming.begin()
    coming.arrive(0, 2, 4)
    code = """
fd = os.open(src("file"), os.O_RDONLY)
found = []
while True:
    part = os.read(fd, MB // 4)
    found.append((whence(part), len(part), os.lseek(fd, 0, os.SEEK_CUR)))
    if not part:
        break
say(found)
"""
    found = through(coming.lab, code)
    assert [at for _, _, at in found] == [*range(MB // 4, 4 * MB + 1, MB // 4), SIZE, SIZE]
    assert [where for where, _, _ in found[:16]] == [
        "copy" if stripe in (0, 2) else "source" for stripe in range(4) for _ in range(4)
    ]
    assert found[-2][1:] == [1000, SIZE]


MOVES = {
    "lseek": "os.lseek(fd, MB, os.SEEK_SET)",
    "sendfile": "os.sendfile(pipe[1], fd, None, 1000)",
    "a duplicate": "os.read(os.dup(fd), 1000)",
    "the kernel": "ctypes.CDLL(None).syscall(8, fd, MB, 0)",
    "a stream": "libc.fread(room, 1, 10, libc.fdopen(fd, b'r'))",
}


@pytest.mark.parametrize("how", MOVES)
def test_an_offset_that_others_move_is_where_they_left_it(coming: Coming, how: str) -> None:
    """What is read next is expected where the last read ended."""
    lines = b"".join(b"%07d\n" % line for line in range(SIZE // 8))
    coming.source.write_bytes(lines)
    coming.incoming.write_bytes(lines)
    coming.begin()
    coming.arrive(0, 1, 4)
    code = f"""
import ctypes
libc, room, pipe = ctypes.CDLL(None), ctypes.create_string_buffer(10000), os.pipe()
libc.fdopen.restype = ctypes.c_void_p
libc.fread.argtypes = [ctypes.c_char_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_void_p]
fd = os.open(src("file"), os.O_RDONLY)
wrong = []
def reads():
    at = libc.lseek(fd, 0, 1)  # which nobody sees
    part = os.read(fd, 800)
    if int(part[-at % 8 : -at % 8 + 7]) != (at + 7) // 8 or libc.lseek(fd, 0, 1) != at + len(part):
        wrong.append((at, part[:20].decode()))
for turn in range(3):
    reads()
    reads()
    {MOVES[how]}
reads()
say(wrong)
"""
    assert through(coming.lab, code) == []


@pytest.mark.parametrize("shared_by", ["threads", "processes"])
def test_an_offset_that_is_shared_gives_each_byte_once(coming: Coming, shared_by: str) -> None:
    """Each piece of the file is read by one of those who share the offset, whether it has arrived or not."""
    piece = b"".join(b"%07d\n" % line for line in range(SIZE // 8))
    coming.source.write_bytes(piece)
    coming.incoming.write_bytes(piece)
    coming.begin()
    coming.arrive(0, 2, 4)
    code = """
fd = os.open(src("file"), os.O_RDONLY)
os.pread(fd, 8, 0)
def reads(out):
    while part := os.read(fd, 4000):
        assert len(part) in (4000, 4_195_304 % 4000), len(part)
        out.append(int(part[:7]))
if sys.argv[2] == "threads":
    lists = [[] for _ in range(4)]
    threads = [threading.Thread(target=reads, args=(one,)) for one in lists]
    [one.start() for one in threads]
    [one.join() for one in threads]
    found = sum(lists, [])
else:
    found, pipes = [], [os.pipe() for _ in range(4)]
    for reading, writing in pipes:
        if not os.fork():
            own = []
            reads(own)
            with os.fdopen(writing, "w") as file:
                json.dump(own, file)
            os._exit(0)
        os.close(writing)
    for reading, _ in pipes:
        with os.fdopen(reading) as file:
            found += json.load(file)
        os.wait()
say([sorted(found), os.lseek(fd, 0, os.SEEK_CUR)])
"""
    found, at = through(coming.lab, code, shared_by)
    assert found == list(range(0, len(piece) // 8, 500))
    assert at == len(piece)
    counters = coming.lab.counters()
    assert counters["arrived_read_bytes"] > 2 * MB - 4 * 4000
    assert counters["source_read_bytes"] + counters["arrived_read_bytes"] == len(piece) + 8


def test_a_source_that_is_not_what_the_row_says_is_read_itself(coming: Coming) -> None:
    code = """
fd = os.open(src("file"), os.O_RDONLY)
found = [whence(os.pread(fd, 10, 0))]
step()
again = os.open(src("file"), os.O_RDONLY)
say([*found, whence(os.pread(again, 10, 0)), whence(os.pread(os.open(src("other"), os.O_RDONLY), 10, 0))])
"""
    coming.begin()
    coming.arrive()
    coming.lab.put("other", b"s" * SIZE)

    def change() -> None:
        found = coming.source.stat()
        with coming.source.open("r+b") as file:
            file.write(b"s")
        os.utime(coming.source, ns=(found.st_atime_ns, found.st_mtime_ns))  # the time of change tells

    assert through(coming.lab, code, actions=[change]) == ["copy", "source", "source"]


def test_a_change_shows_once_a_lock_was_got(coming: Coming) -> None:
    code = """
import fcntl
fd = os.open(src("file"), os.O_RDONLY)
fcntl.flock(fd, fcntl.LOCK_SH)
found = [whence(os.pread(fd, 10, 0))]
fcntl.flock(fd, fcntl.LOCK_UN)
step()
fcntl.flock(fd, fcntl.LOCK_SH)
say([*found, whence(os.pread(fd, 10, 0))])
"""
    coming.begin()
    coming.arrive()
    assert through(coming.lab, code, actions=[lambda: os.utime(coming.source)]) == ["copy", "source"]


def test_nothing_is_served_while_copies_may_be_stale(coming: Coming) -> None:
    code = """
fd = os.open(src("file"), os.O_RDONLY)
found = [whence(os.pread(fd, 10, 0))]
step()
found.append(whence(os.pread(fd, 10, 0)))
step()
say([*found, whence(os.pread(fd, 10, 0))])
"""
    coming.begin()
    coming.arrive()
    give_up = lambda: coming.lab._poke(shim.GATE_OFFSET + 4 * shim.GIVEN_UP, 5)  # noqa: E731
    assert through(coming.lab, code, actions=[give_up, coming.lab.catch_up]) == ["copy", "source", "copy"]


WRITES = """
fd = os.open(src("file"), os.O_RDONLY)
found = [whence(os.pread(fd, 10, 0))]
with open(src("file"), "r+b") as file:
    file.write(b"new")
say([*found, os.pread(fd, 3, 0).decode()])
"""


def test_a_write_without_a_daemon_ends_it(coming: Coming) -> None:
    coming.begin()
    coming.arrive()
    assert through(coming.lab, WRITES) == ["copy", "new"]


def test_a_write_that_the_daemon_answers_ends_it(coming: Coming) -> None:
    coming.begin()
    coming.arrive()

    def voids(kind: shim.Kind, payload: bytes) -> bytes | None:
        if kind in (shim.Kind.WROTE, shim.Kind.LANDED):
            coming.void()
        return ready(kind, payload)

    with Responder(coming.lab.sock, voids):
        coming.lab.state(shim.State.STAGING)
        assert through(coming.lab, WRITES) in (["source", "new"], ["copy", "new"])


@pytest.mark.parametrize("how", ["close", "closerange", "dup2", "raw close"])
def test_numbers_that_are_taken_away_give_no_other_bytes(coming: Coming, how: str) -> None:
    """A program that closes all numbers closes that of the incoming file, too, and gets it for something else."""
    code = """
import ctypes
fd = os.open(src("file"), os.O_RDONLY)
found = [whence(os.pread(fd, 10, 0))]
own = [n for n in map(int, os.listdir("/proc/self/fd")) if n > 500 and "incoming" in os.readlink(f"/proc/self/fd/{n}")]
found.append(len(own))
other = os.open(src("other"), os.O_RDONLY)
how, libc = sys.argv[2], ctypes.CDLL(None, use_errno=True)
for n in own:
    if how == "close":
        os.close(n)
    elif how == "closerange":
        os.closerange(n, n + 1)
    elif how == "raw close":
        libc.syscall(3, n)
    os.dup2(other, n) if how == "dup2" else libc.syscall(33, other, n)
found.append(whence(os.pread(fd, 10, 0)))
step()
found.append(whence(os.pread(fd, 10, 0)))
say([*found, [os.pread(n, 5, 0).decode() for n in own]])
"""
    coming.lab.put("other", b"x" * SIZE)
    coming.begin()
    coming.arrive()
    found = through(coming.lab, code, how, actions=[coming.void])
    assert found == ["copy", 1, "source", "source", ["xxxxx"]]


def test_a_number_that_came_to_stand_for_another_file_is_that_file(coming: Coming) -> None:
    """Even where a program closed it without the C library."""
    code = """
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
fd = os.open(src("file"), os.O_RDONLY)
found = [whence(os.pread(fd, 10, 0))]
libc.syscall(3, fd)
reading, writing = os.pipe()
libc.syscall(33, os.open(src("other"), os.O_RDONLY), fd)
say([*found, os.pread(fd, 5, 0).decode(), os.read(fd, 5).decode()])
"""
    coming.lab.put("other", b"x" * SIZE)
    coming.begin()
    coming.arrive()
    assert through(coming.lab, code) == ["copy", "xxxxx", "xxxxx"]


def test_the_number_goes_when_the_row_goes(coming: Coming) -> None:
    code = """
fd = os.open(src("file"), os.O_RDONLY)
numbers = lambda: len(os.listdir("/proc/self/fd"))
before = numbers()
os.pread(fd, 10, 0)
during = numbers()
step()
os.pread(fd, 10, 0)
say([during - before, numbers() - before])
"""
    coming.begin()
    coming.arrive()
    assert through(coming.lab, code, actions=[coming.void]) == [1, 0]


def test_a_forked_child_reads_on_and_is_voided_alike(coming: Coming) -> None:
    code = """
fd = os.open(src("file"), os.O_RDONLY)
found = [whence(os.pread(fd, 10, 0))]
to_child, from_child = os.pipe(), os.pipe()
if not os.fork():
    os.close(to_child[1])
    while os.read(to_child[0], 1):
        os.write(from_child[1], os.pread(fd, 1, 0))
    os._exit(0)
def ask():
    os.write(to_child[1], b"x")
    return os.read(from_child[0], 1).decode()
found += [ask(), whence(os.pread(fd, 10, 0))]
step()
found += [ask(), whence(os.pread(fd, 10, 0))]
os.close(to_child[1])
os.wait()
say(found)
"""
    coming.begin()
    coming.arrive()
    assert through(coming.lab, code, actions=[coming.void]) == ["copy", "c", "copy", "s", "source"]


IN_ORDER = """
import time
fd, found = os.open(src("file"), os.O_RDONLY), []
os.lseek(fd, MB // 2, 0)
while part := os.read(fd, MB // 8):
    found.append(whence(part))
say(found)
"""


def test_a_reader_in_order_waits_for_what_the_copier_is_at(coming: Coming) -> None:
    def arrive() -> None:
        for stripe in range(1, 5):
            ended.wait(0.1)
            coming.arrive(stripe)

    coming.begin()
    coming.arrival.coming(range(1, 5))
    ended, thread = threading.Event(), threading.Thread(target=arrive)
    thread.start()
    found = through(coming.lab, IN_ORDER)
    thread.join()
    assert found[:4] == ["source"] * 4, "nobody is at the first stripe"
    assert found[4:-1] == ["copy"] * (len(found) - 5), "a short read at the end is the source's"


def test_nobody_waits_in_vain_again_before_what_was_waited_for_has_come(coming: Coming) -> None:
    code = """
import time
fd, found = os.open(src("file"), os.O_RDONLY), []
for stripe in range(4):
    began = time.monotonic()
    found.append([whence(os.read(fd, MB)), time.monotonic() - began >= 0.5])
    step()
say(found)
"""
    coming.begin()
    coming.arrival.coming(range(4))
    found = through(coming.lab, code, actions=[lambda: None, lambda: coming.arrive(0), lambda: None, lambda: None])
    assert found == [["source", True], ["source", False], ["source", True], ["source", False]]


def test_nobody_waits_for_what_stands_aside_or_at_random(coming: Coming) -> None:
    code = """
import time
fd, began = os.open(src("file"), os.O_RDONLY), time.monotonic()
found = [whence(os.read(fd, MB)), whence(os.pread(fd, 1000, 3 * MB)), whence(os.pread(fd, 1000, 2 * MB))]
say([found, time.monotonic() - began < 0.5])
"""
    coming.begin()
    coming.arrival.coming(range(1, 5))
    assert through(coming.lab, code) == [["source"] * 3, True]


def test_a_wait_that_is_in_vain_is_short(coming: Coming) -> None:
    code = """
import time
fd = os.open(src("file"), os.O_RDONLY)
found, begin = [whence(os.read(fd, MB))], time.monotonic()
while part := os.read(fd, 1000):
    found.append(whence(part))
say([set(found[1:]) == {"source"}, time.monotonic() - begin < 10])
"""
    coming.begin()
    coming.arrive(0)
    coming.arrival.coming(range(1, 5))
    assert through(coming.lab, code) == [True, True]


def test_many_files_arrive(native_lab: Lab) -> None:
    """More than rows, or than a process opens at a time: the rest is read at the source."""
    daemon, files = GrantedRows(native_lab.node), 40
    native_lab.install().state(shim.State.SETTLED)
    (native_lab.node / "incoming" / "0.0").mkdir(parents=True)
    granted = 0
    for number in range(files):
        source = native_lab.put(f"file{number}", b"s" * 1000)
        (native_lab.node / "incoming" / "0.0" / f"{number}").write_bytes(b"c" * 1000)
        if daemon.grant(number):
            granted += 1
            found = source.stat()
            listed = ManifestEntry(0, b"", 1000, found.st_mtime_ns, 0, 0, 0, False, found.st_ctime_ns)
            facts = SourceFacts(number, found, b"incoming/0.0/%d" % number)
            Arrivals(native_lab.node / ARRIVING_FILE).begin(facts, listed).arrived(0)
    code = f"""
fds = [os.open(src(f"file{{n}}"), os.O_RDONLY) for n in range({files})]
say([whence(os.pread(fd, 10, 0)) for fd in fds for _ in range(2)])
"""
    found = through(native_lab, code)
    assert granted == 32
    assert found.count("copy") == 2 * 16
    assert set(found) == {"copy", "source"}


def test_direct_reads_are_the_sources(coming: Coming, tmp_path: Path) -> None:
    code = """
fd, page = os.open(src("file"), os.O_RDONLY), mmap.mmap(-1, 4096)
os.readv(fd, [page])
found = [whence(page[:])]
import fcntl
try:
    fcntl.fcntl(fd, fcntl.F_SETFL, os.O_DIRECT)
    os.preadv(fd, [page], 0)
    found.append(whence(page[:]))
except OSError:
    found.append("source")
say(found)
"""
    coming.begin()
    coming.arrive()
    assert through(coming.lab, code) == ["copy", "source"]


@pytest.mark.parametrize("is_shown", [False, True])
@pytest.mark.parametrize("way", ["read", "after a child", "pread", "stream", "backwards", "apart", "twice"])
def test_a_reader_says_how_far_it_is(coming: Coming, way: str, *, is_shown: bool) -> None:
    """In order, or a file's pieces in another order, or with gaps; before anything of the file is copied, and while it
    comes."""
    code = """
import io, subprocess
if sys.argv[2] == "after a child":
    subprocess.run(["true"])  # by vfork
fd, n = os.open(src("file"), os.O_RDONLY), MB // 2
for part in range(8):
    if sys.argv[2] in ("read", "after a child"):
        os.read(fd, n)
    elif sys.argv[2] == "pread":
        os.pread(fd, n, n * part)
    elif sys.argv[2] == "twice":
        os.pread(fd, n, n * (part % 4))
    elif sys.argv[2] == "stream":
        stream = io.open(fd, "rb", closefd=False)
        stream.seek(n * part)
        stream.read(n)
    elif sys.argv[2] == "backwards":
        os.pread(fd, n, n * (7 - part))
    else:
        os.pread(fd, n - 1, n * part)
say(os.fstat(fd).st_ino)
"""
    if is_shown:
        coming.begin()
        coming.arrive(1, 2)
    else:
        assert coming.daemon.ask(7, coming.source.stat().st_ino, SIZE)
    through(coming.lab, code, way)
    reads, half = coming.daemon.reads(7), MB // 2
    front = max(reads.fronts, key=lambda front: front.run)
    runs = {"backwards": half, "apart": half - 1, "twice": 4 * half}
    assert reads.jumped_bytes == runs.get(way, 0)
    assert front.run == runs.get(way, 8 * half)
    assert front.at == {"backwards": half, "apart": 8 * half - 1, "twice": 4 * half}.get(way, 8 * half)
    assert reads.read_bytes == (8 * (half - 1) if way == "apart" else 8 * half)


def test_other_files_count_in_no_row(coming: Coming) -> None:
    assert coming.daemon.ask(7, coming.source.stat().st_ino + 1, SIZE)
    assert coming.daemon.ask(8, coming.source.stat().st_ino, SIZE + 1)
    through(coming.lab, "say(len(os.pread(os.open(src('file'), os.O_RDONLY), MB, 0)))")
    assert [coming.daemon.reads(id_).read_bytes for id_ in (7, 8)] == [0, 0]


def test_a_row_that_is_asked_for_later_counts_from_then_on(coming: Coming) -> None:
    code = """
fd = os.open(src("file"), os.O_RDONLY)
os.read(fd, MB)
step()
os.read(fd, MB)
step()
os.read(fd, MB)
say(0)
"""

    def ask() -> None:
        assert coming.daemon.ask(7, coming.source.stat().st_ino, SIZE)

    through(coming.lab, code, actions=[ask, lambda: coming.daemon.withdraw((7,))])
    assert coming.daemon.ask(8)
    assert coming.daemon.reads(7).read_bytes == 0, "withdrawn"
    assert coming.daemon.reads(8).read_bytes == 0
