"""Keeps what is known of the copies in DIR of a million files in little memory."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator, MutableMapping

from hpcstage.upload.facts import Here, Put, Sums, There

_HERE = struct.Struct("=QqqqI")
_REST = struct.Struct("=QqqqIIB")
_SEALED, _OPEN = 1, 2
_NO_SUMS = -1


class Puts(MutableMapping[str, Put]):
    """The copies by the local names. A copy is packed: a fixed part, then its place if that is not its name."""

    def __init__(self) -> None:
        self._packed: dict[str, bytes] = {}

    def __getitem__(self, name: str) -> Put:
        data = self._packed[name]
        here = Here(*_HERE.unpack_from(data))
        inode, size_bytes, mtime_ns, *sums, flags = _REST.unpack_from(data, _HERE.size)
        place = os.fsdecode(data[_HERE.size + _REST.size :]) or name
        known = None if sums[0] == _NO_SUMS else Sums(*sums)
        return Put(here, There(inode, size_bytes, mtime_ns), place, known, bool(flags & _SEALED), bool(flags & _OPEN))

    def __setitem__(self, name: str, put: Put) -> None:
        flags = _SEALED * put.is_sealed | _OPEN * put.is_open
        sums = put.sums or Sums(_NO_SUMS)
        place = b"" if put.place == name else os.fsencode(put.place)
        self._packed[name] = _HERE.pack(*put.here) + _REST.pack(*put.there, *sums, flags) + place

    def __delitem__(self, name: str) -> None:
        del self._packed[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._packed)

    def __len__(self) -> int:
        return len(self._packed)

    def __contains__(self, name: object) -> bool:
        return name in self._packed

    def is_sealed(self, name: str, here: Here) -> bool | None:
        """Returns whether the copy of a file is sealed, if the file looks as it was copied; else None."""
        data = self._packed.get(name)
        if data is None or not data.startswith(_HERE.pack(*here)):
            return None
        return bool(data[_HERE.size + _REST.size - 1] & _SEALED)

    def beside(self) -> list[str]:
        """Returns the names whose copies lie elsewhere."""
        return [name for name, data in self._packed.items() if len(data) > _HERE.size + _REST.size]
