"""The difference of a block to its predecessor: XOR, bytes of a word's rank grouped, compressed. Pure.

Weights that training moved a little keep sign, exponent and leading bits, so the XOR has many zero bytes; grouped by
rank they compress well (a dense optimizer's fp32 state 1.2 to 1.7 times, embeddings 4 to 10 times). zstd's first level
is used, since higher ones take several times longer for some percent. Without `zstandard` there are no differences:
zlib is ten times slower, which costs training more than the disk does.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
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
    seconds_per_byte: float = 0.0
    """The measured time for each byte of the blocks: reading what they differ from, and encoding."""


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


def probe(blocks: Sequence[Bytes], bases: Iterable[Bytes]) -> ProbedXor | None:
    """Returns how well the differences of some blocks to their bases compress, and what they take; None without blocks.
    The bases are read one by one, and the time for that counts."""
    began_s = time.monotonic()
    pairs = list(zip(blocks, bases, strict=True))
    read_s = time.monotonic() - began_s
    whole = sum(map(len, blocks))
    if not whole:
        return None
    taken = {width: _encoded_with(BlockEncoder(width), pairs) for width in WIDTHS}
    best = min(WIDTHS, key=lambda width: taken[width][0])
    size, encode_s = taken[best]
    return ProbedXor(size / whole, best, (read_s + encode_s) / whole)


def _encoded_with(encoder: BlockEncoder, pairs: Sequence[tuple[Bytes, Bytes]]) -> tuple[int, float]:
    """Returns the bytes and the seconds of the differences of these blocks."""
    began_s = time.monotonic()
    size = sum(min(len(block), len(encoder.encode(block, base))) for block, base in pairs)
    return size, time.monotonic() - began_s


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
    words, ranks = into[:whole].reshape(-1, width), packed[:whole].reshape(width, -1)
    for rank in range(width):  # three times as fast as all ranks in one assignment
        words[:, rank] = ranks[rank]
    into[whole:] = packed[whole:]
