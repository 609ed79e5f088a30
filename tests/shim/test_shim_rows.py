"""What a read is served of a file on its way is the source's, wherever daemon, copiers and writers go on in between.

A reader stops at each of the kernel's calls that it makes to be served, and the others do a step of theirs there.
"""

from __future__ import annotations

import os
import select
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from shimlab import Lab, compile_library

from hpcstage.plan.types import ManifestEntry
from hpcstage.protocol import shim
from hpcstage.protocol.arriving import ARRIVING_FILE, LEAST_STRIPE_BYTES
from hpcstage.store.arrivals import Arrival, Arrivals, SourceFacts
from hpcstage.store.grantedrows import GrantedRows

pytest_plugins = ("shimfixtures",)
pytestmark = pytest.mark.compiler
MB = LEAST_STRIPE_BYTES
SIZE = 2 * MB + 1000
RANGES = [(0, 100), (MB - 50, 100), (MB, MB), (2 * MB, 1000), (5, 2 * MB)]
OTHER = 255
"""What stands in files that no reader has open."""
STOPS = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdarg.h>
#include <sys/syscall.h>
#include <unistd.h>
static long (*call)(long, ...);
static int in, out, is_on;
void stops(int stop_in, int stop_out, int on) { in = stop_in; out = stop_out; is_on = on; }
static void stop(void) {
    char byte = 's';
    int saved = errno;
    call(SYS_write, out, &byte, 1L);
    call(SYS_read, in, &byte, 1L);
    errno = saved;
}
long syscall(long number, ...) {
    va_list list;
    va_start(list, number);
    long a[6];
    for (int i = 0; i < 6; i++) a[i] = va_arg(list, long);
    va_end(list);
    if (!call) call = (long (*)(long, ...))dlsym(RTLD_NEXT, "syscall");
    int stops_here = is_on && (number == SYS_pread64 || number == SYS_preadv || number == SYS_statx);
    if (stops_here) stop();
    long result = call(number, a[0], a[1], a[2], a[3], a[4], a[5]);
    if (stops_here && number != SYS_statx) stop();
    return result;
}
"""
READER = """
import ctypes, struct
stops, (go, told) = ctypes.CDLL(None).stops, map(int, sys.argv[2:])
fd = -1
while command := os.read(go, 16):
    at, n = struct.unpack("<qq", command)
    if n < 0:
        if fd >= 0: os.close(fd)
        fd = os.open(src("file%d" % at), os.O_RDONLY)
        data = b""
    else:
        stops(go, told, 1)
        data = os.pread(fd, n, at)
        stops(go, told, 0)
    found = set(data)
    os.write(told, b"r" + struct.pack("<qB", len(data), found.pop() if len(found) == 1 else 0))
