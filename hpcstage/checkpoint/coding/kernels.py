"""Arithmetic of GF(256) on blocks of bytes, by ISA-L: Intel's library, which has SIMD code for x86-64 and ARM.

Nothing is copied: blocks are whatever has contiguous bytes, and Python's lock is free meanwhile. The library is called
by ctypes: the system's where there is one, else the one in the wheel of pyeclib. PyECLib itself is not imported: its
`encode` copies blocks and takes up to twenty times as long.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from hpcstage.checkpoint.coding.erasurecode import Row, Rows, dot
from hpcstage.errors import HpcstageError

if TYPE_CHECKING:
    from mmap import mmap

Block: TypeAlias = "bytes | bytearray | memoryview | mmap | npt.NDArray[Any]"
"""Contiguous bytes of any kind. A target has to be writable."""
MOST_BYTES = 1 << 30
"""The largest block: ISA-L counts in C's int."""
SYSTEM = "libisal.so.2"
IN_WHEEL = "pyeclib.libs/libisal-pyeclib*"
_TABLE_BYTES = 32
_TABLES_KEPT = 1024
_ODD_SIZES = (1, 31, 100)


class NoKernel(HpcstageError):
    """This machine has no library that computes in GF(256)."""


@functools.cache
def best_kernel() -> Kernel:
    """Returns the kernel that this process uses. Raises NoKernel."""
    found = next(kernels(), None)
    if found is None:
        raise NoKernel("ISA-L, by which parities are computed, is not there", "pip install pyeclib")
    return found


def kernels() -> Iterator[Kernel]:
    """Loads the libraries of this machine one by one: the system's, then that of the wheel."""
    for path in (SYSTEM, *_in_wheel()):
        try:
            yield Kernel(path)
        except (OSError, AttributeError, ValueError):  # another file of that name
            continue


class Kernel:
    """One loaded library. It counts only after it has computed correctly."""

    def __init__(self, path: str) -> None:
        """Raises an OSError or AttributeError if the file is no such library, a ValueError if it computes wrongly."""
        self.path = path
        self.name = f"ISA-L ({Path(path).name})"
        library = ctypes.CDLL(path)
        number, address = ctypes.c_int, ctypes.c_void_p
        self._init = library.ec_init_tables
        self._init.argtypes, self._init.restype = (number, number, ctypes.c_char_p, ctypes.c_char_p), None
        self._encode = library.ec_encode_data
        self._encode.argtypes, self._encode.restype = (number, number, number, address, address, address), None
        self._update = library.ec_encode_data_update
        self._update.argtypes, self._update.restype = (number, number, number, number, address, address, address), None
        self._tables = functools.lru_cache(_TABLES_KEPT)(self._made_tables)
        self._try()

    def product(self, rows: Rows, sources: Sequence[Block], targets: Sequence[Block]) -> None:
        """Sets each target i to the sum of `rows[i][j]` times source j. No target is a source; all blocks have one
        size."""
        read, written = operands(rows, sources, targets)
        if size := read[0].nbytes:
            self._encode(size, len(read), len(written), self._tables(rows), _addresses(read), _addresses(written))

    def addition(self, column: Row, source: Block, targets: Sequence[Block]) -> None:
        """Adds `column[i]` times the source to each target i."""
        rows = tuple((c,) for c in column)
        (read,), written = operands(rows, (source,), targets)
        if size := read.nbytes:
            self._update(size, 1, len(written), 0, self._tables(rows), _address(read), _addresses(written))

    def _made_tables(self, rows: Rows) -> ctypes.Array[ctypes.c_char]:
        made = ctypes.create_string_buffer(_TABLE_BYTES * len(rows) * len(rows[0]))
        self._init(len(rows[0]), len(rows), bytes(c for row in rows for c in row), made)
        return made

    def _try(self) -> None:
        """Multiplies all bytes with a few numbers, and adds up three blocks of sizes that no vector divides.

        Raises a ValueError if anything is wrong.
        """
        source = bytes(range(256))
        for column in ((2, 3), (0x8E, 255)):
            self._compare(tuple((c,) for c in column), (source,))
        for size in _ODD_SIZES:
            self._compare(((1, 2, 3), (0x8E, 255, 0x1D)), tuple(source[start : start + size] for start in (0, 77, 155)))

    def _compare(self, rows: Rows, sources: Sequence[bytes]) -> None:
        size = len(sources[0])
        wanted = [bytes(dot(row, column) for column in zip(*sources, strict=True)) for row in rows]
        made, added = [bytearray(size) for _ in rows], [bytearray(sources[0]) for _ in rows]
        self.product(rows, sources, made)
        for place, source in enumerate(sources):
            self.addition(tuple(row[place] for row in rows), source, added)
        if made != wanted or added != [bytes(a ^ b for a, b in zip(sources[0], row, strict=True)) for row in wanted]:
            raise ValueError(f"{self.path} computes wrongly")


def operands(
    rows: Rows, sources: Sequence[Block], targets: Sequence[Block]
) -> tuple[list[memoryview], list[memoryview]]:
    """Returns the blocks of one operation. Raises a ValueError where they do not fit: a library in C would read and
    write beyond them."""
    read, written = [memoryview(b) for b in sources], [memoryview(b) for b in targets]  # type: ignore[arg-type]
    if not read or not rows or len(rows) != len(written) or {*map(len, rows)} != {len(read)}:
        raise ValueError(
            f"{len(written)} targets are as many rows of {len(read)} coefficients, and at least one of one"
        )
    size = read[0].nbytes
    for block in (*read, *written):
        if block.nbytes != size or size > MOST_BYTES:
            sizes = sorted({one.nbytes for one in (*read, *written)})
            raise ValueError(f"the blocks of an operation have one size of at most {MOST_BYTES} bytes, not {sizes}")
        if not block.c_contiguous:
            raise ValueError("the bytes of a block are contiguous")
    if any(block.readonly for block in written):
        raise ValueError("a block that cannot be written is no target")
    return read, written


def _addresses(blocks: Sequence[memoryview]) -> ctypes.Array[ctypes.c_void_p]:
    return (ctypes.c_void_p * len(blocks))(*[_address(block) for block in blocks])


def _address(block: memoryview) -> int:
    """Returns where a block begins; ctypes has it in a fraction of numpy's time, but not of what cannot be written."""
    if block.readonly:
        return np.frombuffer(block, np.uint8).ctypes.data
    return ctypes.addressof(ctypes.c_char.from_buffer(block))


def _in_wheel() -> list[str]:
    spec = importlib.util.find_spec("pyeclib")
    places = spec.submodule_search_locations if spec else None
    return [str(path) for place in places or () for path in sorted(Path(place).parent.glob(IN_WHEEL))]
