"""Shows programs which parts of large files, whose copies are on their way, are there already: the daemon's side.

It grants rows of the file `arriving` to files that programs ask for and to transfers, and takes them away. Without
space on the disk the mapping is in memory only, where no program sees it.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable
from pathlib import Path

from hpcstage.plan.rule import FileReads
from hpcstage.protocol.arriving import (
    AHEAD_OFFSET,
    ARRIVING_BYTES,
    ARRIVING_FILE,
    ARRIVING_HEADER,
    ARRIVING_MAGIC,
    ARRIVING_ROW,
    ARRIVING_ROW_BYTES,
    ARRIVING_ROWS,
    FAULTS_OFFSET,
    GRANTED_OFFSET,
    PRIORITY_OFFSET,
    ROW_STRIPES,
    SHARE,
    SHARE_OFFSET,
    WISHED_OFFSET,
    Priority,
)
from hpcstage.store import mappedfile
from hpcstage.store.arrivingrows import MOST_COUNT, U32, StripeShare, reads_of, row_at, stripes_at
from hpcstage.store.mappedfile import put_u32, put_u64

_HEADER = ARRIVING_HEADER.pack(ARRIVING_MAGIC, ARRIVING_ROWS, ROW_STRIPES)


class GrantedRows:
    """The daemon's side: owns which file has which row."""

    def __init__(self, node_dir: Path) -> None:
        try:
            self._map = mappedfile.make(node_dir / ARRIVING_FILE, ARRIVING_BYTES, lambda _: _HEADER)
        except OSError:
            self._map = mmap.mmap(-1, ARRIVING_BYTES)
        self._rows: dict[int, int] = {}
        """By id: its row."""
        self._idle: dict[int, None] = {}
        """The ids of no transfer: programs asked for them."""
        self._whole: dict[int, None] = {}
        """The ids whose copies are complete, the oldest first: their rows serve until others need them."""
        self._serial = 0

    @property
    def ids(self) -> Iterable[int]:
        """The ids that have a row."""
        return self._rows.keys()

    def ask(self, id_: int, inode: int = 0, size_bytes: int = 0) -> bool:
        """Gives a file that a program asks for a row, in which its reads count. Returns False if all are in use."""
        if id_ in self._rows and id_ not in self._whole:
            return True
        if id_ in self._whole:
            self.withdraw((id_,))
        self._make_room()
        free = set(range(ARRIVING_ROWS)).difference(self._rows.values())
        if not free:
            return False
        row = self._rows[id_] = min(free)
        self._idle[id_] = None
        start = row_at(row)
        self._map[start : start + ARRIVING_ROW_BYTES] = bytes(ARRIVING_ROW_BYTES)
        ARRIVING_ROW.pack_into(self._map, start, 0, inode, size_bytes, 0, 0, id_, 0, 0)
        self._restart(row)
        return True

    def grant(
        self,
        id_: int,
        inode: int = 0,
        size_bytes: int = 0,
        priority: Priority = Priority.FULL,
        share: StripeShare | None = None,
    ) -> bool:
        """Gives a transfer that is about to begin a row: the one that its file has, if there is one. Returns False if
        all are in use. `share` tells with which nodes this one brings the file."""
        if not self.ask(id_, inode, size_bytes):
            return False
        self._idle.pop(id_, None)
        start = row_at(self._rows[id_])
        put_u32(self._map, start + PRIORITY_OFFSET, priority)
        put_u32(self._map, start + WISHED_OFFSET, 0)
        packed = bytes(SHARE.size) if share is None else share.pack()
        self._map[start + SHARE_OFFSET : start + SHARE_OFFSET + SHARE.size] = packed
        return True

    def _make_room(self) -> None:
        """Takes a row away that is not of a transfer, if none is free."""
        if len(self._rows) == ARRIVING_ROWS and self._whole:
            self.withdraw((next(iter(self._whole)),))
        elif len(self._rows) == ARRIVING_ROWS and self._idle:
            self.withdraw((min(self._idle, key=lambda id_: self.reads(id_).credit_bytes),))

    def _restart(self, row: int) -> None:
        """Gives a row a new serial number; what readers say stays."""
        stripes = stripes_at(row)
        self._map[stripes : stripes + ROW_STRIPES] = bytes(ROW_STRIPES)
        self._serial = self._serial % MOST_COUNT + 1
        self._put(row, self._serial)

    def tell(self, id_: int, priority: Priority, ahead_bytes: int = 0) -> None:
        """Says what of a file is copied from now on."""
        if id_ in self._rows:
            start = row_at(self._rows[id_])
            put_u64(self._map, start + AHEAD_OFFSET, ahead_bytes)
            put_u32(self._map, start + PRIORITY_OFFSET, priority)

    def set_faults(self, id_: int, size_bytes: int) -> None:
        """Says how much programs have read of a file in page faults."""
        if id_ in self._rows:
            put_u64(self._map, row_at(self._rows[id_]) + FAULTS_OFFSET, size_bytes)

    def withdraw(self, ids: Iterable[int]) -> None:
        """Takes the rows of these ids away: when this returns, no read of them is served that has not ended. The copier
        may still write to a row, which is nobody else's before the transfer has ended."""
        for id_ in self._rows.keys() & ids:
            self._put(self._rows[id_], 0)
            if id_ in self._whole or id_ in self._idle:
                self._free(id_)

    def ended(self, id_: int, *, is_stored: bool) -> None:
        """Notes the end of a transfer. The row serves on if the copy is in the store, else reads count in it, if it was
        not taken away."""
        row = self._rows.get(id_)
        if row is None or id_ in self._whole or id_ in self._idle:
            return
        if not U32.unpack_from(self._map, GRANTED_OFFSET + 4 * row)[0]:
            self._free(id_)
        elif is_stored:
            self._whole[id_] = None
        else:
            self._idle[id_] = None
            self._restart(row)

    def _free(self, id_: int) -> None:
        del self._rows[id_]
        self._whole.pop(id_, None)
        self._idle.pop(id_, None)

    def _put(self, row: int, serial: int) -> None:
        put_u32(self._map, GRANTED_OFFSET + 4 * row, serial)

    def reads(self, id_: int) -> FileReads:
        """Returns what programs have read of a file since it had its row."""
        row = self._rows.get(id_)
        return FileReads(0) if row is None else reads_of(self._map, row_at(row))
