"""What exchanges tell each other about checkpoints, behind the byte that says the sort.

A message is packed as in `protocol.coding`; what agents ask of other nodes, and the answers, pass as they are. A block
of a stripe, or sums of it, has a head of fixed size instead, little-endian:

    block   u8 sort, 3 bytes of nothing, u32 stripe, u64 digest of the order, the bytes
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import ClassVar, get_args

from hpcstage.exchange.service import Station
from hpcstage.exchange.transport.frames import BLOCK_TAG, CODING_TAG, FrameError, Sort
from hpcstage.protocol import coding


@dataclass(frozen=True)
class ContentOffer(coding.CodingMessage):
    """What a member has of the generation of an order."""

    digest: int
    sizes_bytes: list[int]
    """Of the files that it gives to the code."""
    checksum: str = ""
    """That of its record of this group, if it has one."""
    others: str = ""
    """The members of another group of which it has a record."""


@dataclass(frozen=True)
class RoundsDone(coding.CodingMessage):
    """A member has finished so many rounds of stripes."""

    digest: int
    count: int


@dataclass(frozen=True)
class Piece(coding.CodingMessage):
    """The next piece of a member's checksums, of so many bytes in all, or of the record."""

    BODY: ClassVar[str] = "content"
    digest: int
    total: int
    content: bytes


@dataclass(frozen=True)
class Recorded(coding.CodingMessage):
    """A member has the record on its disk."""

    digest: int


@dataclass(frozen=True)
class Failed(coding.CodingMessage):
    """A member cannot go on, and says why."""

    digest: int
    why: str


OrderMessage = ContentOffer | RoundsDone | Piece | Recorded | Failed
"""What a member of a group tells another one of an order; `digest` says which."""
AgentsMessage = coding.AgentMessage | coding.AgentGone | coding.Read | coding.StoreAnswer
ExchangeMessage = OrderMessage | AgentsMessage
_KINDS = {kind.__name__: kind for kind in get_args(ExchangeMessage)}
_SORT = bytes([Sort.CODING])
_BLOCK = struct.Struct("<B3xIQ")
BLOCK_HEAD_BYTES = _BLOCK.size


def packed(message: ExchangeMessage) -> bytes:
    """Returns the bytes of a message."""
    return _SORT + coding.pack(message)


def unpacked(data: memoryview) -> ExchangeMessage:
    """Reads what `packed` returned. Raises FrameError."""
    try:
        found: ExchangeMessage = coding.unpack(data[len(_SORT) :], _KINDS)
    except coding.CodingLinkError as error:
        raise FrameError(str(error)) from None
    return found


def write_head(message: bytearray, stripe: int, digest: int) -> None:
    """Writes the head of a block to the room for it."""
    _BLOCK.pack_into(message, 0, Sort.BLOCK, stripe, digest)


def read_head(message: memoryview) -> tuple[int, int]:
    """Returns the stripe and the digest of the order of a block. Raises FrameError."""
    try:
        _, stripe, digest = _BLOCK.unpack_from(message)
    except struct.error as error:
        raise FrameError(f"a damaged block: {error}") from None
    return stripe, digest


def say(station: Station, node: int, message: bytes | bytearray) -> bool:
    """Sends a message, or a block with its head, to another node. Returns False if it is not there."""
    place = station.place(node)
    if place is None:
        return False
    station.post.send(memoryview(message), place, BLOCK_TAG if message[0] == Sort.BLOCK else CODING_TAG)
    return True
