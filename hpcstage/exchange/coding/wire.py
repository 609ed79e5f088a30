"""The messages about checkpoints between exchanges, behind the byte that says the sort.

Owns their bytes, and checks that they are whole; what names and numbers mean the receiver checks. Little-endian.

    message u8 sort, u32 length of the head, the head in JSON, the body as it is
    block   u8 sort, 3 bytes of nothing, u32 stripe, u64 digest of the order, u16 index of the block of the sender in
            its stripe, u16 that of the receiver, 4 bytes of nothing, the blocks one behind the other
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from typing import Any

from hpcstage.exchange.transport.frames import FrameError, Sort

_MESSAGE = struct.Struct("<BI")
_BLOCK = struct.Struct("<B3xIQHH4x")
BLOCK_HEAD_BYTES = _BLOCK.size


@dataclass(frozen=True)
class ExchangeMessage:
    """Something that is said; `kind` says what, `values` has the rest."""

    kind: str
    values: dict[str, Any]
    body: bytes = b""

    def pack(self) -> bytes:
        """Returns the bytes of the message."""
        head = json.dumps({**self.values, "": self.kind}, separators=(",", ":")).encode()
        return b"".join((_MESSAGE.pack(Sort.CODING, len(head)), head, self.body))

    @classmethod
    def unpack(cls, data: memoryview) -> ExchangeMessage:
        """Reads what `pack` returned. Raises FrameError."""
        try:
            end = _MESSAGE.size + _MESSAGE.unpack_from(data)[1]
            values = json.loads(bytes(data[_MESSAGE.size : end]))
            return cls(str(values.pop("")), values, bytes(data[end:]))
        except (struct.error, KeyError, TypeError, AttributeError, ValueError, RecursionError) as error:
            raise FrameError(f"a damaged message about checkpoints: {error!r}") from None

    def number(self, name: str) -> int:
        """Returns a whole number. Raises FrameError."""
        found = self.values.get(name)
        if not isinstance(found, int):
            raise FrameError(f"{self.kind} without a number {name}")
        return found

    def text(self, name: str) -> str:
        """Returns a text. Raises FrameError."""
        found = self.values.get(name)
        if not isinstance(found, str):
            raise FrameError(f"{self.kind} without a text {name}")
        return found

    def numbers(self, name: str) -> tuple[int, ...]:
        """Returns a list of whole numbers that are not negative. Raises FrameError."""
        found = self.values.get(name)
        if not isinstance(found, list) or not all(isinstance(one, int) and one >= 0 for one in found):
            raise FrameError(f"{self.kind} without numbers {name}")
        return tuple(found)


@dataclass(frozen=True)
class BlockHead:
    """Says which message of which stripe comes."""

    stripe: int
    digest: int
    sender: int
    receiver: int

    def pack_into(self, buffer: bytearray) -> None:
        """Writes the head to the beginning of a buffer."""
        _BLOCK.pack_into(buffer, 0, Sort.BLOCK, self.stripe, self.digest, self.sender, self.receiver)

    @classmethod
    def unpack(cls, data: memoryview) -> BlockHead:
        """Reads what `pack_into` wrote. Raises FrameError."""
        try:
            return cls(*_BLOCK.unpack_from(data)[1:])
        except struct.error as error:
            raise FrameError(f"a damaged block: {error}") from None
