"""Stands for a shared file system on which calls fail, or lose their replies."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable

LOST = {
    "link": errno.EEXIST,
    "rename": errno.ENOENT,
    "unlink": errno.ENOENT,
    "rmdir": errno.ENOENT,
    "mkdir": errno.EEXIST,
    "symlink": errno.EEXIST,
}
"""Calls that a client of NFS sends again where it gets no reply, and what the server says then."""
CALLS = {*LOST, "open", "lstat", "chmod", "utime", "pwrite", "ftruncate", "fchmod", "fsync"}


class SharedOs:
    """Stands for `os` where DIR is changed: a call may fail, or be done and fail as if its reply had been lost."""

    def __init__(self, root: str, failing: Callable[[str], int]) -> None:
        self._root, self._failing = root, failing

    def __getattr__(self, name: str) -> object:
        plain = getattr(os, name)
        if name not in CALLS:
            return plain

        def call(*args: object, **more: object) -> object:
            if not self._is_of_dir(*args):
                return plain(*args, **more)
            number = self._failing(name)
            if number == LOST.get(name):
                plain(*args, **more)
            if number:
                raise OSError(number, os.strerror(number), args[0])
            return plain(*args, **more)

        return call

    def _is_of_dir(self, first: object, *others: object) -> bool:
        paths = [os.readlink(f"/proc/self/fd/{first}") if isinstance(first, int) else first, *others[:1]]
        return any(isinstance(path, str) and path.startswith(self._root) for path in paths)
