"""Makes files that the daemon and programs map, with their blocks allocated: writing into a hole on a disk that is full
by then is SIGBUS."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from pathlib import Path


def put_u32(mapped: mmap.mmap | bytearray, offset: int, value: int) -> None:
    """Writes a word that others may read at any moment: they see the old value or the new one. (`struct.pack_into`
    fills the place with zeros first.)"""
    memoryview(mapped)[offset : offset + 4].cast("I")[0] = value


def put_u64(mapped: mmap.mmap | bytearray, offset: int, value: int) -> None:
    """See `put_u32`."""
    memoryview(mapped)[offset : offset + 8].cast("Q")[0] = value


def make(path: Path, size_bytes: int, header: Callable[[os.stat_result], bytes]) -> mmap.mmap:
    """Makes a file that begins with what `header` returns for its attributes, and is zero otherwise. Programs see it
    complete or not at all. Raises OSError if the disk has no space for it."""
    temporary = path.with_name(f".{path.name}")
    fd = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(fd, 0, size_bytes)
        mapped = mmap.mmap(fd, size_bytes)
        head = header(os.fstat(fd))
        mapped[: len(head)] = head
        temporary.rename(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    finally:
        os.close(fd)
    return mapped
