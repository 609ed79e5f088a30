"""Answers stat of a copy with the attributes of the source, from the table that the daemon keeps beside the store.

The module owns the look into the table; the native layer has the same. If a copy has no row, its source is asked.
"""

from __future__ import annotations

import os
from struct import Struct

import _hpcstage_wire as wire  # type: ignore[import-not-found]
from _hpcstage_mapping import mapped  # type: ignore[import-not-found]

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_open = os.open
_close = os.close
_fstat = os.fstat
_row = Struct("<QqQQqIIII8x").unpack_from


class SourceAttributes:
    """The table of one node directory, mapped when it is first needed."""

    def __init__(self, node_dir: bytes, slot: Any) -> None:
        self._path = node_dir + b"/attributes"
        self._slot = slot
        self._table: Any = None
        self._tried = False
        self.device = -1
        """The device of the store; -1 if there is no table."""
        self._rows = 0
        self._shift = 0

    def ready(self) -> bool:
        """Returns whether there is a table. The daemon makes it before it stages anything."""
        if not self._tried and self._slot.state[0] not in (wire.STATE_STARTING, wire.STATE_SCANNING):
            self._tried = True
            try:
                self._map()
            except (OSError, ValueError):
                self._table = None
        return self._table is not None

    def _map(self) -> None:
        fd = _open(self._path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            size = _fstat(fd).st_size
            table = mapped(fd, size, writable=False)
        finally:
            _close(fd)
        magic, rows, device = Struct("<8sQQ").unpack_from(table, 0)
        if magic != wire.ATTRIBUTES_MAGIC or size < wire.ATTRIBUTES_HEADER_BYTES + rows * wire.ATTRIBUTES_ROW_BYTES:
            raise ValueError("not a table")
        self._rows = rows
        self._shift = 65 - rows.bit_length()
        self.device = device
        self._table = table

    def of(self, info: os.stat_result) -> os.stat_result | None:
        """Returns the source's attributes for what stat says of a copy; None if they are not known and the source must
        be asked."""
        if not self.ready() or info.st_dev != self.device:
            return None
        first = (info.st_ino * wire.ATTRIBUTES_FACTOR & (1 << 64) - 1) >> self._shift
        for probe in range(wire.ATTRIBUTES_PROBES):
            at = wire.ATTRIBUTES_HEADER_BYTES + (first + probe & self._rows - 1) * wire.ATTRIBUTES_ROW_BYTES
            row = _row(self._table, at)
            if row[0] == info.st_ino and row[1] == info.st_ctime_ns:
                return _with(info, row) if _row(self._table, at) == row else None
        return None


_IN_TUPLE = frozenset(("st_mode", "st_ino", "st_dev", "st_nlink", "st_uid", "st_gid", "st_size"))
"""From Python 3.13 on these may not be given a second time by name."""


def _with(info: os.stat_result, row: tuple[int, ...]) -> os.stat_result:
    _, _, device, inode, ctime_ns, mode, links, uid, gid = row
    times = (int(info.st_atime), int(info.st_mtime), ctime_ns // 10**9)
    more = {name: getattr(info, name) for name in dir(info) if name.startswith("st_") and name not in _IN_TUPLE}
    more.update(st_ctime=ctime_ns / 10**9, st_ctime_ns=ctime_ns)
    return os.stat_result((mode, inode, device, links, uid, gid, info.st_size, *times), more)
