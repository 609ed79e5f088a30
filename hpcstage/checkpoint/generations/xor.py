"""The difference of a block to its predecessor: XOR, bytes of a word's rank grouped, compressed. Pure.

Weights that training moved a little keep sign, exponent and leading bits, so the XOR has many zero bytes; grouped by
rank they compress well (a dense optimizer's fp32 state 1.2 to 1.7 times, embeddings 4 to 10 times). zstd's first level
is used, since higher ones take several times longer for some percent. Without `zstandard` there are no differences:
zlib is ten times slower, which costs training more than the disk does.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

try:
    import zstandard
except ImportError:  # the optional extra `checkpoint` has it
    zstandard = None  # type: ignore[assignment, unused-ignore]

Bytes = npt.NDArray[np.uint8]
WIDTHS = (1, 2, 4, 8)
"""The widths of words: fp8 and text, bf16 and fp16, fp32, and fp64 and int64."""
MISSING = "there are no compressed differences, since the package zstandard is missing"
_LEVEL = 1
_PROBES = 16


@dataclass(frozen=True)
class ProbedXor:
    """How well differences compress."""

    share: float
    """The share of their bytes that the blocks take as differences."""
    width: int
    """The width of words with which they do."""


class UndecodableBlock(Exception):
    """Stored bytes are no difference of a block of this size."""


def available() -> bool:
    """Tells whether differences can be compressed."""
    return zstandard is not None


class BlockEncoder:
    """Encodes blocks as differences with one width of words."""

    def __init__(self, width: int) -> None:
        self.width = width
        self._compressor = zstandard.ZstdCompressor(level=_LEVEL)

    def encode(self, block: Bytes, base: Bytes) -> bytes:
        """Returns the compressed difference; a base of another size is cut or filled with zeros."""
        difference = block.copy()
        common = min(len(block), len(base))
        np.bitwise_xor(block[:common], base[:common], out=difference[:common])
        return self._compressor.compress(_grouped(difference, self.width))


def decode(stored: bytes, base: Bytes, width: int, into: Bytes) -> None:
    """Makes the block from its difference and its base."""
    if zstandard is None:
        raise UndecodableBlock(MISSING)
    try:
        if zstandard.frame_content_size(stored) != len(into):  # decompress() believes it, and allocates as much
            raise UndecodableBlock("the difference has another size than its block")
        packed = zstandard.ZstdDecompressor().decompress(stored, max_output_size=len(into))
    except (zstandard.ZstdError, MemoryError) as error:
        raise UndecodableBlock(str(error)) from error
    if len(packed) != len(into) or width not in WIDTHS:
        raise UndecodableBlock("the difference has another size than its block")
    _ungroup(np.frombuffer(packed, np.uint8), width, into)
    common = min(len(into), len(base))
    np.bitwise_xor(into[:common], base[:common], out=into[:common])


def probe(pairs: Iterable[tuple[Bytes, Bytes]]) -> ProbedXor | None:
    """Returns how well the differences of some blocks compress; None without blocks."""
    blocks = list(pairs)
    whole = sum(len(block) for block, _ in blocks)
    if not whole:
        return None
    taken = {width: _bytes_with(BlockEncoder(width), blocks) for width in WIDTHS}
    best = min(WIDTHS, key=lambda width: taken[width])
    return ProbedXor(taken[best] / whole, best)


def _bytes_with(encoder: BlockEncoder, blocks: list[tuple[Bytes, Bytes]]) -> int:
    return sum(min(len(block), len(encoder.encode(block, base))) for block, base in blocks)


def probed(candidates: npt.NDArray[np.int64]) -> list[int]:
    """Returns the blocks of a probe: some of the candidates, evenly spread."""
    places = np.linspace(0, len(candidates) - 1, min(_PROBES, len(candidates))).astype(np.int64)
    return [int(block) for block in candidates[places]]


def _grouped(data: Bytes, width: int) -> bytes:
    if width == 1:
        return data.tobytes()
    whole = len(data) - len(data) % width
    return data[:whole].reshape(-1, width).T.tobytes() + data[whole:].tobytes()


def _ungroup(packed: Bytes, width: int, into: Bytes) -> None:
    whole = len(into) - len(into) % width
    into[:whole].reshape(-1, width)[:] = packed[:whole].reshape(width, -1).T
    into[whole:] = packed[whole:]
