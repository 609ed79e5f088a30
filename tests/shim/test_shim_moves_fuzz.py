"""Threads and forked processes read files whose copies are published, voided and written meanwhile: each byte is right.

A file is a row of records, each with its own number and the version of the file. A reader never gets a record that
belongs elsewhere, nor one of a version that had ended before it began to read.
"""

from __future__ import annotations

import os
import random
import signal
import struct
import subprocess
from pathlib import Path

from shimlab import Lab, wait_until

from hpcstage.protocol import shim

pytest_plugins = ("shimfixtures",)

RECORD = struct.Struct("<II")
RECORDS = 20_000
FILES = 3
TURNS = 40
FAILED = 3073
PROCESSES = 3
READERS = """
import mmap, random, struct, threading, time
records, files = int(sys.argv[2]), int(sys.argv[3])
floors = mmap.mmap(os.open(sys.argv[4], os.O_RDWR), 4096)
size = 8 * records
ROUND, SEEN, DONE, FAILED = 1024, 2048, 3072, 3073
def fail(what):
    os.write(2, what.encode() + b"\\n")
    floors[FAILED] = floors[DONE] = 1
    os._exit(1)
threading.excepthook = lambda found: fail(repr(found.exc_value))
def floor(number): return struct.unpack_from("<I", floors, 4 * number)[0]
def is_done(): return floors[DONE]
def check(what, data, at, least):
    if at % 8 or len(data) % 8: fail(f"{what}: cut at {at}, {len(data)} bytes")
    for place, (version, index) in enumerate(struct.iter_unpack("<II", data)):
        if index != at // 8 + place or version < least:
            fail(f"{what}: record {at // 8 + place} is {index} of version {version}, at least {least}")
def opened(number):  # at the source, so that it has to follow the file
    while not is_done():
        fd = os.open(src("file%d" % number), os.O_RDONLY)
        if os.readlink("/proc/self/fd/%d" % fd) == src("file%d" % number): return fd
        os.close(fd)
        time.sleep(0.001)
def reads(seed):
    rng = random.Random(seed)
    while not is_done():
        number = rng.randrange(files)
        fd = opened(number)
        if fd is None: return
        fds = [fd] if rng.random() < 0.7 else [fd, os.dup(fd)]
        at = 0
        for _ in range(rng.randrange(1, 60)):
            n, least = 8 * rng.randrange(1, 600), floor(number)
            fd, how = rng.choice(fds), rng.randrange(5)
            if how == 0:
                place = 8 * rng.randrange(records)
                check("pread", os.pread(fd, n, place), place, least)
            elif how == 1:
                at = os.lseek(fd, 8 * rng.randrange(records), os.SEEK_SET)
            elif how == 2:
                with mmap.mmap(fd, size, prot=mmap.PROT_READ) as mapped:
                    place = 8 * rng.randrange(records)
                    check("mmap", mapped[place:place + n], place, 0)  # what is mapped stays as it is
            else:
                data = os.read(fd, n)
                check("read", data, at, least)
                at += len(data)
                if os.lseek(fd, 0, os.SEEK_CUR) != at: fail("the offset")
            if os.fstat(fd).st_size != size: fail("the size")
        for one in fds: os.close(one)
def reads_shared(held, lock, process, number):  # one offset for several threads, which take turns
    while not is_done():
        with lock:
            if held[0] != floors[ROUND]:  # opened anew in each round, before its copy is there
                os.close(held[1])
                held[:] = floors[ROUND], opened(number)
                floors[SEEN + files * process + number] = held[0]
            fd = held[1]
            if fd is None: return
            at, least = os.lseek(fd, 0, os.SEEK_CUR), floor(number)
            data = os.read(fd, 4000)
            check("shared", data, at, least)
            if len(data) < 4000: os.lseek(fd, 0, os.SEEK_SET)
        with lock:
            if held[1] is None: return
            least = floor(number)
            check("shared pread", os.pread(held[1], 800, 80), 80, least)
children = []
for process in range(int(sys.argv[5])):
    pid = os.fork()
    if pid: children.append(pid); continue
    threads = [threading.Thread(target=reads, args=(100 * process + seed,)) for seed in range(2)]
    for number in range(files):
        args = [0, opened(number)], threading.Lock(), process, number
        threads += [threading.Thread(target=reads_shared, args=args) for _ in range(2)]
    for thread in threads: thread.start()
    while not is_done():
        if process == 0:
            grandchild = os.fork()
            if not grandchild: os._exit(0)
            os.waitpid(grandchild, 0)
        time.sleep(0.05)
    for thread in threads: thread.join()
    os._exit(0)
for _ in children:
    pid, status = os.wait()
    if status: fail(f"process {children.index(pid)} ended with {status}")
say("right")
"""


def content(version: int) -> bytes:
    return b"".join(RECORD.pack(version, index) for index in range(RECORDS))


def publish(lab: Lab, name: str) -> None:
    """As copiers and the daemon do: under another name first."""
    source, copy = lab.source / name, lab.store / name
    found = source.stat()
    incoming = lab.node / "incoming"
    incoming.write_bytes(source.read_bytes())
    os.utime(incoming, ns=(found.st_atime_ns, found.st_mtime_ns))
    incoming.rename(copy)
    lab.note(name)
    lab.publish()


def moved(lab: Lab) -> int:
    """How many open files have moved."""
    return lab.counters().get("moved_opens", 0)


def test_readers_get_what_is_there(native_lab: Lab, tmp_path: Path) -> None:
    lab, rng = native_lab, random.Random(0)
    for number in range(FILES):
        lab.put(f"file{number}", content(1))
    lab.install().state(shim.State.SETTLED)
    floors = tmp_path / "floors"
    floors.write_bytes(bytes(4096))
    words = str(RECORDS), str(FILES), floors, str(PROCESSES)
    process = lab.start(READERS, *words, stdin=subprocess.DEVNULL, start_new_session=True)

    def is_over() -> bool:
        return process.poll() is not None or floors.read_bytes()[FAILED] > 0

    def all_have(turn: int) -> bool:
        seen = floors.read_bytes()[2048 + FILES : 2048 + FILES * PROCESSES]  # the first process forks all the time
        return is_over() or all(number == turn for number in seen)

    try:
        with floors.open("r+b", buffering=0) as shared:
            for turn in range(2, TURNS + 2):
                os.pwrite(shared.fileno(), bytes([turn]), 1024)
                wait_until(lambda turn=turn: all_have(turn), 120)
                number = rng.randrange(FILES)
                name = f"file{number}"
                before = moved(lab)
                publish(lab, name)
                wait_until(lambda before=before: moved(lab) > before or is_over(), 120)
                lab.void(name)
                if rng.random() < 0.7:
                    with (lab.source / name).open("r+b") as file:
                        file.write(content(turn))
                    os.pwrite(shared.fileno(), struct.pack("<I", turn), 4 * number)
            os.pwrite(shared.fileno(), b"\1", 3072)
        out, errors = process.communicate(timeout=300)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()
    assert errors == b"", errors.decode()[:2000]
    assert out.splitlines()[-1] == b'"right"'
    assert moved(lab) >= TURNS
