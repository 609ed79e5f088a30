"""Waits for descriptors, and reads the whole of a file that a user named. Owns how long to wait for a pipe that nobody
writes to.

A pipe is read to its end as long as some process holds its other end: `--data @<(find ...)` may take its time.
"""

from __future__ import annotations

import errno
import math
import os
import select
import time
from collections.abc import Iterable

NO_WRITER_S = 5.0
_PIECE_BYTES = 1 << 20
_POLL_MS = 50


def readable(fds: Iterable[int], timeout_s: float | None) -> list[int]:
    """Waits until one of the descriptors can be read or its other end is gone; None: without end. Returns those that
    can. Their numbers may be above 1023, as they are where the program that started this one left many open."""
    poll = select.poll()
    for fd in fds:
        poll.register(fd, select.POLLIN)
    return [fd for fd, _ in poll.poll(None if timeout_s is None else math.ceil(max(timeout_s, 0.0) * 1000))]


def writable(fd: int, timeout_s: float) -> bool:
    """Waits until something can be written to a descriptor, or its other end is gone. Returns whether that is so."""
    poll = select.poll()
    poll.register(fd, select.POLLOUT)
    return bool(poll.poll(math.ceil(max(timeout_s, 0.0) * 1000)))


def read_whole(path: bytes | str | os.PathLike[str], limit_bytes: int | None = None) -> bytes:
    """Returns the content; of a file above the limit, one byte more than the limit.

    Raises OSError, also for a pipe that nobody writes to; its `strerror` then says so.
    """
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        return _read(fd, limit_bytes)
    finally:
        os.close(fd)


def _read(fd: int, limit_bytes: int | None) -> bytes:
    deadline = time.monotonic() + NO_WRITER_S
    content = bytearray()
    while limit_bytes is None or len(content) <= limit_bytes:
        left = _PIECE_BYTES if limit_bytes is None else min(_PIECE_BYTES, limit_bytes + 1 - len(content))
        try:
            piece = os.read(fd, left)
        except BlockingIOError:
            readable([fd], None)
            continue
        content += piece
        if piece:
            continue
        if not _awaits_writer(fd):
            break
        if time.monotonic() > deadline:
            raise OSError(errno.ETIMEDOUT, f"nobody writes to this pipe (waited {NO_WRITER_S:.0f} s)")
    return bytes(content)


def _awaits_writer(fd: int) -> bool:
    """Tells, at an end of the data, whether a writer may still come: a pipe that no writer has opened yet has no event;
    a file, or a pipe whose writers have gone, has one."""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return not poll.poll(_POLL_MS)
