"""Exchanges two names in one step, which Python cannot: nobody ever sees one of them without an entry.

Owns the call `renameat2`.
"""

from __future__ import annotations

import ctypes
import errno
import os

KNOWS_NOT = frozenset({errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP})
"""The errors of a file system, a kernel or a C library that has only plain renames."""
_AT_FDCWD, _EXCHANGE = -100, 2
_libc = ctypes.CDLL(None, use_errno=True)


def exchange_names(one: str | os.PathLike[str], other: str | os.PathLike[str]) -> None:
    """Gives each of two entries the name of the other. Raises OSError."""
    renameat2 = getattr(_libc, "renameat2", None)
    if renameat2 is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS), os.fspath(one), None, os.fspath(other))
    if renameat2(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _EXCHANGE):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), os.fspath(one), None, os.fspath(other))
