"""The agent's side of the connection to the exchange of its node: messages, orders to encode, files of other nodes.

Owns what has come and was not asked for yet. Whatever comes is taken in while the agent waits for something, and
`fileno` tells select when something has come. All waits end.

An exchange goes when any other exchange of the job goes, and is started anew a moment later: LinkLost is raised then,
and the agent opens another link, which has a membership of a higher generation. What was under way has failed: orders
are given again with a higher trial, messages are told again.
"""

from __future__ import annotations

import errno
import itertools
import json
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpcstage.checkpoint.generations.files import GenerationId, GenerationPart
from hpcstage.checkpoint.protection.exchangesocket import RETRY_S, ExchangeSocket, LinkLost
from hpcstage.checkpoint.protection.orders import EncodeOrder
from hpcstage.protocol import coding
from hpcstage.protocol.membership import Membership

ANSWER_S = 30.0
"""How long an answer of another node is waited for."""
GREETING_S = 5.0
"""How long an exchange that has taken the connection is waited for. It takes the end of a connection for that of the
agent, and gives what it has kept for the agent to the first that comes: on a busy node none may be given up early."""
_ASKED_AHEAD = 8
"""The most pieces of one `read` that are asked for and have not come."""


@dataclass(frozen=True)
class GroupChanged:
    """A node has left the group: its run has ended. A newer value of `GroupLink.membership`."""

    membership: Membership


@dataclass(frozen=True)
class Encoded:
    """An order has come to its end, on this node.

    Without a failure all parities and the record are on the disks of all members. With one, which names the node, this
    generation is as it was before, or it has the record that is on other nodes already: the next order spreads it.
    """

    generation: GenerationId
    trial: int
    failure: str
    seconds: float
    bytes_sent: int
    """The bytes of blocks and sums that this node sent to others."""
    bytes_read: int
    """The bytes of the generation that this node read."""


Event = coding.AgentMessage | GroupChanged | Encoded | coding.AgentGone


