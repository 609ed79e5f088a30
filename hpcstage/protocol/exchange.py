"""The messages between a node's daemon and its exchange, in SOCK_SEQPACKET datagrams, without pickles.

A datagram holds one message, or several of the kind Got (there may be many a second): receivers use `unpack_all`.

Owns the messages and their bytes. Everything is little-endian; the first byte says which message it is. A node is
named by its index among the nodes of the job, never by its rank in the MPI world, which may lack nodes. Owns no
socket, knows neither MPI nor the daemon.

The exchange connects to the node's socket and sends a message of the kind PEER (see `protocol.shim`). The daemon
answers with Hello, or with a refusal in the form of the socket's replies, which `unpack` does not accept. From then on
both send what is declared here. The end of the connection means that the group is gone.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any, ClassVar, TypeVar, get_args

from hpcstage.protocol.membership import Membership

MAX_MESSAGE_BYTES = 32768
MAX_IDS = 4096
"""The most ids in one message; `in_messages` splits longer lists."""
MAX_GROUP_BYTES = 32 << 20
"""The most bytes of a membership: 100,000 nodes take less."""
CREDIT_FILES = 256
CREDIT_BYTES = 64 << 20
"""The most files and bytes that a daemon may have asked its exchange for and not received (a single larger file always
may be)."""


class LinkError(ValueError):
    """The bytes are no message of ours."""


class Why(IntEnum):
    """Why a file does not come from another node. NONE in an Offer says that it is in the store and is to be sent."""

    NONE = 0
    FAILED = 1
    """The node that fetches it could not read it from the source."""
    VOID = 2
    """It was written to during the run."""
    FULL = 3
    """The owner's store or the receiver's has no free budget for it."""
    UNKNOWN = 4
    """The node has no such id, or no manifest yet."""
    LOST = 5
    """It was offered, but its copy could not be read or is not as it was."""
    LOCAL_ERROR = 6
    """The receiver could not write or publish it."""
    ABSENT = 7
    """The node is not in the group."""
    ENDED = 8
    """The node's run has ended."""
    EXISTS = 9
    """Something has its name in the receiver's store: a copy that came another way, or a tombstone."""
    LATER = 10
    """A large file that a program reads at the source: it is not copied before the program lets go of it."""


@dataclass(frozen=True)
class Hello:
    """Daemon: which node of the job this is, and what its store may use. The answer to PEER."""

    CODE: ClassVar[int] = 32
    FORM: ClassVar[struct.Struct] = struct.Struct("<IQQ")
    index: int
    budget_bytes: int
    budget_inodes: int


@dataclass(frozen=True)
class Group:
    """Exchange: a piece of the group's membership. The group stands once the first one is whole; a newer one replaces
    it when a node has left."""

    CODE: ClassVar[int] = 33
    FORM: ClassVar[struct.Struct] = struct.Struct("<QQ")
    size_bytes: int
    start: int
    data: bytes


@dataclass(frozen=True)
class PlanFiles:
    """The file manifest.bin lies in the node directory, and maybe order.bin.

    Daemon of the group's first node: send them to the others. Exchange of the others: they have come. Both may send
    this again.
    """

    CODE: ClassVar[int] = 34
    FORM: ClassVar[struct.Struct] = struct.Struct("<Q")
    listings: int


@dataclass(frozen=True)
class Fetch:
    """Daemon: get these from that node. Each id is answered by one Got or in one Missed."""

    CODE: ClassVar[int] = 35
    FORM: ClassVar[struct.Struct] = struct.Struct("<I")
    node: int
    ids: tuple[int, ...]


@dataclass(frozen=True)
class Ask:
    """Exchange: that node asks for these here. Each id is answered in one Offer."""

    CODE: ClassVar[int] = 36
    FORM: ClassVar[struct.Struct] = struct.Struct("<I")
    node: int
    ids: tuple[int, ...]


@dataclass(frozen=True)
class Offer:
    """Daemon: these are in the store, send them to that node; or, with a reason, they never will be."""

    CODE: ClassVar[int] = 37
    FORM: ClassVar[struct.Struct] = struct.Struct("<II")
    node: int
    why: Why
    ids: tuple[int, ...]


@dataclass(frozen=True)
class Missed:
    """Exchange: these do not come from that node."""

    CODE: ClassVar[int] = 38
    FORM: ClassVar[struct.Struct] = struct.Struct("<II")
    node: int
    why: Why
    ids: tuple[int, ...]


@dataclass(frozen=True)
class Got:
    """Exchange: this came from that node and is published in the store; size and mtime are the copy's."""

    CODE: ClassVar[int] = 39
    FORM: ClassVar[struct.Struct] = struct.Struct("<IIQq")
    node: int
    id: int
    size_bytes: int
    mtime_ns: int


@dataclass(frozen=True)
class Sent:
    """Exchange: this many files and bytes went to that node since the last message of this kind."""

    CODE: ClassVar[int] = 40
    FORM: ClassVar[struct.Struct] = struct.Struct("<IIQ")
    node: int
    files: int
    size_bytes: int


@dataclass(frozen=True)
class Written:
    """The program writes to these. Daemon: here, tell all others. Exchange: on that node, no copy may stay here. One
    without ids says that a node has told a new group all of them."""

    CODE: ClassVar[int] = 43
    FORM: ClassVar[struct.Struct] = struct.Struct("<II")
    node: int
    number: int
    """Later messages of a node have higher numbers."""
    ids: tuple[int, ...]


@dataclass(frozen=True)
class Confirmed:
    """What that node has told as written to up to this number has no copies any more. Daemon: here. Exchange: on all
    other nodes."""

    CODE: ClassVar[int] = 47
    FORM: ClassVar[struct.Struct] = struct.Struct("<II")
    node: int
    number: int


