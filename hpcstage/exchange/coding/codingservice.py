"""Serves the agent of this node: a service of the exchange.

Owns the connection to the agent, and the messages that agents tell each other, which pass here unread. Encoding is
done in a thread of the lowest priority (`encodings`), reads for others in another (`questions`).
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Sequence

from hpcstage.exchange.coding.encodings import Encodings
from hpcstage.exchange.coding.pace import become_background
from hpcstage.exchange.coding.port import AgentPort
from hpcstage.exchange.coding.questions import Questions
from hpcstage.exchange.coding.wire import ExchangeMessage
from hpcstage.exchange.lane import Lane, Wake
from hpcstage.exchange.service import ExchangeService, Station
from hpcstage.exchange.transport.frames import CODING_TAG, Sort
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
        self._wake = Wake()
        self._encoding_lane, self._reading_lane = Lane("encoding", self._wake, slow_s=0.0), Lane("serving", self._wake)
        self._encoding_lane.submit(become_background, lambda _: None)
        self._encodings = Encodings(station, self._port, self._encoding_lane)
        self._questions = Questions(self._node, self._port, self._reading_lane, self._say)
        self._membership = station.membership
        self._held: deque[coding.AgentMessage] = deque()
        self._held_bytes = 0
        self._by_kind: dict[str, Callable[[int, ExchangeMessage], None]] = {
            "tell": self._heard_tell,
            "gone": lambda node, _: self._port.send(coding.AgentGone(node)),
            **self._questions.by_kind,
        }

    # ---- the agent

    def descriptors(self) -> Sequence[int]:
        """Returns what shows that the agent said something, and what that work is done."""
        return () if self.station.ended else (self._port.fileno(), self._wake.fileno())

    def ready(self) -> None:
        """Takes what the agent says."""
        self._wake.clear()
        if self.station.ended:
            return
        was_connected = self._port.is_connected
        for message in self._port.receive():
            self._take(message)
        if was_connected and not self._port.is_connected:
            self._agent_gone()
        was_connected = self._port.is_connected
        if self._port.accept():
            if was_connected:
                self._agent_gone()
            self._welcome()

    def _welcome(self) -> None:
        self._encoding_lane.submit(_import_early, lambda _: None)
        self._port.send(coding.Welcome(self._node))
        self._port.send(coding.Members(self.station.membership.pack()))
        while self._held:
            self._port.send(self._held.popleft())
        self._held_bytes = 0

    def _agent_gone(self) -> None:
        self._encodings.fail(lambda name: f"the checkpoint agent of {name} has gone")
        self._say_to_all(ExchangeMessage("gone", {}))

    def _take(self, message: coding.FromAgent) -> None:
        if isinstance(message, coding.Hold):
            self._questions.hold(message)
        elif isinstance(message, coding.AgentMessage):
            self._tell(message)
        elif isinstance(message, coding.Encode):
            self._encodings.begin(message)
        else:
            self._questions.ask(message)

    def _tell(self, message: coding.AgentMessage) -> None:
        if message.node == self._node:
            self._deliver(message)
        else:
            self._say(message.node, ExchangeMessage("tell", {}, message.message))

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
            self._say_to_all(ExchangeMessage("gone", {}))

    # ---- other exchanges

    def take(self, mail: Mail) -> None:
        """Takes what another exchange says, or blocks of a stripe."""
        if mail.sort is Sort.BLOCK:
            self._encodings.take_block(mail.data)
            return
        node, message = self.station.nodes[mail.source], ExchangeMessage.unpack(mail.data)
        if message.kind in self._by_kind:
            self._by_kind[message.kind](node, message)
        else:
            self._encodings.hear(node, message)

    def _heard_tell(self, node: int, message: ExchangeMessage) -> None:
        if not self.station.ended:
            self._deliver(coding.AgentMessage(node, message.body))

    def _say(self, node: int, message: ExchangeMessage) -> bool:
        """Says something to another node. Returns False if it is not there."""
        place = self.station.place(node)
        if place is None:
            return False
        self.station.post.send(message.pack(), place, CODING_TAG)
        return True

    def _say_to_all(self, message: ExchangeMessage) -> None:
        for node in self.station.membership.present:
            self._say(node, message)

    # ---- what there is to do

    def pump(self) -> bool:
        """Goes on with the orders, and hands over what is done."""
        moved = self._encoding_lane.collect() | self._reading_lane.collect()
        if self.station.membership is not self._membership:
            self._membership = self.station.membership
            self._port.send(coding.Members(self._membership.pack()))
        return self._encodings.pump() | moved

    def next_at(self) -> float:
        """Returns when an order goes on, or a read may come."""
        return min(self._questions.next_at(), self._encodings.next_at())

    def left(self, node: int) -> None:
        """Ends the orders of which a node was a member, and answers what it was asked."""
        self._encodings.left(node)
        self._questions.left(node)

    def stop(self) -> None:
        """Ends all orders, and the link to the agent."""
        self._encodings.fail(lambda name: f"the run has ended on {name}")
        if self._port.is_connected:
            self._say_to_all(ExchangeMessage("gone", {}))
        self._port.close()


def _import_early() -> None:
    """Imports what an order needs: NumPy takes long, and the loop is not to wait for it."""
    with contextlib.suppress(ImportError):
        import hpcstage.exchange.coding.stripework  # noqa: F401
