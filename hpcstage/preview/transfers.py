"""Transfers files with several threads for a limited time and measures what that takes, for the probe.

It drops each file's cached pages first (POSIX_FADV_DONTNEED), so that cache hits do not make the source look faster;
a node cannot drop what the storage servers cache. The time is bounded even where the source hangs: the threads are
daemon threads and are left behind.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

CHUNK_BYTES = 1 << 20
FILE_LIMIT_BYTES = 32 << 20
"""The probe reads only this much of a large file, from its beginning."""
COPY_LIMIT_BYTES = 256 << 20
GRACE_S = 0.25
CACHED_S = 50e-6
"""A look-up that is faster than this was answered by this node's cache."""


@dataclass
class Measured:
    """The sums of all threads over one phase."""

    files: int
    size_bytes: int
    open_s: float
    read_s: float
    write_s: float
    wall_s: float
    in_flight: int
    hung: int
    copies: list[str]


@dataclass
class _Sums:
    """The sums of one thread."""

    files: int = 0
    size_bytes: int = 0
    open_s: float = 0.0
    read_s: float = 0.0
    write_s: float = 0.0
    last_s: float = 0.0
    """The monotonic time at which the thread's last transfer ended."""
    copies: list[str] = field(default_factory=list)


def measure(paths: Sequence[bytes], place: str | None, threads: int, limit_s: float) -> Measured:
    """Transfers files until the time is over; threads that hang are left behind."""
    started = time.monotonic()
    deadline_s = started + limit_s
    source = _Shared(paths, COPY_LIMIT_BYTES)
    sums = [_Sums() for _ in range(min(threads, len(paths)))]
    workers = [
        threading.Thread(target=_transfer_all, args=(source, place, deadline_s, mine, number), daemon=True)
        for number, mine in enumerate(sums)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(max(0.0, deadline_s + GRACE_S - time.monotonic()))
    hung = sum(worker.is_alive() for worker in workers)
    return _summed(sums, started, hung)


def _summed(sums: list[_Sums], started: float, hung: int) -> Measured:
    wall_s = max([s.last_s for s in sums if s.files] or [started]) - started
    return Measured(
        files=sum(s.files for s in sums),
        size_bytes=sum(s.size_bytes for s in sums),
        open_s=sum(s.open_s for s in sums),
        read_s=sum(s.read_s for s in sums),
        write_s=sum(s.write_s for s in sums),
        wall_s=wall_s,
        in_flight=len(sums),
        hung=hung,
        copies=[path for s in sums for path in s.copies],
    )


class _Shared:
    """Hands out paths to threads until the byte limit is reached."""

    def __init__(self, paths: Sequence[bytes], limit_bytes: int) -> None:
        self._paths = iter(paths)
        self._left_bytes = limit_bytes
        self._lock = threading.Lock()

    def take(self, used_bytes: int) -> bytes | None:
        with self._lock:
            self._left_bytes -= used_bytes
            return next(self._paths, None) if self._left_bytes > 0 else None


def _transfer_all(source: _Shared, place: str | None, deadline_s: float, sums: _Sums, number: int) -> None:
    buffer = memoryview(bytearray(CHUNK_BYTES))
    used = 0
    for turn in itertools.count():
        path = source.take(used) if time.monotonic() < deadline_s else None
        if path is None:
            return
        before = sums.size_bytes
        target = None if place is None else f"{place}/{number}-{turn}"
        with contextlib.suppress(OSError):
            _transfer(path, target, deadline_s, sums, buffer)
        used = sums.size_bytes - before


def _transfer(path: bytes, target: str | None, deadline_s: float, sums: _Sums, buffer: memoryview) -> None:
    """Transfers one file. The file counts only if the transfer raised no error; its bytes count in any case."""
    start = time.monotonic()
    _look_up(path)
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.fstat(fd)
        opened = time.monotonic()
        out = -1 if target is None else os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            sums.write_s += time.monotonic() - opened
            _pump(fd, out, deadline_s, sums, buffer)
        finally:
            if out >= 0:
                os.close(out)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)
    sums.open_s += opened - start
    sums.files += 1
    sums.last_s = time.monotonic()
    if target is not None:
        sums.copies.append(target)


def _look_up(path: bytes) -> None:
    """Looks the name up as the program will, which opens the file when the caches have lost what the scan left there.

    Where the name is still cached, a missing name beside it is looked up, too, which costs the storage the same.
    """
    start = time.monotonic()
    os.stat(path)
    if time.monotonic() - start < CACHED_S:
        with contextlib.suppress(OSError):
            os.stat(path + b".hpcstage-probe")


def _pump(fd: int, out: int, deadline_s: float, sums: _Sums, buffer: memoryview) -> None:
    done = 0
    now = time.monotonic()
    while done < FILE_LIMIT_BYTES:
        count = os.readv(fd, [buffer])
        after = time.monotonic()
        sums.read_s += after - now
        now = after
        if count == 0:
            return
        done += count
        sums.size_bytes += count
        if out >= 0:
            os.write(out, buffer[:count])
            now = time.monotonic()
            sums.write_s += now - after
        if now > deadline_s:
            return


def read_back(copies: Sequence[str], limit_s: float) -> Measured | None:
    """Reads copies from the disk, not from memory: those that could be written through in half of the time."""
    if not copies:
        return None
    half_s = time.monotonic() + limit_s / 2
    written = []
    for path in copies:
        if time.monotonic() > half_s:
            break
        with contextlib.suppress(OSError):
            _write_through(path)
            written.append(os.fsencode(path))
    return measure(written, None, 1, limit_s / 2) if written else None


def _write_through(path: str) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fdatasync(fd)
    finally:
        os.close(fd)
