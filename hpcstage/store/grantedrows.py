"""Shows programs which parts of large files, whose copies are on their way, are there already: the daemon's side.

It grants rows of the file `arriving` to transfers and takes them away. Without space on the disk the mapping is in
memory only, where no program sees it.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from hpcstage.protocol.arriving import (
    ARRIVING_BYTES,
    ARRIVING_FILE,
    ARRIVING_READ,
    ARRIVING_ROW_BYTES,
    ARRIVING_ROWS,
    GRANTED_OFFSET,
    IN_ORDER,
    IN_ORDER_NOTES,
    IN_ORDER_OFFSET,
    PRIORITY_OFFSET,
    READ_OFFSET,
    ROW_STRIPES,
    SHARE,
    SHARE_OFFSET,
    WISHED_OFFSET,
    Priority,
    StripeState,
)
from hpcstage.store.arrivingrows import ID_OFFSET, MOST_COUNT, U32, StripeShare, create, row_at, states_of, stripes_at


class BytesServed(NamedTuple):
    """The bytes of a file on its way that programs were served, and those that they read at the source meanwhile."""

    served: int = 0
    missed: int = 0


class GrantedRows:
    """The daemon's side: owns which transfer has which row."""

    def __init__(self, node_dir: Path) -> None:
        try:
            self._map = create(node_dir / ARRIVING_FILE)
        except OSError:
            self._map = mmap.mmap(-1, ARRIVING_BYTES)
        self._rows: dict[int, int] = {}
        """By id: its row."""
        self._whole: dict[int, None] = {}
        """The ids whose copies are complete, the oldest first: their rows serve until others need them."""
        self._serial = 0

    @property
    def ids(self) -> Iterable[int]:
        """The ids that have a row."""
        return self._rows.keys()

    def grant(
        self,
        id_: int,
        first: int | None = None,
        priority: Priority = Priority.FULL,
        share: StripeShare | None = None,
    ) -> bool:
        """Gives a transfer that is about to begin a row. Returns False if all are in use. `first` is the stripe that a
        reader is expected to need next, `share` tells with which nodes this one brings the file."""
        self.ended(id_, is_stored=False)
        if len(self._rows) == ARRIVING_ROWS and self._whole:
            self.withdraw((next(iter(self._whole)),))
        free = set(range(ARRIVING_ROWS)).difference(self._rows.values())
        if not free:
            return False
        row = self._rows[id_] = min(free)
        self._serial = self._serial % MOST_COUNT + 1
        start, stripes = row_at(row), stripes_at(row)
        self._map[start : start + ARRIVING_ROW_BYTES] = bytes(ARRIVING_ROW_BYTES)
        self._map[stripes : stripes + ROW_STRIPES] = bytes(ROW_STRIPES)
        U32.pack_into(self._map, start + ID_OFFSET, id_)
        U32.pack_into(self._map, start + PRIORITY_OFFSET, priority)
        if first is not None:
            U32.pack_into(self._map, start + WISHED_OFFSET, first + 1)
        if share is not None:
            self._map[start + SHARE_OFFSET : start + SHARE_OFFSET + SHARE.size] = share.pack()
        self._put(row, self._serial)
        return True

    def set_priority(self, id_: int, priority: Priority) -> None:
        """Says how the copy of a file gives way from now on."""
        if id_ in self._rows:
            U32.pack_into(self._map, row_at(self._rows[id_]) + PRIORITY_OFFSET, priority)

    def withdraw(self, ids: Iterable[int]) -> None:
        """Takes the rows of these ids away: when this returns, no read of them is served that has not ended. The copier
        may still write to a row, which is nobody else's before the transfer has ended."""
        for id_ in self._rows.keys() & ids:
            self._put(self._rows[id_], 0)
            if id_ in self._whole:
                self._free(id_)

    def ended(self, id_: int, *, is_stored: bool) -> None:
        """Notes the end of a transfer. The row of a copy that is in the store serves on, if it was not taken away."""
        row = self._rows.get(id_)
        if row is not None and is_stored and U32.unpack_from(self._map, GRANTED_OFFSET + 4 * row)[0]:
            self._whole[id_] = None
        elif row is not None:
            self._put(row, 0)
            self._free(id_)

    def _free(self, id_: int) -> None:
        del self._rows[id_]
        self._whole.pop(id_, None)

    def _put(self, row: int, serial: int) -> None:
        U32.pack_into(self._map, GRANTED_OFFSET + 4 * row, serial)

    def read(self, id_: int) -> BytesServed:
        """Returns what programs have read of a file since it had its row."""
        row = self._rows.get(id_)
        return (
            BytesServed()
            if row is None
            else BytesServed(*ARRIVING_READ.unpack_from(self._map, row_at(row) + READ_OFFSET))
        )

    def arrived(self, id_: int, stripes: range) -> list[int]:
        """Returns which of these stripes of a file have arrived."""
        row = self._rows.get(id_)
        states = b"" if row is None else states_of(self._map, stripes_at(row), stripes)
        return [stripe for stripe, state in zip(stripes, states, strict=False) if state == StripeState.ARRIVED]

    def in_order(self, inode: int) -> int:
        """Returns how many bytes of a file a program has read in a row at the source, as it noted last; 0: nothing."""
        at = IN_ORDER_OFFSET + inode % IN_ORDER_NOTES * IN_ORDER.size
        noted, size_bytes = IN_ORDER.unpack_from(self._map, at)
        return int(size_bytes) if noted == inode else 0
