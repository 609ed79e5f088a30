"""What this node holds, for the programs that run on it: a byte per file in a shared mapping.

Owns the mapping. Whoever reads it (a sampler that gives ranks what their node has) costs the daemon no message. What
only passes through a node is not in it, for it may be gone by the time it is read.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable
from pathlib import Path

from hpcstage.protocol.shim import HOLDINGS_FILE, HOLDINGS_HEADER, HOLDINGS_MAGIC, Holding

_ONLY_KEPT = bytes(Holding.KEPT if value == Holding.KEPT else Holding.NONE for value in range(256))


class Holdings:
    """The mapping of a node's files, all NONE at first. Without room for it on the disk it is kept in memory only."""

    def __init__(self, node_dir: Path, files: int) -> None:
        size = HOLDINGS_HEADER.size + files
        try:
            self._map = _create(node_dir / HOLDINGS_FILE, size)
        except OSError:
            self._map = mmap.mmap(-1, size)
        self._first = HOLDINGS_HEADER.size

    def keep(self, id_: int) -> None:
        """A copy is in the store."""
        self._map[self._first + id_] = Holding.KEPT

    def drop(self, ids: Iterable[int]) -> None:
        """There is no copy any more, and none will come."""
        for id_ in ids:
            self._map[self._first + id_] = Holding.NONE

    def expect(self, ids: Iterable[int]) -> None:
        """These, and no others, this node will read from the source; what it has it has."""
        kept = self._map[self._first :].translate(_ONLY_KEPT)
        found = bytearray(kept)
        for id_ in ids:
            found[id_] = found[id_] or Holding.DUE
        self._map[self._first :] = bytes(found)

    def of(self, id_: int) -> Holding:
        """What is said of a file."""
        return Holding(self._map[self._first + id_])


def _create(path: Path, size: int) -> mmap.mmap:
    """Its blocks are allocated: a store into a hole on a disk that is full by then would end the daemon."""
    temporary = path.with_name(f".{path.name}")
    fd = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(fd, 0, size)
        mapped = mmap.mmap(fd, size)
    finally:
        os.close(fd)
    HOLDINGS_HEADER.pack_into(mapped, 0, HOLDINGS_MAGIC, size - HOLDINGS_HEADER.size)
    temporary.rename(path)
    return mapped
