"""The exchange's side of the file `arriving`: finds what has arrived of a file, to pass it on."""

from __future__ import annotations

import mmap
from contextlib import suppress
from pathlib import Path

from hpcstage.protocol.arriving import (
    ARRIVING_NAME_BYTES,
    GRANTED_OFFSET,
    NAME_OFFSET,
    SHOWN_OFFSET,
    WISHED_OFFSET,
    StripeState,
)
from hpcstage.store.arrivingrows import U32, open_map, row_at, row_of, stripes_at

_SERIALS = (GRANTED_OFFSET, SHOWN_OFFSET)


class ShownRow:
    """What is shown of one file, while `holds`."""

    def __init__(self, mapped: mmap.mmap, row: int, serial: int) -> None:
        start = row_at(row)
        self._map, self._row, self._serial = mapped, row, serial
        name = mapped[start + NAME_OFFSET : start + NAME_OFFSET + ARRIVING_NAME_BYTES]
        self.incoming = name.partition(b"\0")[0]
        """The name of the incoming file in the node directory."""
        self._has_wish = False

    def holds(self) -> bool:
        """Returns whether the row is the same transfer's as before: what was read of its file until now was right."""
        return all(U32.unpack_from(self._map, at + 4 * self._row)[0] == self._serial for at in _SERIALS)

    def has(self, stripe: int) -> bool:
        """Returns whether a stripe has arrived."""
        return self._map[stripes_at(self._row) + stripe] == StripeState.ARRIVED

    def wish(self, stripe: int) -> None:
        """Says that another node needs a stripe: of several the one that is said first."""
        if not self._has_wish:
            U32.pack_into(self._map, row_at(self._row) + WISHED_OFFSET, stripe + 1)
        self._has_wish = True


class ShownRows:
    """The exchange's side: finds rows by the ids of files."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._map: mmap.mmap | None = None

    def find(self, id_: int) -> ShownRow | None:
        """Returns the row of a file of which something is shown."""
        with suppress(OSError, ValueError):
            self._map = self._map or open_map(self._path)
        if self._map is None or (found := row_of(self._map, id_, SHOWN_OFFSET)) is None:
            return None
        row = ShownRow(self._map, *found)
        return row if row.holds() else None
