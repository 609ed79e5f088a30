"""Fills bundles with the staged files that one node is to get. Works in the reading thread; sends nothing."""

from __future__ import annotations

import contextlib
import os
import stat
from collections import deque
from dataclasses import dataclass, field

from hpcstage.group.catalog import Catalog
from hpcstage.group.frames import MAX_ROWS, PIECE_BYTES, Row, close_bundle

_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


@dataclass
class Filled:
    """A bundle. Without rows there was nothing to send."""

    length: int = 0
    rows: list[Row] = field(default_factory=list)
    lost: list[int] = field(default_factory=list)
    """Ids whose copies cannot be read, or are not whole."""
    unknown: list[int] = field(default_factory=list)

    @property
    def files(self) -> int:
        """Files that end in this bundle."""
        return sum(row.start + row.length == row.size_bytes for row in self.rows)


@dataclass
class _Open:
    id: int
    fd: int
    size_bytes: int
    mode: int
    mtime_ns: int
    position: int = 0


class Outgoing:
    """The files for one node, in the order in which they were offered."""

    def __init__(self) -> None:
        self.ids: deque[int] = deque()
        self._open: _Open | None = None

    @property
    def has_some(self) -> bool:
        """Whether anything is left to be put into bundles."""
        return bool(self.ids) or self._open is not None

    def fill(self, view: memoryview, catalog: Catalog) -> Filled:
        """The next bundle: as many files as find room, or a piece of a large one."""
        filled = Filled()
        at = 0
        while len(filled.rows) < MAX_ROWS and at < PIECE_BYTES:
            if self._open is None and not self._begin(catalog, filled):
                break
            if self._open is not None:
                if at and at + self._open.size_bytes > PIECE_BYTES:
                    break
                at += self._read(view, at, filled)
        if filled.rows:
            filled.length = close_bundle(view, at, filled.rows, catalog.fingerprint)
        return filled

    def close(self) -> None:
        """Lets go of the file that is open."""
        if self._open is not None:
            os.close(self._open.fd)
            self._open = None

    def _begin(self, catalog: Catalog, filled: Filled) -> bool:
        """Opens the next file. False: there is none."""
        try:
            id_ = self.ids.popleft()
        except IndexError:
            return False
        if id_ not in catalog:
            filled.unknown.append(id_)
            return True
        try:
            fd = os.open(catalog.staged(id_), _FLAGS)
        except OSError:
            filled.lost.append(id_)
            return True
        found = os.fstat(fd)
        if stat.S_ISREG(found.st_mode):
            self._open = _Open(id_, fd, found.st_size, found.st_mode & 0o777, found.st_mtime_ns)
        else:
            os.close(fd)
            filled.lost.append(id_)
        return True

    def _read(self, view: memoryview, at: int, filled: Filled) -> int:
        """Puts what is left of the open file, or a piece of it, into the bundle. Returns how many bytes."""
        file = self._open
        assert file is not None
        wanted = min(file.size_bytes - file.position, PIECE_BYTES - at)
        count = 0
        with contextlib.suppress(OSError):
            while count < wanted:
                more = os.preadv(file.fd, [view[at + count : at + wanted]], file.position + count)
                if not more:
                    break
                count += more
        if count < wanted:
            filled.lost.append(file.id)
            self.close()
            return 0
        filled.rows.append(Row(file.id, file.mode, file.size_bytes, file.position, count, at, file.mtime_ns))
        file.position += count
        if file.position == file.size_bytes:
            self.close()
        return count
