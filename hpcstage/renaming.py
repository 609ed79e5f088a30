"""Renames in the two ways of Linux that Python does not have: only to a free name, and by exchanging two names.

Owns the call `renameat2`. Both ways are one step: nobody ever sees one of the names without an entry.
"""

from __future__ import annotations

import ctypes
import errno
import os

KNOWS_NOT = frozenset({errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP})
"""The errors of a file system, a kernel or a C library that has only plain renames."""
_AT_FDCWD, _ONLY_NEW, _EXCHANGE = -100, 1, 2
_libc = ctypes.CDLL(None, use_errno=True)


def rename_if_free(old: str | os.PathLike[str], new: str | os.PathLike[str]) -> None:
    """Renames an entry. Raises FileExistsError if something has the name, and OSError."""
    _rename(old, new, _ONLY_NEW)


def exchange_names(one: str | os.PathLike[str], other: str | os.PathLike[str]) -> None:
    """Gives each of two entries the name of the other. Raises OSError."""
    _rename(one, other, _EXCHANGE)


def _rename(old: str | os.PathLike[str], new: str | os.PathLike[str], flags: int) -> None:
    renameat2 = getattr(_libc, "renameat2", None)
    if renameat2 is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS), os.fspath(old), None, os.fspath(new))
    if renameat2(_AT_FDCWD, os.fsencode(old), _AT_FDCWD, os.fsencode(new), flags):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), os.fspath(old), None, os.fspath(new))
