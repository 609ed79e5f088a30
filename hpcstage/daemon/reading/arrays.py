"""Writes and maps files of u32 arrays in the node directory, by which a helper hands over what it found.

The arrays are mapped, never parsed. A file holds the length of the head (u32), the head (JSON: {"facts": ...,
"arrays": {name: numbers}}) and the arrays in native byte order.
"""

from __future__ import annotations

import json
import mmap
import struct
from array import array
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hpcstage.writing import replacing

_LENGTH = struct.Struct("=I")


def save(path: Path, facts: Mapping[str, Any], arrays: Mapping[str, Sequence[int]]) -> None:
    """Writes the file atomically."""
    head = json.dumps({"facts": facts, "arrays": {name: len(numbers) for name, numbers in arrays.items()}}).encode()
    head += b" " * (-(len(head) + _LENGTH.size) % 4)
    with replacing(path) as file:
        file.write(_LENGTH.pack(len(head)) + head)
        for numbers in arrays.values():
            file.write(numbers if isinstance(numbers, (array, memoryview)) else array("I", numbers))


def load(path: Path) -> tuple[dict[str, Any], dict[str, Sequence[int]]]:
    """Maps what `save` wrote; the file may be deleted afterwards. Raises OSError or ValueError for any other file."""
    with open(path, "rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    if len(mapped) < _LENGTH.size:
        raise ValueError(f"{path} is cut")
    (length,) = _LENGTH.unpack_from(mapped)
    at = _LENGTH.size + length
    head: dict[str, Any] = json.loads(mapped[_LENGTH.size : at])
    found: dict[str, Sequence[int]] = {}
    view = memoryview(mapped)
    for name, count in head["arrays"].items():
        if at + 4 * count > len(mapped):
            raise ValueError(f"{path} is cut")
        found[name] = _numbers(view[at : at + 4 * count])
        at += 4 * count
    return head["facts"], found


def _numbers(view: memoryview[int]) -> memoryview[int]:
    cast: Callable[[str], memoryview[int]] = view.cast  # type: ignore[assignment]
    return cast("I")
