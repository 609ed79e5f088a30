"""Shows the programs on this node which files it holds, by a byte per file in a shared mapping.

Owns the mapping. A program that reads it (a sampler that gives ranks what their node has) sends the daemon no message.
Temporary copies are not in it, for they may be gone by the time it is read.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable
from pathlib import Path

from hpcstage.protocol.shim import HOLDINGS_FILE, HOLDINGS_HEADER, HOLDINGS_MAGIC, Holding
from hpcstage.store import mappedfile

_ONLY_KEPT = bytes(Holding.KEPT if value == Holding.KEPT else Holding.NONE for value in range(256))


class HeldFiles:
    """Owns the mapping of a node's files, all NONE at first. Without space on the disk it is in memory only, where no
    program sees it."""

    def __init__(self, node_dir: Path, files: int) -> None:
        size = HOLDINGS_HEADER.size + files
        try:
            header = HOLDINGS_HEADER.pack(HOLDINGS_MAGIC, files)
            self._map = mappedfile.make(node_dir / HOLDINGS_FILE, size, lambda _: header)
        except OSError:
            self._map = mmap.mmap(-1, size)
        self._first = HOLDINGS_HEADER.size

    def keep(self, id_: int) -> None:
        """Notes that a copy is in the store."""
        self._map[self._first + id_] = Holding.KEPT

    def drop(self, ids: Iterable[int]) -> None:
        """Notes that there is no copy of these files any more and none will come."""
        for id_ in ids:
            self._map[self._first + id_] = Holding.NONE

    def expect(self, ids: Iterable[int]) -> None:
        """Notes that this node will read these files, and no others, from the source. What it keeps stays noted."""
        kept = self._map[self._first :].translate(_ONLY_KEPT)
        found = bytearray(kept)
        for id_ in ids:
            found[id_] = found[id_] or Holding.DUE
        self._map[self._first :] = bytes(found)

    def of(self, id_: int) -> Holding:
        """Returns what the mapping says of a file."""
        return Holding(self._map[self._first + id_])
