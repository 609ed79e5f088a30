"""Asks the kernel who has a file open: it grants a lease (fcntl(2), F_SETLEASE) only while nobody has, by descriptor or
mapping, in whatever process. Who opens the file waits for the lease's end."""

from __future__ import annotations

import fcntl
import signal


def take_lease(fd: int, kind: int) -> None:
    """Takes a lease, which ends with the descriptor; the signal that tells of somebody who waits for that is one that
    nobody hears. Raises BlockingIOError if somebody has the file open, another OSError where nobody gets a lease."""
    fcntl.fcntl(fd, fcntl.F_SETSIG, signal.SIGURG)
    fcntl.fcntl(fd, fcntl.F_SETLEASE, kind)


def is_written(fd: int) -> bool:
    """Tells whether somebody has a file open for writing; who opens it meanwhile waits some microseconds. Raises
    OSError where nobody gets a lease."""
    try:
        take_lease(fd, fcntl.F_RDLCK)
    except BlockingIOError:
        return True
    fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    return False
