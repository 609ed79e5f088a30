"""Writes the attributes of the sources of staged copies to a mapped table beside the store, which programs read.

Owns the table: one row per copy, found by the copy's inode. A copy without a row is no mistake: programs then ask the
source. The values are the manifest's; a copy that differs from it in size or time gets no row.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from hpcstage.plan.dataset.manifest import Manifest
from hpcstage.plan.types import ManifestEntry
from hpcstage.protocol.shim import (
    ATTRIBUTES_FACTOR,
    ATTRIBUTES_FILE,
    ATTRIBUTES_HEADER,
    ATTRIBUTES_HEADER_BYTES,
    ATTRIBUTES_MAGIC,
    ATTRIBUTES_PROBES,
    ATTRIBUTES_ROW,
    ATTRIBUTES_ROW_BYTES,
)
from hpcstage.store import mappedfile

_LEAST_ROWS = 64
_KEY = struct.Struct("<Qq")


class AttributesTable:
    """Owns the mapping. Raises OSError if the disk has no space for it."""

    def __init__(self, node_dir: Path, files: int) -> None:
        """Makes a table for `files` copies."""
        self._rows = max(_LEAST_ROWS, 1 << (max(files, 1) * 3 // 2).bit_length())
        self._shift = 64 - (self._rows.bit_length() - 1)
        size_bytes = ATTRIBUTES_HEADER_BYTES + self._rows * ATTRIBUTES_ROW_BYTES
        self._map = mappedfile.make(
            node_dir / ATTRIBUTES_FILE,
            size_bytes,
            lambda made: ATTRIBUTES_HEADER.pack(ATTRIBUTES_MAGIC, self._rows, made.st_dev),
        )

    def put(self, copy: os.stat_result, source: ManifestEntry, device: int) -> None:
        """Writes the row of a copy of `source`, which is on `device` by this node's number."""
        at = self._place(copy.st_ino)
        row = ATTRIBUTES_ROW.pack(
            copy.st_ino, copy.st_ctime_ns, device, source.inode, source.ctime_ns, source.mode, source.links, source.uid,
            source.gid,
        )  # fmt: skip
        self._map[at : at + 8] = bytes(8)  # no row while it is written
        self._map[at + 8 : at + len(row)] = row[8:]
        self._map[at : at + 8] = row[:8]

    def _place(self, inode: int) -> int:
        """Returns the offset of a copy's row, or of the one that it gets: an empty one, else that of the copy with the
        oldest time of change."""
        first = (inode * ATTRIBUTES_FACTOR & (1 << 64) - 1) >> self._shift
        places = [
            ATTRIBUTES_HEADER_BYTES + (first + probe & self._rows - 1) * ATTRIBUTES_ROW_BYTES
            for probe in range(ATTRIBUTES_PROBES)
        ]
        found: list[tuple[int, int, int]] = [(*_KEY.unpack_from(self._map, at), at) for at in places]
        same = [at for key, _, at in found if key == inode]
        empty = [at for key, _, at in found if key == 0]
        oldest = min(found, key=lambda row: row[1])[2]
        return (same or empty or [oldest])[0]


class Attributes:
    """Fills the table of a store with the files of a manifest. Without space for it on the disk there is none."""

    def __init__(self, node_dir: Path, manifest: Manifest) -> None:
        self._manifest = manifest
        self._devices: Mapping[int, int | None] = {}
        self._table: AttributesTable | None = None
        with suppress(OSError):  # programs look for the table once: it is there before the first copy
            self._table = AttributesTable(node_dir, len(manifest))
        self._early: list[tuple[int, bytes]] | None = []
        """The copies that came before the devices were known; None from then on."""

    def learn(self, devices: Mapping[int, int | None]) -> None:
        """Takes this node's number of each device of the manifest (see `devices_here`). Copies of files on a device
        without one get no row."""
        self._devices = devices
        early, self._early = self._early or [], None
        for id_, path in early:
            self.note(id_, path)

    def note(self, id_: int, path: bytes) -> None:
        """Adds a copy that is in the store under this name."""
        if self._early is not None:
            self._early.append((id_, path))
            return
        if self._table is None:
            return
        entry = self._manifest.entry(id_)
        device = self._devices.get(entry.device)
        with suppress(OSError):
            copy = os.lstat(path)
            as_listed = (copy.st_size, copy.st_mtime_ns) == (entry.size_bytes, entry.mtime_ns)
            if device is not None and as_listed and entry.ctime_ns:
                self._table.put(copy, entry, device)


def devices_here(manifest: Manifest) -> dict[int, int | None]:
    """Returns this node's number of each device of the manifest, which another node may have made; None where the
    inodes are not the same here. It asks the source, which may hang."""
    devices = manifest.devices
    first = {device: next(id_ for id_, of in enumerate(devices) if of == device) for device in set(devices)}
    return {device: _device_here(manifest.entry(id_), manifest.source_path(id_)) for device, id_ in first.items()}


def _device_here(entry: ManifestEntry, path: bytes) -> int | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev if found.st_ino == entry.inode else None
