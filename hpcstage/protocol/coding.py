"""The messages between a node's checkpoint agent and the exchange of its node, on a stream socket.

Owns the messages, their bytes and their bounds; owns no socket. A message is a length of its head, a length of its
body, the head in JSON, and the body as it is. The socket has the name SOCK in the node directory, which is its owner's
alone; the exchange listens there as long as it lives, and takes only processes of its own user. The end of the
connection means that the exchange has gone. A node is named by its index among the nodes of the job. At READERS it
listens for a process of the agent that only reads what nodes hold.

The exchange says Welcome and Members first, and Members again whenever the membership has changed. Then each side says
what it has to say. No path ever comes from another node: an agent tells its own exchange which directory it means by a
key (Hold), and other nodes name the key.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, get_args

from hpcstage.protocol.exchange import MAX_GROUP_BYTES

SOCK = "coding"
"""The socket's name in the node directory."""
READERS = "readers"
"""The name of the socket for a process that only asks (Read, ListStore)."""
MAX_TOLD_BYTES = 64 << 10
"""The longest message from agent to agent."""
MAX_PIECE_BYTES = 1 << 20
"""The most bytes of a file in one answer."""
MAX_KEY_LENGTH = 255
HEAD = struct.Struct("<II")
MAX_HEAD_BYTES = 1 << 20
MAX_BODY_BYTES = MAX_GROUP_BYTES


class CodingLinkError(ValueError):
    """The bytes are no message of ours."""


class CodingMessage:
    """A message of either side."""

    BODY: ClassVar[str] = ""
    """The field whose bytes are sent as they are, behind the head; empty: there is none."""


@dataclass(frozen=True)
class Hold(CodingMessage):
    """Agent: the generations below this directory of this node are what others mean by the key."""

    key: str
    directory: str


@dataclass(frozen=True)
class AgentMessage(CodingMessage):
    """Agent: give this to the agent of that node. Exchange: the agent of that node gave this."""

    BODY: ClassVar[str] = "message"
    node: int
    message: bytes


@dataclass(frozen=True)
class Encode(CodingMessage):
    """Agent: encode a generation with the others of a group; see `checkpoint.protection.orders`."""

    number: int
    attempt: str
    trial: int
    directory: str
    nodes: list[int]
    names: list[str]
    k: int
    m: int
    block_bytes: int
    processor_share: float
    rate_bytes_per_s: float
    wait_s: float


@dataclass(frozen=True)
class Read(CodingMessage):
    """Agent: give me bytes of a file of a generation of that node; answered by one StoreAnswer with its id."""

    id: int
    node: int
    key: str
    number: int
    part: str
    offset: int
    length: int


@dataclass(frozen=True)
class ListStore(CodingMessage):
    """Agent: which generations does that node have; answered by one StoreAnswer, with the numbers in JSON."""

    id: int
    node: int
    key: str


@dataclass(frozen=True)
class Welcome(CodingMessage):
    """Exchange: the index of this node."""

    node: int


@dataclass(frozen=True)
class Members(CodingMessage):
    """Exchange: the membership (`protocol.membership`), packed."""

    BODY: ClassVar[str] = "packed"
    packed: bytes


@dataclass(frozen=True)
class AgentGone(CodingMessage):
    """Exchange: the agent of that node closed its link or died, and what was told to it lately may be lost. Its node
    may be there, and another agent may come."""

    node: int


@dataclass(frozen=True)
class EncodeEnded(CodingMessage):
    """Exchange: what became of an order. Without a failure the record lies beside the generation, on all nodes."""

    number: int
    attempt: str
    trial: int
    failure: str
    seconds: float
    bytes_sent: int
    bytes_read: int


@dataclass(frozen=True)
class StoreAnswer(CodingMessage):
    """Exchange: the answer to a question. `errno` is 0, or says why there is none; `size_bytes` is the file's size."""

    BODY: ClassVar[str] = "content"
    id: int
    errno: int
    why: str
    size_bytes: int
    content: bytes


FromAgent = Hold | AgentMessage | Encode | Read | ListStore
FromExchange = Welcome | Members | AgentMessage | AgentGone | EncodeEnded | StoreAnswer
Message = FromAgent | FromExchange
_KINDS = {kind.__name__: kind for kind in get_args(Message)}
_TYPES: dict[str, type | tuple[type, ...]] = {"int": int, "str": str, "float": (float, int)}


def pack(message: CodingMessage) -> bytes:
    """Returns the bytes of a message."""
    values = dict(vars(message))
    body = values.pop(message.BODY) if message.BODY else b""
    head = json.dumps({"": type(message).__name__, **values}, separators=(",", ":")).encode()
    return b"".join((HEAD.pack(len(head), len(body)), head, body))


def unpack(data: memoryview, kinds: Mapping[str, type[Any]]) -> Any:  # noqa: ANN401  one of the kinds
    """Reads what `pack` returned, a message of one of these kinds, by their names. Raises CodingLinkError."""
    try:
        end = HEAD.size + HEAD.unpack_from(data)[0]
        values: dict[str, Any] = json.loads(bytes(data[HEAD.size : end]))
        kind, body = kinds[values.pop("")], bytes(data[end:])
        if kind.BODY:
            values[kind.BODY] = body
        elif body:
            raise CodingLinkError(f"{len(body)} bytes too long")
        for one in fields(kind):
            if one.name != kind.BODY and not _is_of(values[one.name], str(one.type)):
                raise CodingLinkError(f"{kind.__name__} has no {one.name} like {values[one.name]!r}")
        return kind(**values)
    except (struct.error, KeyError, TypeError, AttributeError, ValueError, RecursionError) as error:
        raise CodingLinkError(f"a damaged message: {error!r}") from None


def _is_of(value: object, form: str) -> bool:
    if form.startswith("list["):
        return isinstance(value, list) and all(_is_of(one, form[len("list[") : -1]) for one in value)
    return isinstance(value, _TYPES[form])


class MessageStream:
    """Puts messages together from the bytes of a stream."""

    def __init__(self) -> None:
        self._data = bytearray()

    def add(self, data: bytes) -> Iterator[Message]:
        """Yields the messages that are whole now. Raises CodingLinkError."""
        self._data += data
        while len(self._data) >= HEAD.size:
            head, body = HEAD.unpack_from(self._data)
            if head > MAX_HEAD_BYTES or body > MAX_BODY_BYTES:
                raise CodingLinkError(f"a message of {head} and {body} bytes")
            end = HEAD.size + head + body
            if len(self._data) < end:
                return
            with memoryview(self._data) as view, view[:end] as whole:
                found = unpack(whole, _KINDS)
            del self._data[:end]
            yield found
