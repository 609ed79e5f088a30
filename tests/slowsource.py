"""A slow source of some files, and what a program must find that reads one of them piece by piece."""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpcstage.emulator import Settings, Slowfs, unavailable

NEEDS = [
    pytest.mark.fuse,
    pytest.mark.compiler,
    pytest.mark.skipif(unavailable() is not None, reason=f"emulator: {unavailable()}"),
]
"""The marks of tests that have one."""


@contextlib.contextmanager
def slow_source(behind: Path, settings: Settings, **files: bytes | int) -> Iterator[Slowfs]:
    """Writes files into a new directory and mounts it; a number is the size of a file of zeros."""
    behind.mkdir()
    for name, content in files.items():
        with (behind / name).open("wb") as file:
            if isinstance(content, bytes):
                file.write(content)
            else:
                file.truncate(content)
    with Slowfs(behind, settings, keep_cache=True) as slow:
        yield slow


def checksum(content: bytes, piece_bytes: int) -> int:
    """Returns the checksum of all pieces, which does not depend on the order in which they are read."""
    found = 0
    for at in range(0, len(content), piece_bytes):
        found ^= zlib.crc32(content[at : at + piece_bytes], at)
    return found