class GroupLink:
    """A connection to the exchange of this node. One process has one at a time; a second one takes its place."""

    def __init__(self, node_dir: Path) -> None:
        """Connects; see `open`, which waits for the greeting as well. Raises OSError."""
        self._socket = ExchangeSocket(node_dir, self._note)
        self._events: deque[Event] = deque()
        self._answers: dict[int, coding.StoreAnswer] = {}
        self._asked: set[int] = set()
        self._ids = itertools.count(1)
        self._node: int | None = None
        self._membership: Membership | None = None

    @classmethod
    def open(cls, node_dir: Path, timeout_s: float) -> GroupLink:
        """Connects to the exchange whose node directory this is, and waits until it has said who is in the group.

        Raises LinkLost if there is none within the time, or one that does not greet; it may be tried again at any time.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                return cls._greeted(node_dir, max(GREETING_S, deadline - time.monotonic()))
            except (OSError, LinkLost) as error:
                if time.monotonic() >= deadline:
                    raise LinkLost(f"no exchange answers in {node_dir}: {error}") from None
                time.sleep(RETRY_S)

    @classmethod
    def _greeted(cls, node_dir: Path, timeout_s: float) -> GroupLink:
        link = cls(node_dir)
        try:
            if not link._socket.wait_until(lambda: link._membership is not None, timeout_s):
                raise LinkLost("the exchange says nothing")
        except BaseException:
            link.close()
            raise
        others = [event for event in link._events if not isinstance(event, GroupChanged)]
        link._events = deque(others)  # messages may have come with the greeting
        return link

    def close(self) -> None:
        """Closes the link. The other agents get AgentGone, orders that are under way fail."""
        self._socket.close()

    def fileno(self) -> int:
        """Returns the descriptor, for select. Events that came while something else was waited for do not show there:
        see `has_events`."""
        return self._socket.fileno()

    @property
    def has_events(self) -> bool:
        """Whether `events` returns something at once."""
        return bool(self._events)

    @property
    def node(self) -> int:
        """The index of this node among the nodes of the job."""
        assert self._node is not None
        return self._node

    @property
    def membership(self) -> Membership:
        """The latest membership that came: all nodes of the job, and which are there. A node that is there may have no
        agent yet; what is sent to it waits for one."""
        assert self._membership is not None
        return self._membership

    # ---- messages

    def send(self, node: int, message: bytes) -> None:
        """Sends a message of up to 64 KiB to the agent of another node, or of this one.

        Messages between two agents come whole, once, and in their order, as long as both exchanges and agents live.
        What is sent before the other agent has its link waits there. To a node that is not there it is lost, without
        an error. Raises LinkLost.
        """
        if len(message) > coding.MAX_TOLD_BYTES:
            raise ValueError(f"a message between agents has up to {coding.MAX_TOLD_BYTES} bytes, not {len(message)}")
        self._socket.send(coding.AgentMessage(node, message))

    def events(self, timeout_s: float) -> list[Event]:
        """Returns what has happened, in its order; waits if nothing has, and returns nothing after the time.

        Raises LinkLost once all that came before was returned.
        """
        if not self._events:
            self._socket.wait_until(lambda: bool(self._events), timeout_s)
        else:
            self._socket.take()
        found = list(self._events)
        self._events.clear()
        return found

    # ---- encoding

    def encode(self, order: EncodeOrder) -> None:
        """Has the exchanges of a group encode a generation; all agents of the group give the same order.

        Begins when all exchanges have it, and ends with one event Encoded on each node. Until then the generation must
        not be dropped. If any node has a record of this generation and group, it is spread and nothing is computed.
        Raises LinkLost.
        """
        self._socket.send(coding.Encode(**order.to_values()))

    # ---- files of other nodes

    def hold(self, key: str, directory: Path) -> None:
        """Lets other nodes read the generations below a directory of this node, by this key. Raises LinkLost."""
        self._socket.send(coding.Hold(key, str(directory)))

    def read(
        self,
        node: int,
        key: str,
        number: int,
        part: GenerationPart,
        offset: int,
        length: int,
        timeout_s: float = ANSWER_S,
    ) -> bytes:
        """Returns bytes of a file of a generation of another node, or of this one: fewer at the end of the file.

        Raises OSError: ENOENT if the node has no such file or holds no such key, EHOSTUNREACH if the node is not there
        or its agent has gone, ETIMEDOUT if nothing comes for the time. Raises LinkLost.
        """
        pieces = _pieces(offset, length)
        asked: deque[int] = deque()
        found: list[bytes] = []
        while pieces or asked:
            while pieces and len(asked) < _ASKED_AHEAD:
                start, size = pieces.popleft()
                asked.append(self.ask(node, key, number, part, start, size))
            found.append(self.answer(asked.popleft(), node, timeout_s))
        return b"".join(found)

    def ask(self, node: int, key: str, number: int, part: GenerationPart, offset: int, length: int) -> int:
        """Asks for up to 1 MiB of a file; `answer` gives it, later. Raises LinkLost."""
        return self._ask(coding.Read, node, key, number, part.value, offset, length)

    def answer(self, asked: int, node: int, timeout_s: float = ANSWER_S) -> bytes:
        """Returns what was asked for. Raises what `read` does."""
        return self._answer(asked, node, timeout_s).content

    def forget(self, asked: Iterable[int]) -> None:
        """Wants no answer any more to what was asked."""
        for one in asked:
            self._asked.discard(one)
            self._answers.pop(one, None)

    def size_bytes(self, node: int, key: str, number: int, part: GenerationPart, timeout_s: float = ANSWER_S) -> int:
        """Returns the size of a file of a generation of a node. Raises what `read` does."""
        asked = self._ask(coding.Read, node, key, number, part.value, 0, 0)
        return self._answer(asked, node, timeout_s).size_bytes

    def list(self, node: int, key: str, timeout_s: float = ANSWER_S) -> Sequence[int]:
        """Returns the committed generations of a node, oldest first. Raises what `read` does."""
        answer = self._answer(self._ask(coding.ListStore, node, key), node, timeout_s)
        try:
            return [int(number) for number in json.loads(answer.content)]
        except (ValueError, TypeError) as error:
            raise OSError(errno.EBADMSG, f"node {node} names no generations: {error}") from None

    # ---- the socket

    def _ask(self, kind: Callable[..., coding.Message], *values: object) -> int:
        asked = next(self._ids)
        self._asked.add(asked)
        self._socket.send(kind(asked, *values))
        return asked

    def _answer(self, asked: int, node: int, timeout_s: float) -> coding.StoreAnswer:
        came = self._socket.wait_until(lambda: asked in self._answers, timeout_s)
        self._asked.discard(asked)
        if not came:
            raise OSError(errno.ETIMEDOUT, f"node {node} does not answer")
        answer = self._answers.pop(asked)
        if answer.errno:
            raise OSError(answer.errno, answer.why or os.strerror(answer.errno))
        return answer

    def _note(self, message: coding.Message) -> None:
        if isinstance(message, coding.StoreAnswer):
            if message.id in self._asked:
                self._answers[message.id] = message
        elif isinstance(message, coding.AgentMessage | coding.AgentGone):
            self._events.append(message)
        elif isinstance(message, coding.Welcome):
            self._node = message.node
        elif isinstance(message, coding.Members):
            self._membership = Membership.unpack(message.packed)
            self._events.append(GroupChanged(self._membership))
        elif isinstance(message, coding.EncodeEnded):
            generation = GenerationId(message.number, message.attempt)
            facts = message.failure, message.seconds, message.bytes_sent, message.bytes_read
            self._events.append(Encoded(generation, message.trial, *facts))


def _pieces(offset: int, length: int) -> deque[tuple[int, int]]:
    starts = range(offset, offset + length, coding.MAX_PIECE_BYTES)
    return deque((start, min(coding.MAX_PIECE_BYTES, offset + length - start)) for start in starts)
