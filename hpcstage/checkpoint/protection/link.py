"""The agent's side of the connection to the exchange of its node: messages, orders to encode, questions to other nodes.

Owns what has come and was not asked for yet. Whatever comes is taken in while the agent waits for something, and
`fileno` tells select when something has come. All waits end; there are no threads.

An exchange goes when any other exchange of the job goes, and is started anew a moment later: LinkLost is raised then,
and the agent opens another link, which has a membership of a higher generation. What was under way has failed: orders
are given again with a higher trial, messages are told again.
"""

from __future__ import annotations

import errno
import itertools
import os
import socket
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from hpcstage import localsocket
from hpcstage.checkpoint.generations.files import GenerationId
from hpcstage.checkpoint.protection.exchangesocket import ExchangeSocket, LinkLost
from hpcstage.checkpoint.protection.orders import EncodeOrder
from hpcstage.protocol import coding
from hpcstage.protocol.membership import Membership
from hpcstage.reading import readable, writable

ANSWER_S = 30.0
"""How long an answer of another node is waited for."""
GREETING_S = 5.0
"""How long an exchange that has taken the connection is waited for. It takes the end of a connection for that of the
agent, and gives what it has kept for the agent to the first that comes: on a busy node none may be given up early."""
SEND_S = 30.0
RETRY_S = 0.02


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
    """A connection to the exchange of this node. One process has one at a time; a second one takes its place. One that
    `reads` has its own place beside that of the agent, and can ask only."""

    def __init__(self, node_dir: Path, *, reads: bool = False) -> None:
        """Connects; see `open`, which waits for the greeting as well. Raises OSError."""
        self._socket = ExchangeSocket(_connected(node_dir, coding.READERS if reads else coding.SOCK))
        self._events: deque[Event] = deque()
        self._answers: dict[int, coding.StoreAnswer] = {}
        self._asked: set[int] = set()
        self._ids = itertools.count(int.from_bytes(os.urandom(6), "little"))  # no two agents ask with one id
        self._node: int | None = None
        self._membership: Membership | None = None

    @classmethod
    def open(cls, node_dir: Path, timeout_s: float, *, reads: bool = False) -> GroupLink:
        """Connects to the exchange whose node directory this is, and waits until it has said who is in the group.

        Raises LinkLost if there is none within the time, or one that does not greet; it may be tried again at any time.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                return cls._greeted(cls(node_dir, reads=reads), max(GREETING_S, deadline - time.monotonic()))
            except (OSError, LinkLost) as error:
                if time.monotonic() >= deadline:
                    raise LinkLost(f"no exchange answers in {node_dir}: {error}") from None
                time.sleep(RETRY_S)

    @staticmethod
    def _greeted(link: GroupLink, timeout_s: float) -> GroupLink:
        try:
            if not link._wait_until(lambda: link._membership is not None, timeout_s):
                raise LinkLost("the exchange says nothing")
        except BaseException:
            link.close()
            raise
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
        self._send(coding.AgentMessage(node, message))

    def events(self, timeout_s: float) -> list[Event]:
        """Returns what has happened, in its order; waits if nothing has, and returns nothing after the time.

        Raises LinkLost once all that came before was returned.
        """
        if not self._events:
            self._wait_until(lambda: bool(self._events), timeout_s)
        else:
            self._take()
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
        self._send(order.message())

    # ---- files of other nodes

    def hold(self, key: str, directory: Path) -> None:
        """Lets other nodes read the generations below a directory of this node, by this key. Raises LinkLost."""
        self._send(coding.Hold(key, str(directory)))

    def ask(self, question: coding.Read | coding.ListStore) -> int:
        """Asks a node, which may be this one; returns the id, which the question gets here, for `answer`. Raises
        LinkLost."""
        asked = next(self._ids)
        self._asked.add(asked)
        self._send(replace(question, id=asked))
        return asked

    def answer(self, asked: int, node: int, timeout_s: float = ANSWER_S) -> coding.StoreAnswer:
        """Returns what was asked for.

        Raises OSError: ENOENT if the node has no such file or holds no such key, EHOSTUNREACH if the node is not there
        or its agent has gone, ETIMEDOUT if nothing comes for the time. Raises LinkLost.
        """
        came = self._wait_until(lambda: asked in self._answers, timeout_s)
        self._asked.discard(asked)
        if not came:
            raise OSError(errno.ETIMEDOUT, f"node {node} does not answer")
        answer = self._answers.pop(asked)
        if answer.errno:
            raise OSError(answer.errno, answer.why or os.strerror(answer.errno))
        return answer

    def forget(self, asked: Iterable[int]) -> None:
        """Wants no answer any more to what was asked."""
        for one in asked:
            self._asked.discard(one)
            self._answers.pop(one, None)

    # ---- the socket

    def _send(self, message: coding.FromAgent) -> None:
        """Sends a message; waits while the exchange takes none. Raises LinkLost."""
        self._check()
        self._socket.send(message)
        deadline = time.monotonic() + SEND_S
        while self._socket.unsent_bytes:
            is_late = time.monotonic() >= deadline
            if not writable(self._socket.fileno(), 0.0 if is_late else RETRY_S) and is_late:
                self._socket.gone = "it takes no more messages"
            self._take()
            self._check()

    def _wait_until(self, is_done: Callable[[], bool], timeout_s: float) -> bool:
        """Takes in what comes until something is so; returns False after the time. Raises LinkLost."""
        deadline = time.monotonic() + timeout_s
        self._take()
        while not is_done():
            self._check()
            left_s = deadline - time.monotonic()
            if left_s <= 0 or not readable([self._socket.fileno()], left_s):
                return False
            self._take()
        return True

    def _check(self) -> None:
        if self._socket.gone:
            raise LinkLost(f"the exchange of this node: {self._socket.gone}")

    def _take(self) -> None:
        for message in self._socket.receive():
            self._note(message)

    def _note(self, message: coding.Message) -> None:
        if isinstance(message, coding.StoreAnswer):
            if message.id in self._asked:
                self._answers[message.id] = message
        elif isinstance(message, coding.AgentMessage | coding.AgentGone):
            self._events.append(message)
        elif isinstance(message, coding.Welcome):
            self._node = message.node
        elif isinstance(message, coding.Members):
            before, self._membership = self._membership, Membership.unpack(message.packed)
            if before is not None:
                self._events.append(GroupChanged(self._membership))
        elif isinstance(message, coding.EncodeEnded):
            generation = GenerationId(message.number, message.attempt)
            facts = message.failure, message.seconds, message.bytes_sent, message.bytes_read
            self._events.append(Encoded(generation, message.trial, *facts))


def _connected(node_dir: Path, name: str) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        localsocket.connect(connection, node_dir, name)
    except BaseException:
        connection.close()
        raise
    return connection
