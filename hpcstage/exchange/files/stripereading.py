"""Fills bundles with stripes of large files that one node is to get, out of incoming files or copies. Works in the
reading thread; sends nothing."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from hpcstage.exchange.files import batch as files
from hpcstage.exchange.files.filereading import Filled
from hpcstage.exchange.transport.buffers import Buffer
from hpcstage.exchange.transport.frames import MAX_ROWS, PIECE_BYTES, Row, Sort, close_bundle
from hpcstage.store.catalog import Catalog
from hpcstage.store.shownrows import ShownRows


@dataclass
class OutgoingStripe:
    """A stripe for the node at the position `to`, which begins at `position` once a part of it is in a bundle."""

    to: int
    id: int
    stripe: int
    size_bytes: int
    position: int
    end: int


class OutgoingStripes:
    """The stripes for one node; see sender.Queued. It calls `on_lost` with those that cannot be read, from the reading
    thread, and with those that are forgotten."""

    def __init__(self, rows: ShownRows, on_lost: Callable[[OutgoingStripe], None]) -> None:
        self._rows = rows
        self._on_lost = on_lost
        self._stripes: deque[OutgoingStripe] = deque()

    @property
    def has_some(self) -> bool:
        """See Queued."""
        return bool(self._stripes)

    def add(self, items: Sequence[OutgoingStripe]) -> None:
        """See Queued."""
        self._stripes.extend(items)

    def fill(self, buffer: Buffer, catalog: Catalog) -> Filled:
        """See Queued."""
        filled, at = Filled(), 0
        while self._stripes and at < PIECE_BYTES and len(filled.rows) < MAX_ROWS:
            given = self._stripes[0]
            length = min(given.end - given.position, PIECE_BYTES - at)
            if not self._read(given, buffer.view[at : at + length], catalog):
                self._on_lost(self._stripes.popleft())
                continue
            filled.rows.append(Row(given.id, 0, given.size_bytes, given.position, length, at, 0))
            at += length
            given.position += length
            if given.position == given.end:
                self._stripes.popleft()
        if filled.rows:
            filled.length = close_bundle(buffer.view, at, filled.rows, catalog.fingerprint, Sort.STRIPES)
        return filled

    def take_rest(self) -> list[int]:
        """See Queued."""
        while self._stripes:
            self._on_lost(self._stripes.popleft())
        return []

    def _read(self, given: OutgoingStripe, view: memoryview, catalog: Catalog) -> bool:
        """Fills the view. What is read of an incoming file counts only if its row held all the while."""
        row = self._rows.find(given.id)
        if row is not None and row.has(given.stripe) and _filled(row.incoming, given, view) and row.holds():
            return True
        return _filled(catalog.staged(given.id), given, view)


def _filled(path: bytes, given: OutgoingStripe, view: memoryview) -> bool:
    with suppress(OSError):
        fd, found = files.open_given(path)
        try:
            return found.st_size == given.size_bytes and files.read_into(fd, view, given.position)
        finally:
            os.close(fd)
    return False