@dataclass(frozen=True)
class Reading:
    """A program of a node reads these large files at the source. Daemon: here, tell all others. Exchange: there."""

    CODE: ClassVar[int] = 44
    FORM: ClassVar[struct.Struct] = struct.Struct("<I")
    node: int
    ids: tuple[int, ...]


@dataclass(frozen=True)
class Together:
    """These nodes bring a large file together from now on. Daemon: this node begins, tell all others. Exchange: another
    node has said it."""

    CODE: ClassVar[int] = 46
    FORM: ClassVar[struct.Struct] = struct.Struct("<I")
    id: int
    ids: tuple[int, ...]
    """The nodes."""


@dataclass(frozen=True)
class Holdings:
    """A node has copies of these, whose nodes are missing. Daemon: here, tell all others. Exchange: on that node. The
    last message of a node has no ids."""

    CODE: ClassVar[int] = 45
    FORM: ClassVar[struct.Struct] = struct.Struct("<I")
    node: int
    ids: tuple[int, ...]


@dataclass(frozen=True)
class End:
    """Daemon: the run has ended, nothing more is asked or offered."""

    CODE: ClassVar[int] = 42
    FORM: ClassVar[struct.Struct] = struct.Struct("<")


@dataclass(frozen=True)
class Replaced:
    """Daemon: another exchange has connected, and hears of writes."""

    CODE: ClassVar[int] = 41
    FORM: ClassVar[struct.Struct] = struct.Struct("<")


Message = (
    Hello
    | Group
    | PlanFiles
    | Fetch
    | Ask
    | Offer
    | Missed
    | Got
    | Sent
    | Written
    | Confirmed
    | Reading
    | Together
    | Holdings
    | End
    | Replaced
)
_WITH_IDS = (Fetch, Ask, Offer, Missed, Written, Reading, Together, Holdings)
_CLASSES: dict[int, type[Message]] = {kind.CODE: kind for kind in get_args(Message)}
_Listed = TypeVar("_Listed", Fetch, Ask, Offer, Missed, Written, Reading, Together, Holdings)


def pack(message: Message) -> bytes:
    """Returns the datagram of a message."""
    code = bytes((message.CODE,))
    if isinstance(message, Group):
        return code + message.FORM.pack(*_fixed(message)) + message.data
    if isinstance(message, _WITH_IDS):
        return code + message.FORM.pack(*_fixed(message)) + struct.pack(f"<{len(message.ids)}I", *message.ids)
    return code + message.FORM.pack(*vars(message).values())


def unpack(data: bytes) -> Message:
    """Returns the message of a datagram. Raises LinkError."""
    kind = _CLASSES.get(data[0]) if data else None
    if kind is None:
        raise LinkError(f"unknown message {data[:1].hex() or '(empty)'}")
    size = 1 + kind.FORM.size
    try:
        values: list[Any] = list(kind.FORM.unpack(data[1:size]))
        rest = data[size:]
        if kind is Group:
            values.append(rest)
        elif kind in _WITH_IDS:
            if kind in (Offer, Missed):
                values[1] = Why(values[1])
            values.append(struct.unpack(f"<{len(rest) // 4}I", rest))
        elif rest:
            raise LinkError(f"{len(rest)} bytes too long")
        return kind(*values)
    except (struct.error, ValueError) as error:
        raise LinkError(f"a damaged message of the kind {kind.__name__}: {error}") from None


def unpack_all(data: bytes) -> list[Message]:
    """Returns the messages of a datagram. Raises LinkError."""
    size = 1 + Got.FORM.size
    if len(data) <= size or data[0] != Got.CODE:
        return [unpack(data)]
    if set(data[::size]) != {Got.CODE}:
        raise LinkError("a datagram of mixed messages")
    return [unpack(data[at : at + size]) for at in range(0, len(data), size)]


def pack_all(messages: Sequence[Got]) -> Iterator[bytes]:
    """Yields the fewest datagrams that hold these messages."""
    per_message = MAX_MESSAGE_BYTES // (1 + Got.FORM.size)
    for first in range(0, len(messages), per_message):
        yield b"".join(map(pack, messages[first : first + per_message]))


def in_messages(message: _Listed) -> Iterator[_Listed]:
    """Yields the same message split into ones with at most MAX_IDS ids each."""
    for start in range(0, len(message.ids), MAX_IDS):
        yield replace(message, ids=message.ids[start : start + MAX_IDS])


def group_messages(membership: Membership) -> Iterator[Group]:
    """Yields the membership in messages that are short enough."""
    data, most = membership.pack(), MAX_MESSAGE_BYTES - 1 - Group.FORM.size
    for start in range(0, len(data), most):
        yield Group(len(data), start, data[start : start + most])


class GroupPieces:
    """Puts a membership together from its messages, which come in their order."""

    def __init__(self) -> None:
        self._data = b""

    def add(self, piece: Group) -> Membership | None:
        """Returns the membership once it is whole. Raises LinkError if the messages are none of one."""
        fits = piece.start + len(piece.data) <= piece.size_bytes <= MAX_GROUP_BYTES
        if piece.start not in (0, len(self._data)) or not fits:
            raise LinkError(f"{len(piece.data)} of {piece.size_bytes} bytes of a membership at {piece.start}")
        self._data = self._data[: piece.start] + piece.data
        if len(self._data) < piece.size_bytes:
            return None
        data, self._data = self._data, b""
        try:
            return Membership.unpack(data)
        except ValueError as error:
            raise LinkError(str(error)) from None


def _fixed(message: Group | Fetch | Ask | Offer | Missed | Written | Reading | Together | Holdings) -> list[int]:
    """Returns all values but the last, which has its own form."""
    return list(vars(message).values())[:-1]
