"""Reads the kernel's events of directories (inotify): the calls, the masks and the form of the events.

Owns the descriptor of one queue of events. It knows nothing of what is watched and why.
"""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Iterator
from contextlib import suppress

READ_BYTES = 1 << 18
MODIFY, ATTRIB, CLOSE_WRITE, CLOSE_NOWRITE, OPEN = 0x2, 0x4, 0x8, 0x10, 0x20
MOVED_FROM, MOVED_TO, CREATE, DELETE = 0x40, 0x80, 0x100, 0x200
DELETE_SELF, MOVE_SELF, UNMOUNT, OVERFLOW, IGNORED = 0x400, 0x800, 0x2000, 0x4000, 0x8000
ONLYDIR, DONT_FOLLOW, EXCL_UNLINK, IS_DIR = 0x1000000, 0x2000000, 0x4000000, 0x40000000
SELF = DELETE_SELF | MOVE_SELF
MOVES = MOVED_FROM | MOVED_TO | DELETE | SELF
_EVENT = struct.Struct("=iIII")


class EventQueue:
    """Owns one queue of the kernel's events. A fork of this process may add watches, too."""

    def __init__(self) -> None:
        """Raises OSError where the user or the system has no queue left."""
        self._libc = ctypes.CDLL(None, use_errno=True)
        self.fd: int = self._libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        if self.fd < 0:
            self._fail()

    def add(self, path: bytes, mask: int) -> int:
        """Watches a file or directory and returns the watch's number, which stands for the inode: another path of the
        same inode gives the same number. Raises OSError."""
        number: int = self._libc.inotify_add_watch(self.fd, ctypes.c_char_p(path), ctypes.c_uint32(mask))
        if number < 0:
            self._fail()
        return number

    def remove(self, number: int) -> None:
        """Ends a watch, if it is still there."""
        self._libc.inotify_rm_watch(self.fd, number)

    def read(self) -> bytes:
        """Returns events that have come, for `events`; empty if there are none."""
        with suppress(BlockingIOError):
            return os.read(self.fd, READ_BYTES)
        return b""

    def close(self) -> None:
        """Ends all watches."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    @staticmethod
    def _fail() -> None:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def events(data: bytes) -> Iterator[tuple[int, int, int, bytes]]:
    """Yields the number of a watch, what happened, the cookie that joins the two events of a rename, and the name in
    a watched directory."""
    at = 0
    while at < len(data):
        number, mask, cookie, length = _EVENT.unpack_from(data, at)
        at += _EVENT.size + length
        yield number, mask, cookie, data[at - length : at].rstrip(b"\0")
