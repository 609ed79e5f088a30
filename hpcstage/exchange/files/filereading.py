"""Fills bundles with the staged files that one node is to get. Works in the reading thread; sends nothing."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from hpcstage.exchange.files import batch as files
from hpcstage.exchange.files.batch import ReadOutcome
from hpcstage.exchange.transport.buffers import Buffer
from hpcstage.exchange.transport.frames import MAX_ROWS, PIECE_BYTES, BundleRow, close_bundle
from hpcstage.store.catalog import Catalog


@dataclass
class Filled:
    """A bundle that was filled. It has no rows if there was nothing to send."""

    length: int = 0
    rows: list[BundleRow] = field(default_factory=list)
    lost: list[int] = field(default_factory=list)
    """Ids whose copies cannot be read, or are not whole."""
    unknown: list[int] = field(default_factory=list)

    @property
    def files(self) -> int:
        """Returns the number of files that end in this bundle."""
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

    def add(self, ids: Sequence[int]) -> None:
        """Takes files that were offered."""
        self.ids.extend(ids)

    def fill(self, buffer: Buffer, catalog: Catalog) -> Filled:
        """Fills the next bundle with as many files as find space, or with a piece of a larger one."""
        filled = Filled()
        if self._open is None:
            self._fill_small(buffer, catalog, filled)
        if self._open is not None:
            self._piece(buffer, filled)
        if filled.rows:
            last = filled.rows[-1]
            filled.length = close_bundle(buffer.view, last.at + last.length, filled.rows, catalog.fingerprint)
        return filled

    def take_rest(self) -> list[int]:
        """Returns the ids that are not in bundles as a whole, and forgets them."""
        rest = [*(() if self._open is None else (self._open.id,)), *self.ids]
        self.ids.clear()
        self.close()
        return rest

    def close(self) -> None:
        """Closes the file that is open."""
        if self._open is not None:
            os.close(self._open.fd)
            self._open = None

    def _fill_small(self, buffer: Buffer, catalog: Catalog, filled: Filled) -> None:
        """Reads whole files until one finds no space; if it is the first of the bundle, it goes in pieces."""
        at = 0
        while at < PIECE_BYTES and (ids := self._take(catalog, filled, PIECE_BYTES - at)):
            found = files.read_files([catalog.staged(id_) for id_ in ids], buffer, at, PIECE_BYTES)
            for id_, (what, size, mode, mtime_ns, place) in zip(ids, found, strict=False):
                if what == ReadOutcome.WHOLE:
                    filled.rows.append(BundleRow(id_, mode, size, 0, size, place, mtime_ns))
                    at = place + size
                elif what == ReadOutcome.LOST:
                    filled.lost.append(id_)
            if found[-1][0] == ReadOutcome.NO_ROOM:
                self.ids.extendleft(reversed(ids[len(found) - 1 :]))
                if not filled.rows:
                    self._begin(self.ids.popleft(), catalog, filled)
                return

    def _take(self, catalog: Catalog, filled: Filled, bytes_left: int) -> list[int]:
        """Returns the next ids that should find space, and the one after them."""
        ids: list[int] = []
        while self.ids and bytes_left > 0 and len(ids) + len(filled.rows) < MAX_ROWS:
            id_ = self.ids.popleft()
            if id_ in catalog:
                ids.append(id_)
                bytes_left -= catalog.size(id_)
            else:
                filled.unknown.append(id_)
        return ids

    def _begin(self, id_: int, catalog: Catalog, filled: Filled) -> None:
        try:
            fd, found = files.open_given(catalog.staged(id_))
        except OSError:
            filled.lost.append(id_)
            return
        self._open = _Open(id_, fd, found.st_size, found.st_mode & 0o777, found.st_mtime_ns)

    def _piece(self, buffer: Buffer, filled: Filled) -> None:
        """Puts the next piece of the open file into the bundle."""
        file = self._open
        assert file is not None
        length = min(file.size_bytes - file.position, PIECE_BYTES)
        if not files.read_into(file.fd, buffer.view[:length], file.position):
            filled.lost.append(file.id)
            self.close()
            return
        filled.rows.append(BundleRow(file.id, file.mode, file.size_bytes, file.position, length, 0, file.mtime_ns))
        file.position += length
        if file.position == file.size_bytes:
            self.close()
