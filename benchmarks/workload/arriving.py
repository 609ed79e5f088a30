"""Reads one large file at random with threads and with forked processes, and compares every byte with what it must be.
It knows nothing of hpcstage.

Owns the reads and what they may give. The file has blocks, each of which is as it was made, or inverted once this
program has written it; what a read gives of a block is as the block was at some moment between its begin and its end.
One thread goes through the file in order; the others read mostly what is before its place.

    python arriving.py FILE MADE --here DIRECTORY --seconds 12 --write 4
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import random
import struct
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

THREADS = PROCESSES = 8
IN_ORDER = THREADS + PROCESSES
"""The number of the reader in order."""
BLOCK_BYTES = 64 << 10
MOST_BYTES = 256 << 10
PIECE_BYTES = 256 << 10
"""Of the reader in order."""
WRITTEN_BLOCKS = 24
ANYWHERE = 0.04
"""The share of reads that may be of what has not been read in order yet."""
PAUSE_S = 0.004
FRONT, FAILED, READS, BYTES, STATES = 0, 8, 64, 512, 1024
"""Places in the memory that all share: u64 how far the reader in order is; a byte; u64 reads and bytes, of each reader
that counts; a byte for each block."""
_U64 = struct.Struct("<Q")
MADE, BEING_WRITTEN, WRITTEN = 0, 1, 2
_INVERTED = bytes(255 - value for value in range(256))


class Wrong(Exception):
    """A read gave something else than the file has."""


class File:
    """The file, and what all who read it share."""

    def __init__(self, path: Path, made: Path) -> None:
        self.path = path
        fd = os.open(made, os.O_RDONLY)
        self.made = mmap.mmap(fd, 0, prot=mmap.PROT_READ)
        os.close(fd)
        self.size = len(self.made)
        self.memory = mmap.mmap(-1, STATES + self.size // BLOCK_BYTES + 1)

    def states(self, at: int, n: int) -> bytes:
        """Returns the states of the blocks of a range."""
        return self.memory[STATES + at // BLOCK_BYTES : STATES + (at + n - 1) // BLOCK_BYTES + 1]

    def check(self, way: str, at: int, n: int, data: bytes, before: bytes) -> None:
        """Raises Wrong if a read of `n` bytes could not give this. `before`: the states before it began."""
        expected = max(0, min(n, self.size - at))
        if len(data) != expected:
            raise Wrong(f"{way} of {n} bytes at {at}: {len(data)} came, not {expected}")
        after, place = self.states(at, max(expected, 1)), 0
        for number in range(len(after)):
            end = min(expected, ((at + place) // BLOCK_BYTES + 1) * BLOCK_BYTES - at)
            self._check_block(way, at + place, data[place:end], (before[number], after[number]))
            place = end

    def _check_block(self, way: str, at: int, data: bytes, states: tuple[int, int]) -> None:
        made = self.made[at : at + len(data)]
        if data == made and states[0] != WRITTEN:
            return
        written = made.translate(_INVERTED)
        if data == written and states[1] != MADE:
            return
        is_between = states[0] != WRITTEN and states[1] != MADE
        if is_between and all(byte in (made[place], written[place]) for place, byte in enumerate(data)):
            return
        right = written if states[0] == WRITTEN else made
        wrong = sum(byte != right[place] for place, byte in enumerate(data))
        raise Wrong(f"{way} at {at}: {wrong} of {len(data)} bytes are wrong, block in states {states}")

    def write(self, rng: random.Random) -> None:
        """Inverts some blocks."""
        fd = os.open(self.path, os.O_RDWR)
        for block in rng.sample(range(self.size // BLOCK_BYTES), WRITTEN_BLOCKS):
            at = block * BLOCK_BYTES
            new = self.made[at : at + BLOCK_BYTES].translate(_INVERTED)
            self.memory[STATES + block] = BEING_WRITTEN
            if os.pwrite(fd, new, at) != BLOCK_BYTES:
                raise Wrong("a write was short")
            self.memory[STATES + block] = WRITTEN
        os.close(fd)

    @property
    def front(self) -> int:
        """How far the reader in order is."""
        return int(_U64.unpack_from(self.memory, FRONT)[0])

    @front.setter
    def front(self, at: int) -> None:
        _U64.pack_into(self.memory, FRONT, at)

    def count(self, number: int, reads: int, bytes_: int) -> None:
        """Notes what a reader has read, by its number."""
        _U64.pack_into(self.memory, READS + 8 * number, reads)
        _U64.pack_into(self.memory, BYTES + 8 * number, bytes_)

    def counted(self) -> tuple[int, int]:
        """Returns the reads and the bytes of all."""
        places = range(0, 8 * (IN_ORDER + 1), 8)
        return (
            sum(_U64.unpack_from(self.memory, READS + place)[0] for place in places),
            sum(_U64.unpack_from(self.memory, BYTES + place)[0] for place in places),
        )

    def failed(self, what: object) -> None:
        """Ends all who read."""
        self.memory[FAILED] = 1
        os.write(2, f"{what}\n".encode())


class Reader:
    """One thread that reads at random: on the open file that all share, and on one of its own."""

    def __init__(self, file: File, shared_fd: int, number: int, end_s: float) -> None:
        self.file = file
        self.shared_fd = shared_fd
        self.number = number
        self.end_s = end_s
        self._rng = random.Random(number)
        self._fd = os.open(file.path, os.O_RDONLY)
        self._buffered = open(file.path, "rb", buffering=20_000)  # noqa: SIM115  it is read by all its life
        self._ways: list[tuple[str, Callable[[int, int], bytes]]] = [
            ("pread", lambda at, n: os.pread(shared_fd, n, at)),
            ("preadv", self._preadv),
            ("read", self._read),
            ("buffered read", self._read_buffered),
            ("a map", self._map),
            ("sendfile", self._sendfile),
        ]

    def run(self) -> None:
        """Reads until the end."""
        done = bytes_ = 0
        try:
            while time.monotonic() < self.end_s and not self.file.memory[FAILED]:
                bytes_ += self._one()
                done += 1
                time.sleep(PAUSE_S)
        except Exception as error:  # noqa: BLE001  whatever it is, it must be known
            self.file.failed(f"reader {self.number}: {error!r}")
        self.file.count(self.number, done, bytes_)

    def _one(self) -> int:
        file, rng = self.file, self._rng
        n = min(MOST_BYTES, round(2 ** rng.uniform(0, 18.1)))
        at = rng.randrange(file.size + 1000) if rng.random() < ANYWHERE else rng.randrange(max(1, file.front))
        way, read = rng.choices(self._ways, (8, 4, 4, 2, 1, 1))[0]
        n = n if way != "a map" else max(1, min(n, file.size - at))
        if way == "a map" and at >= file.size:
            return 0
        before = file.states(at, n) if at < file.size else bytes(1)
        if way in ("a map", "buffered read"):  # what was mapped or is in a buffer may be older
            before = bytes(len(before))
        data = read(at, n)
        file.check(way, at, n, data, before)
        return len(data)

    def _preadv(self, at: int, n: int) -> bytes:
        parts = [bytearray(n // 3), bytearray(n - n // 3)]
        got = os.preadv(self.shared_fd, parts, at)
        return b"".join(parts)[:got]

    def _read(self, at: int, n: int) -> bytes:
        os.lseek(self._fd, at, os.SEEK_SET)
        data = os.read(self._fd, n)
        if os.lseek(self._fd, 0, os.SEEK_CUR) != at + len(data):
            raise Wrong(f"read of {n} bytes at {at}: the offset")
        return data

    def _read_buffered(self, at: int, n: int) -> bytes:
        self._buffered.seek(at)
        return self._buffered.read(n)

    def _map(self, at: int, n: int) -> bytes:
        start = at // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
        with mmap.mmap(self._fd, at - start + n, prot=mmap.PROT_READ, offset=start) as mapped:
            return mapped[at - start :]

    def _sendfile(self, at: int, n: int) -> bytes:
        to = os.memfd_create("sent")
        try:
            while n > 0 and (sent := os.sendfile(to, self._fd, at, n)):
                at, n = at + sent, n - sent
            os.lseek(to, 0, os.SEEK_SET)
            return os.read(to, MOST_BYTES)
        finally:
            os.close(to)


def in_order(file: File, end_s: float) -> None:
    """Reads the file from its begin to its end, again and again."""
    at = done = bytes_ = 0
    try:
        with open(file.path, "rb", buffering=0) as source:
            while time.monotonic() < end_s and not file.memory[FAILED]:
                before = file.states(at, PIECE_BYTES)
                data = source.read(PIECE_BYTES)
                file.check("read in order", at, PIECE_BYTES, data, before)
                at, done, bytes_ = at + len(data), done + 1, bytes_ + len(data)
                file.front = max(file.front, at)
                if not data:
                    at = source.seek(0)
                time.sleep(PAUSE_S)
    except Exception as error:  # noqa: BLE001  whatever it is, it must be known
        file.failed(f"reader in order: {error!r}")
    file.count(IN_ORDER, done, bytes_)


def read(file: File, seconds: float, write_s: float | None) -> list[int]:
    """Reads in all ways for some time; returns how the children ended."""
    shared_fd, begin_s = os.open(file.path, os.O_RDONLY), time.monotonic()
    end_s, children = begin_s + seconds, []
    for number in range(PROCESSES):
        pid = os.fork()
        if not pid:
            Reader(file, shared_fd, THREADS + number, end_s).run()
            os._exit(0)
        children.append(pid)
    threads = [threading.Thread(target=Reader(file, shared_fd, n, end_s).run) for n in range(THREADS)]
    threads.append(threading.Thread(target=in_order, args=(file, end_s)))
    for thread in threads:
        thread.start()
    if write_s is not None:
        time.sleep(write_s)
        file.write(random.Random(write_s))
    for thread in threads:
        thread.join()
    return [os.waitpid(pid, 0)[1] for pid in children]


def handshake(here: Path, name: str) -> str:
    """Says that a moment has come, and waits until it may go on; returns what it is told."""
    (here / name).touch()
    answer = here / f"{name}-go"
    while not answer.exists():
        time.sleep(0.005)
    return answer.read_text()


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser()
    parser.add_argument("file", type=Path)
    parser.add_argument("made", type=Path)
    parser.add_argument("--here", type=Path, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--write", type=float)
    given = parser.parse_args()
    file = File(given.file, given.made)
    file.front = int(handshake(given.here, "begin"))
    ends = read(file, given.seconds, given.write)
    handshake(given.here, "end")
    reads, bytes_ = file.counted()
    print(json.dumps({"reads": reads, "bytes": bytes_, "children": ends, "front": file.front}))
    return int(file.memory[FAILED] or any(ends))


if __name__ == "__main__":
    sys.exit(main())
