"""Owns the emulator's state file: its settings, which may change while it is mounted, and its counters.

The module owns the layout, as `struct state` in slowfs.c has it. A store of one aligned 64-bit integer is one
instruction, so neither side takes a lock.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from dataclasses import dataclass, fields
from pathlib import Path

NODES = 8
_COUNTERS = 8
_HEAD = 8
_NODE = 4 + _COUNTERS
_WORDS = _HEAD + NODES * _NODE
_NS = 1e9
_WEIGHT_ONE = 1000
PREFIX = "hpcstage-slowfs-"
_MEMORY = Path("/dev/shm")  # noqa: S108  mkstemp makes the names


@dataclass(frozen=True)
class Settings:
    """The properties of the storage. Zero means no limit, no latency."""

    bandwidth_bytes_per_s: float = 0
    """The bandwidth of all nodes together."""
    metadata_latency_s: float = 0
    """Seconds added to each look-up, open, listing, rename, ..."""
    data_latency_s: float = 0
    """Seconds added to each read or write request, as the kernel sends them (up to 128 kB with its usual
    read-ahead)."""


@dataclass(frozen=True)
class Counters:
    """Counts what one node asked of the storage since the state file was made."""

    lookups: int
    """Counts FUSE LOOKUP and GETATTR."""
    opens: int
    listings: int
    reads: int
    read_bytes: int
    writes: int
    write_bytes: int
    others: int

    def __sub__(self, earlier: Counters) -> Counters:
        return Counters(*(getattr(self, f.name) - getattr(earlier, f.name) for f in fields(self)))


class StateFile:
    """One storage: the mounts that name its file share its bandwidth."""

    def __init__(self, settings: Settings | None = None) -> None:
        place = _MEMORY if os.access(_MEMORY, os.W_OK) else None
        handle, name = tempfile.mkstemp(prefix=f"{PREFIX}{os.getpid()}-", suffix=".state", dir=place)
        self.path = Path(name)
        os.ftruncate(handle, 8 * _WORDS)
        self._map = mmap.mmap(handle, 8 * _WORDS)
        os.close(handle)
        self._words = memoryview(self._map).cast("q")
        self.set(settings or Settings())

    def set(self, settings: Settings) -> None:
        """Sets the settings from the next request on; what is already waiting keeps its time."""
        self.settings = settings
        values = (
            settings.bandwidth_bytes_per_s,
            settings.metadata_latency_s * _NS,
            settings.data_latency_s * _NS,
        )
        for index, value in enumerate(values):
            self._words[index] = round(value)

    def set_weight(self, node: int, weight: float) -> None:
        """Sets the weight of a node, by which requests are served when several nodes have requests outstanding."""
        self._words[_HEAD + node * _NODE + 1] = max(1, round(weight * _WEIGHT_ONE))

    def server_pid(self, node: int) -> int:
        """Returns the process that serves this node's mount; 0 before it is mounted."""
        return self._words[_HEAD + node * _NODE + 2]

    def clear_server(self, node: int) -> None:
        """Notes, before a mount, that nobody serves this node."""
        self._words[_HEAD + node * _NODE + 2] = 0

    def counters(self, node: int = 0) -> Counters:
        """Returns what this node has asked so far."""
        start = _HEAD + node * _NODE + 4
        return Counters(*self._words[start : start + _COUNTERS])

    @staticmethod
    def left_behind() -> list[Path]:
        """Returns all state files of this user, wherever they are made; a name begins with PREFIX and the maker's
        pid."""
        places = {_MEMORY, Path(tempfile.gettempdir())}
        found = [path for place in places for path in place.glob(f"{PREFIX}*.state")]
        return [path for path in found if _is_ours(path)]

    def close(self) -> None:
        """Removes the file; servers that still run keep their mapping."""
        self._words.release()
        self._map.close()
        self.path.unlink(missing_ok=True)


def _is_ours(path: Path) -> bool:
    """Returns whether this user owns a file, which another process may just have removed."""
    try:
        return path.lstat().st_uid == os.geteuid()
    except FileNotFoundError:
        return False
