"""The stores that this node's agent lets others read, by their keys. Owns the paths; reads a range, or what there is.

Reads run in the thread of a lane, in functions of their own that know paths only.
"""

from __future__ import annotations

import errno
import json
import os
from dataclasses import dataclass
from pathlib import Path

from hpcstage.checkpoint.generations.files import Files, GenerationPart, generation_path, is_number
from hpcstage.protocol.coding import MAX_KEY_LENGTH, MAX_PIECE_BYTES

MOST_KEYS = 1024


@dataclass(frozen=True)
class Found:
    """An answer; `errno` is 0 if there is one."""

    errno: int = 0
    why: str = ""
    size_bytes: int = 0
    content: bytes = b""


class HeldGenerations:
    """Reads the generations that this node's agent holds."""

    def __init__(self) -> None:
        self._directories: dict[str, Path] = {}

    def hold(self, key: str, directory: str) -> None:
        """Notes which directory a key means."""
        is_new = key not in self._directories
        if (
            len(key) <= MAX_KEY_LENGTH
            and os.path.isabs(directory)
            and (not is_new or len(self._directories) < MOST_KEYS)
        ):
            self._directories[key] = Path(directory)

    def directory(self, key: str) -> Path | None:
        """Returns the directory of a key; None if it means none."""
        return self._directories.get(key)


def read(store: Path, number: int, part: str, offset: int, length: int) -> Found:
    """Returns a range of a file of a generation, and its size."""
    try:
        if not is_number(number) or offset < 0 or not 0 <= length <= MAX_PIECE_BYTES:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        files, path = Files(), generation_path(store, number) / GenerationPart(part)
        with files.opened(path) as fd:
            content = bytearray(length)
            found = files.read_into(fd, memoryview(content), offset)
            return Found(0, "", os.fstat(fd).st_size, bytes(memoryview(content)[:found]))
    except ValueError:
        return Found(errno.EINVAL, f"no generation has a file {part!r}")
    except OSError as error:
        return Found(error.errno or errno.EIO, error.strerror or "")


def listed(store: Path) -> Found:
    """Returns the committed generations, as a list in JSON."""
    from hpcstage.checkpoint.generations.reading import LocalSource  # NumPy takes long

    try:
        with LocalSource(store) as source:
            return Found(content=json.dumps(source.numbers()).encode())
    except OSError as error:
        return Found(error.errno or errno.EIO, error.strerror or "")
    except ImportError as error:
        return Found(errno.ENOSYS, f"{error.name} cannot be imported")
