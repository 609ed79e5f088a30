"""The kernel on ISA-L, Intel's library, which has SIMD code for x86-64 and ARM and is called by ctypes.

The system's library is used where there is one, else the one in the wheel of pyeclib. PyECLib itself is not imported:
its `encode` copies blocks and takes up to twenty times as long. A library counts only after it has computed correctly.
"""

from __future__ import annotations

import ctypes
import importlib.util
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from hpcstage.checkpoint.coding.blocks import Block, Bytes, Operation, nothing, operands
from hpcstage.checkpoint.coding.field import Row, Rows, dot

SYSTEM = "libisal.so.2"
IN_WHEEL = "pyeclib.libs/libisal-pyeclib*"
_TABLE_BYTES = 32
_TABLES_KEPT = 1024
_ODD_SIZES = (1, 31, 100)


class IsalKernel:
    """One loaded library."""

    def __init__(self, path: str) -> None:
        """Raises an OSError or AttributeError if the file is no such library, a ValueError if it computes wrongly."""
        self.path = path
        library = ctypes.CDLL(path)
        number, address = ctypes.c_int, ctypes.c_void_p
        self._init = library.ec_init_tables
        self._init.argtypes, self._init.restype = (number, number, ctypes.c_char_p, ctypes.c_char_p), None
        self._encode = library.ec_encode_data
        self._encode.argtypes, self._encode.restype = (number, number, number, address, address, address), None
        self._update = library.ec_encode_data_update
        self._update.argtypes, self._update.restype = (number, number, number, number, address, address, address), None
        self._tables: dict[Rows, ctypes.Array[ctypes.c_char]] = {}
        self._try()

    @classmethod
    def found(cls) -> Iterator[IsalKernel]:
        """Returns a kernel for each usable library of this machine."""
        for path in (SYSTEM, *_in_wheel()):
            try:
                yield cls(path)
            except (OSError, AttributeError, ValueError):  # another file of that name: the next one, in the end numpy
                continue

    @property
    def name(self) -> str:
        """Returns the kernel's name for people."""
        return f"ISA-L ({Path(self.path).name})"

    def product(self, rows: Rows, sources: Sequence[Block], targets: Sequence[Block]) -> Operation:
        """Returns what sets each target i to the sum of `rows[i][j]` times source j."""
        read, written = operands(rows, sources, targets)
        if not len(written[0]):
            return nothing
        tables, inputs, outputs = self._tables_of(rows), _addresses(read), _addresses(written)
        pointers = (ctypes.addressof(tables), ctypes.addressof(inputs), ctypes.addressof(outputs))
        arguments = (len(written[0]), len(read), len(written), *pointers)
        return _BoundCall(self._encode, arguments, (tables, inputs, outputs, *read, *written))

    def addition(self, column: Row, source: Block, targets: Sequence[Block]) -> Operation:
        """Returns what adds `column[i]` times the source to each target i."""
        rows = tuple((c,) for c in column)
        (read,), written = operands(rows, (source,), targets)
        if not len(read):
            return nothing
        tables, outputs = self._tables_of(rows), _addresses(written)
        pointers = (ctypes.addressof(tables), _address(read), ctypes.addressof(outputs))
        arguments = (len(read), 1, len(written), 0, *pointers)
        return _BoundCall(self._update, arguments, (tables, outputs, read, *written))

    def _tables_of(self, rows: Rows) -> ctypes.Array[ctypes.c_char]:
        found = self._tables.get(rows)
        if found is None:
            if len(self._tables) >= _TABLES_KEPT:
                self._tables.clear()
            found = ctypes.create_string_buffer(_TABLE_BYTES * len(rows) * len(rows[0]))
            self._init(len(rows[0]), len(rows), bytes(c for row in rows for c in row), found)
            self._tables[rows] = found
        return found

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
        self.product(rows, sources, made)()
        for place, source in enumerate(sources):
            self.addition(tuple(row[place] for row in rows), source, added)()
        if made != wanted or added != [bytes(a ^ b for a, b in zip(sources[0], row, strict=True)) for row in wanted]:
            raise ValueError(f"{self.path} computes wrongly")


class _BoundCall:
    """A function of the library with its arguments, and what they point to."""

    __slots__ = ("_arguments", "_function", "_kept")

    def __init__(self, function: Callable[..., object], arguments: tuple[int, ...], kept: object) -> None:
        self._function, self._arguments, self._kept = function, arguments, kept

    def __call__(self) -> None:
        self._function(*self._arguments)


def _addresses(blocks: Sequence[Bytes]) -> ctypes.Array[ctypes.c_void_p]:
    return (ctypes.c_void_p * len(blocks))(*map(_address, blocks))


def _address(block: Bytes) -> int:
    """Returns where a block begins; the way for blocks that can be written takes a third of the time."""
    return ctypes.addressof(ctypes.c_char.from_buffer(block.data)) if block.flags.writeable else block.ctypes.data


def _in_wheel() -> list[str]:
    spec = importlib.util.find_spec("pyeclib")
    places = spec.submodule_search_locations if spec else None
    return [str(path) for place in places or () for path in sorted(Path(place).parent.glob(IN_WHEEL))]