"""
ANSWER = struct.Struct("<qB")


class Reader:
    """A process that reads, one call after the other, and stops inside each."""

    def __init__(self, lab: Lab, library: Path) -> None:
        go, self._go = os.pipe()
        self._told, told = os.pipe()
        environment = lab.environment(LD_PRELOAD=os.fspath(library))
        self._process = lab.start(READER, str(go), str(told), env=environment, pass_fds=(go, told))
        os.close(go)
        os.close(told)
        self.asked: tuple[int, int] | None = None
        """The read that it is inside."""

    def opens(self, number: int) -> None:
        """Has it open another file."""
        self._say(struct.pack("<qq", number, -1))
        assert self._answer() == (0, 0)

    def begins(self, at: int, n: int) -> tuple[int, int] | None:
        """Begins a read. Returns how much it got and of which version, if it did not stop."""
        self.asked = at, n
        return self._until_it_stops(struct.pack("<qq", at, n))

    def goes_on(self) -> tuple[int, int] | None:
        """Does the next part of the read."""
        return self._until_it_stops(b"g")

    def _until_it_stops(self, said: bytes) -> tuple[int, int] | None:
        self._say(said)
        answer = self._answer()
        if answer is not None:
            self.asked = None
        return answer

    def _say(self, said: bytes) -> None:
        os.write(self._go, said)

    def _answer(self) -> tuple[int, int] | None:
        assert select.select([self._told], [], [], 60)[0], "it neither stops nor ends"
        if os.read(self._told, 1) == b"s":
            return None
        length, version = ANSWER.unpack(os.read(self._told, ANSWER.size))
        return length, version

    def close(self) -> None:
        """Ends it."""
        os.close(self._go)
        _, errors = self._process.communicate(timeout=60)
        os.close(self._told)
        assert (self._process.returncode, errors) == (0, b"")


class File:
    """One file, as daemon, copiers and writers go on with it. Each byte of it is the number of its version."""

    def __init__(self, lab: Lab, daemon: GrantedRows, id_: int) -> None:
        self.lab, self.daemon, self.id = lab, daemon, id_
        self.version = 1
        self.source = lab.put(f"file{id_}", bytes([self.version]) * SIZE)
        self.incoming = lab.node / "incoming" / "0.0" / str(id_)
        self.listed = self._listed()
        self.arrival: Arrival | None = None
        """Of the transfer that is under way."""
        self._fd = -1
        self._coming: int | None = None
        self._has_failed = self._is_void = False

    def _listed(self) -> ManifestEntry:
        found = self.source.stat()
        return ManifestEntry(0, b"", SIZE, found.st_mtime_ns, found.st_mode, 0, 0, False, found.st_ctime_ns)

    def ask(self) -> None:
        """A program asks for it."""
        if not self._is_void and self.arrival is None:
            self.daemon.ask(self.id, self.source.stat().st_ino, SIZE)

    def begin(self) -> None:
        """A transfer begins."""
        if self._is_void or self.arrival is not None:
            return
        found = self.source.stat()
        self.daemon.grant(self.id, found.st_ino, SIZE)
        self.incoming.unlink(missing_ok=True)
        self._fd = os.open(self.incoming, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        os.truncate(self._fd, SIZE)
        facts = SourceFacts(self.id, found, os.fsencode(self.incoming.relative_to(self.lab.node)))
        self.arrival = Arrivals(self.lab.node / ARRIVING_FILE).begin(facts, self.listed)
        self._has_failed = False

    def copy(self) -> None:
        """The copier writes a stripe, or shows the one that it has written if the source is as it was."""
        arrival = self.arrival
        if arrival is None or self._has_failed:
            return
        if self._coming is not None:
            stripe, self._coming = self._coming, None
            if self._listed() == self.listed:
                arrival.arrived(stripe)
            else:
                self.fail()
        elif (absent := arrival.first_absent()) is not None:
            self._coming = absent
            arrival.coming(range(absent, absent + 1))
            with self.source.open("rb") as source:
                os.pwrite(self._fd, os.pread(source.fileno(), MB, absent * MB), absent * MB)

    def anew(self) -> None:
        """The transfer is given up, and all comes in another one."""
        for step in (self.end, self.begin, *[self.copy] * 6):
            step()

    def fail(self) -> None:
        """The copier empties what it has."""
        if self.arrival is not None and not self._has_failed:
            self._has_failed, self._coming = True, None
            self.arrival.hide()
            os.truncate(self._fd, 0)

    def end(self) -> None:
        """The daemon hears of the end of the transfer: it failed, its copier was killed, or all is there."""
        if self.arrival is not None:
            is_whole = self.arrival.first_absent() is None and self._coming is None and not self._has_failed
            self.daemon.ended(self.id, is_stored=is_whole and not self._is_void)
            os.close(self._fd)
            self.incoming.unlink()
            self.arrival, self._coming = None, None

    def write(self) -> None:
        """A program writes to it: the daemon answers first."""
        self.daemon.withdraw((self.id,))
        self.version, self._is_void = self.version + 1, True
        with self.source.open("r+b") as file:
            file.write(bytes([self.version]) * SIZE)

    def leave(self) -> None:
        """Nothing of it is left."""
        self.daemon.withdraw((self.id,))
        self.end()


class Rows:
    """A daemon and its files."""

    def __init__(self, lab: Lab) -> None:
        self._lab = lab
        self._daemon = GrantedRows(lab.node)
        self._files = 0
        self._others: list[File] = []
        (lab.node / "incoming" / "0.0").mkdir(parents=True)

    def begin(self) -> File:
        """Returns another file of which two stripes are there."""
        self._files += 1
        file = File(self._lab, self._daemon, self._files)
        for step in (file.ask, file.begin, *[file.copy] * 4):
            step()
        return file

    def other(self) -> None:
        """Another file, of as many bytes, comes whole into the first row that is free."""
        file = self.begin()
        self._others.append(file)
        assert file.arrival is not None
        os.pwrite(file._fd, bytes([OTHER]) * SIZE, 0)
        file.arrival.arrived(2)

    def end(self, file: File) -> None:
        """Nothing is on its way any more."""
        for one in (file, *self._others):
            one.leave()
        self._others = []


@pytest.fixture
def reader(native_lab: Lab, tmp_path: Path) -> Iterator[Reader]:
    library = compile_library(tmp_path, "stops", STOPS, "-ldl")
    native_lab.install().state(shim.State.SETTLED)
    found = Reader(native_lab, library)
    yield found
    found.close()


STEPS = ("ask", "begin", "copy", "copy", "copy", "fail", "end", "anew", "anew", "write", "other")


def test_what_is_served_is_the_sources_whatever_goes_on_in_between(native_lab: Lab, reader: Reader) -> None:
    rows = Rows(native_lab)
    inside = 0

    @settings(max_examples=80, deadline=None)
    @given(st.lists(st.sampled_from(("read",) * 9 + STEPS) | st.sampled_from(RANGES), max_size=30))
    def run(steps: list[str | tuple[int, int]]) -> None:
        nonlocal inside
        file = rows.begin()
        reader.opens(file.id)

        def reads(at: int, n: int) -> None:
            check(at, n, reader.goes_on() if reader.asked else reader.begins(at, n))

        def check(at: int, n: int, got: tuple[int, int] | None) -> None:
            assert got is None or got == (min(n, SIZE - at), file.version)

        at, n = RANGES[0]
        reads(at, n)
        for step in steps:
            if isinstance(step, tuple):
                while reader.asked:
                    reads(at, n)
                at, n = step
                reads(at, n)
            elif step == "read":
                reads(at, n)
            else:
                inside += reader.asked is not None
                rows.other() if step == "other" else getattr(file, step)()
        while reader.asked:
            reads(at, n)
        rows.end(file)

    run()
    assert inside, "nothing went on inside a read"
    assert native_lab.counters()["arrived_read_bytes"]
