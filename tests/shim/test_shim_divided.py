"""A file that is divided among nodes: stripes of other nodes come and go while programs read. No read shows that.

The incoming file holds other bytes than the source, and zeros where stripes have gone.
"""

from __future__ import annotations

import os
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from shimlab import Coming, Lab, stepped

from hpcstage.protocol import arriving as wire
from hpcstage.protocol import shim
from hpcstage.store import copyfile
from hpcstage.store.arrivingrows import StripeShare
from hpcstage.store.shownrows import ShownRows

pytest_plugins = ("shimfixtures",)
MB = wire.LEAST_STRIPE_BYTES
SHARE = StripeShare(0, (0, 1))
OWN = range(0, 5, 2)
TOOLS = """
import threading
MB = 1 << 20
def whence(data):
    found = set(bytes(data))
    return {frozenset(b"c"): "copy", frozenset(b"s"): "source"}.get(frozenset(found), "wrong")
"""


@pytest.fixture
def divided(native_lab: Lab) -> Coming:
    """A node that has all stripes of its one file; some of them may go."""
    found = Coming(native_lab)
    native_lab.install().state(shim.State.STAGING)
    found.begin(SHARE)
    found.arrive()
    return found


def readers(coming: Coming) -> tuple[int, ...]:
    return coming.arrival.readers()


def test_a_stripe_that_went_is_read_at_the_source(divided: Coming) -> None:
    code = """
fd, found = os.open(src("file"), os.O_RDONLY), []
for _ in range(3):
    found.append([whence(os.pread(fd, 100, stripe * MB)) for stripe in range(5)])
    step()
say(found)
"""

    def evict() -> None:
        divided.arrival.evict(1)
        with divided.incoming.open("r+b") as file:
            assert copyfile.punch(file.fileno(), MB, MB)

    def bring() -> None:
        with divided.incoming.open("r+b") as file:
            file.seek(MB)
            file.write(b"c" * MB)
        divided.arrival.arrived(1)

    all_there = ["copy"] * 5
    found = stepped(divided.lab, TOOLS + code, actions=[evict, bring, lambda: None])
    assert found == [all_there, ["copy", "source", "copy", "copy", "copy"], all_there]


@contextmanager
def coming_and_going(coming: Coming) -> Iterator[None]:
    """Stripes of the other node go and come all the time."""
    ended = threading.Event()

    def go() -> None:
        with coming.incoming.open("r+b", buffering=0) as file:
            while not ended.is_set():
                for stripe in (1, 3):
                    coming.arrival.evict(stripe)
                    assert copyfile.punch(file.fileno(), stripe * MB, MB)
                    coming.arrival.coming(range(stripe, stripe + 1))
                    os.pwrite(file.fileno(), b"c" * MB, stripe * MB)
                    coming.arrival.arrived(stripe)

    thread = threading.Thread(target=go)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


@pytest.mark.parametrize("who", ["threads", "processes"])
def test_no_read_shows_that_stripes_come_and_go(divided: Coming, who: str) -> None:
    """Several read at random, several in order, while two of five stripes go and come again."""
    code = """
import random, time
def reads(number, out):
    fd, chance, end = os.open(src("file"), os.O_RDONLY), random.Random(number), time.monotonic() + 3
    room = bytearray(MB)
    while time.monotonic() < end:
        length = chance.choice((100, 4096, 65536, MB))
        at = chance.randrange(4 * MB + 1000 - length)
        if number % 3 == 0:
            part = os.pread(fd, length, at)
        elif number % 3 == 1:
            part = os.read(fd, length)
            if not part:
                os.lseek(fd, 0, os.SEEK_SET)
                continue
        else:
            os.lseek(fd, at, os.SEEK_SET)
            part = memoryview(room)[: os.readv(fd, [memoryview(room)[:length]])]
        where = whence(part)
        out[where] = out.get(where, 0) + 1
counts = [{} for _ in range(6)]
step()
if sys.argv[2] == "threads":
    threads = [threading.Thread(target=reads, args=pair) for pair in enumerate(counts)]
    [one.start() for one in threads]
    [one.join() for one in threads]
else:
    pipes = [os.pipe() for _ in counts]
    for number, (reading, writing) in enumerate(pipes):
        if not os.fork():
            reads(number, counts[number])
            os.write(writing, json.dumps(counts[number]).encode())
            os._exit(0)
        os.close(writing)
    counts = [json.loads(os.read(reading, 4096)) for reading, _ in pipes]
    [os.wait() for _ in pipes]
step()
say(counts)
"""
    going = coming_and_going(divided)
    actions = [going.__enter__, lambda: going.__exit__(None, None, None)]
    found = stepped(divided.lab, TOOLS + code, who, actions=actions)
    assert {where for one in found for where in one} == {"copy", "source"}
    assert all(one["copy"] > 0 for one in found)


def test_a_reader_in_order_says_where_it_is(divided: Coming) -> None:
    code = """
import random
fd = os.open(src("file"), os.O_RDONLY)
for _ in range(200):
    at = random.randrange(4 * MB - 65536)
    os.pread(fd, 65536, at)
    os.pread(fd, 1000, at + 65536)
step()
again = os.open(src("file"), os.O_RDONLY)
for at in range(0, 4 * MB, 65536):
    os.read(again, 65536)
step()
say([whence(os.read(again, 65536))])
"""
    seen = []
    divided.arrival.evict(3)
    actions = [lambda: seen.append(readers(divided)), lambda: seen.append(readers(divided))]
    stepped(divided.lab, TOOLS + code, actions=actions)
    assert not any(seen[0]), "nobody reads in order"
    assert sorted(seen[1]) == [*[0] * 7, 3 + 1], "what it needed last that was not here"
    assert divided.arrival.wished() is None, "it is for other nodes to wish"


def test_no_reader_says_where_it_is_in_a_file_that_stays(native_lab: Lab) -> None:
    coming = Coming(native_lab)
    native_lab.install().state(shim.State.STAGING)
    coming.begin()
    coming.arrive(0, 1, 2)
    stepped(native_lab, TOOLS + 'fd = os.open(src("file"), 0)\nwhile os.read(fd, 65536):\n    pass\nsay(1)')
    start = wire.ARRIVING_HEADER_BYTES
    data = (native_lab.node / wire.ARRIVING_FILE).read_bytes()[start : start + wire.ARRIVING_ROW_BYTES]
    assert not any(data[wire.EVICTED_OFFSET :])
    assert coming.arrival.wished() is not None


def test_exchanges_send_only_stripes_that_stay(divided: Coming) -> None:
    row = ShownRows(divided.lab.node / wire.ARRIVING_FILE).find(7)
    assert row is not None
    assert [stripe for stripe in range(6) if row.has(stripe)] == list(OWN)
    divided.arrival.evict(1)
    assert row.holds()


def test_the_count_of_what_went_is_never_none(divided: Coming) -> None:
    """After so many that the word begins anew, the file is divided all the same."""
    at = wire.ARRIVING_HEADER_BYTES + wire.EVICTED_OFFSET
    with (divided.lab.node / wire.ARRIVING_FILE).open("r+b", buffering=0) as file:
        found = []
        for count in (1, 2**32 - 3, 2**32 - 2):
            file.seek(at)
            file.write(struct.pack("<I", count))
            divided.arrival.evict(1)
            file.seek(at)
            found.append(struct.unpack("<I", file.read(4))[0])
    assert found == [2, 2**32 - 2, 1]
