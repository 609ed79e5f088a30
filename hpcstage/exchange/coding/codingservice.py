"""Serves the agent of this node: a service of the exchange.

Owns the connections to the agent and to a process that reads for it, and the messages that agents tell each other,
which pass here unread. What they ask of other nodes is `questions`, what agents order is `encodings`.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Sequence

from hpcstage.exchange.coding.encodings import Encodings
from hpcstage.exchange.coding.port import AgentPort
from hpcstage.exchange.coding.questions import Questions
from hpcstage.exchange.coding.wire import packed, say, unpacked
from hpcstage.exchange.lane import Lane, Wake
from hpcstage.exchange.service import ExchangeService, Station
from hpcstage.exchange.transport.frames import Sort
from hpcstage.exchange.transport.mpi import Mail
from hpcstage.protocol import coding

MOST_HELD_BYTES = 32 << 20
"""The most bytes of messages that wait for an agent which has not come."""


class CodingService(ExchangeService):
    """Serves one node's agent, and the exchanges of other nodes."""

    sorts = (Sort.CODING, Sort.BLOCK)

    def __init__(self, station: Station) -> None:
        """Raises OSError."""
        super().__init__(station)
        self._node = station.daemon.hello.index
        self._port = AgentPort()
        self._readers = AgentPort(coding.READERS)
        self._wake = Wake()
        self._lane = Lane("serving", self._wake)
        self._encodings = Encodings(station, self._port, self._wake)
        self._questions = Questions(station, self._lane)
        self._membership = station.membership
        self._agent = 0
        """The number of the agent that was welcomed and has not gone; 0: there is none."""
        self._held: deque[coding.AgentMessage] = deque()
        self._held_bytes = 0

    # ---- the agent

    def descriptors(self) -> Sequence[int]:
        """Returns what shows that the agent said something, and that work is done."""
        ports = self._port.fileno(), self._readers.fileno()
        return () if self.station.ended else (*ports, self._wake.fileno())

    def ready(self) -> None:
        """Takes what the agent says."""
        self._wake.clear()
        if self.station.ended:
            return
        for message in self._port.receive():
            self._obey(message)
        for message in self._readers.receive():
            if isinstance(message, coding.Read | coding.ListStore):
                self._questions.ask(message, self._readers)
        self._port.accept()
        before = self._readers.number
        self._readers.accept()
        if self._readers.number > before:
            self._greet(self._readers)
        self._follow()

    def _follow(self) -> None:
        """Says that the agent has gone, and welcomes another one."""
        agent = self._port.number if self._port.is_connected else 0
        if agent == self._agent:
            return
        if self._agent:
            self._encodings.agent_gone()
            self._say_gone()
        self._agent = agent
        if agent:
            self._welcome()

    def _welcome(self) -> None:
        with contextlib.suppress(RuntimeError):  # there may be no more threads
            threading.Thread(target=_import_early, name="importing", daemon=True).start()
        self._greet(self._port)
        while self._held:
            self._port.send(self._held.popleft())
        self._held_bytes = 0

    def _greet(self, port: AgentPort) -> None:
        port.send(coding.Welcome(self._node))
        port.send(coding.Members(self.station.membership.pack()))

    def _say_gone(self) -> None:
        for node in self.station.membership.present:
            say(self.station, node, packed(coding.AgentGone(self._node)))

    def _obey(self, message: coding.FromAgent) -> None:
        if isinstance(message, coding.Hold):
            self._questions.hold(message)
        elif isinstance(message, coding.Encode):
            self._encodings.begin(message)
        elif isinstance(message, coding.Read | coding.ListStore):
            self._questions.ask(message, self._port)
        elif message.node == self._node:
            self._deliver(message)
        else:
            say(self.station, message.node, packed(message))

    def _deliver(self, message: coding.AgentMessage) -> None:
        """Gives this node's agent what an agent told; `message` names the node of that one."""
        if self._port.is_connected:
            self._port.send(message)
            return
        self._held.append(message)
        self._held_bytes += len(message.message)
        if self._held_bytes > MOST_HELD_BYTES:  # an agent that never comes; who counted on it hears of it
            self._held.clear()
            self._held_bytes = 0
            self._say_gone()

    # ---- other exchanges

    def take(self, mail: Mail) -> None:
        """Takes what another exchange says, or blocks of a stripe."""
        node = self.station.nodes[mail.source]
        if mail.sort is Sort.BLOCK:
            self._encodings.take_block(node, mail.data)
            return
        message = unpacked(mail.data)
        if isinstance(message, coding.AgentMessage):
            if not self.station.ended:
                self._deliver(coding.AgentMessage(node, message.message))
        elif isinstance(message, coding.AgentGone):
            self._port.send(coding.AgentGone(node))
        elif isinstance(message, coding.Read | coding.ListStore):
            self._questions.serve(node, message)
        elif isinstance(message, coding.StoreAnswer):
            self._questions.answered(node, message)
        else:
            self._encodings.hear(node, message)

    # ---- what there is to do

    def pump(self) -> bool:
        """Goes on with the orders, and hands over what was read."""
        self._follow()
        if self.station.membership is not self._membership:
            self._membership = self.station.membership
            self._port.send(coding.Members(self._membership.pack()))
        return self._encodings.pump() | self._lane.collect()

    def next_at(self) -> float:
        """Returns when a read may come."""
        return self._questions.next_at()

    def left(self, node: int) -> None:
        """Ends the orders of which a node was a member, and answers what it was asked."""
        self._encodings.left(node)
        self._questions.left(node)

    def stop(self) -> None:
        """Ends all orders, and the links to the agent and who reads for it."""
        self._encodings.stop()
        self._port.close()
        self._readers.close()
        self._follow()


def _import_early() -> None:
    """Imports what orders and reads need: NumPy takes long, and the loop is not to wait for it."""
    with contextlib.suppress(ImportError):
        import hpcstage.exchange.coding.stripework  # noqa: F401
