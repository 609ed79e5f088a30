"""Owns the orders to encode that are under way on this node, and what others say of orders that have not come yet.

Carries messages between the thread of each order and the other members.
"""

from __future__ import annotations

from collections import defaultdict

from hpcstage.checkpoint.coding.erasurecode import NoErasureCode
from hpcstage.checkpoint.coding.stripes import Striping
from hpcstage.checkpoint.generations.files import GenerationId
from hpcstage.exchange.coding.encoding import Encoding
from hpcstage.exchange.coding.port import AgentPort
from hpcstage.exchange.coding.wire import Failed, OrderMessage, packed, read_head, say
from hpcstage.exchange.lane import Wake
from hpcstage.exchange.service import Station
from hpcstage.exchange.transport.frames import FrameError
from hpcstage.protocol.coding import Encode, EncodeEnded

MOST_ENCODINGS = 8
"""The most orders that are under way at a time."""
_MOST_EARLY = 1024
MOST_BLOCK_BYTES = 4 << 20
MOST_STRIPE_BYTES = 32 << 20
"""The most bytes of one message between two nodes: a block for each parity."""


class Encodings:
    """Begins and ends the orders of this node's agent. A thread that has something to send wakes `wake`."""

    def __init__(self, station: Station, port: AgentPort, wake: Wake) -> None:
        self._station = station
        self._node = station.daemon.hello.index
        self._port = port
        self._wake = wake
        self._under_way: dict[int, Encoding] = {}
        self._known: set[int] = set()
        """The digests of orders that were under way."""
        self._early: defaultdict[int, list[tuple[int, OrderMessage]]] = defaultdict(list)
        """Messages about orders that the agent has not given yet, by digest."""

    def begin(self, order: Encode) -> None:
        """Begins an order, or tells the agent why not."""
        if why := self._refusal(order):
            self._port.send(EncodeEnded(order.number, order.attempt, order.trial, why, 0.0, 0, 0))
            return
        self._known.add(order.digest)
        others = [one for one in self._under_way.values() if one.order.number == order.number]
        before = [one for one in others if one.is_alive()]
        encoding = Encoding(order, self._port.number, self._station, self._wake, before)
        self._under_way[order.digest] = encoding
        for node, told in self._early.pop(order.digest, ()):
            self._hear(encoding, node, told)
        for node, name in zip(order.nodes, order.names, strict=True):
            if node != self._node and self._station.place(node) is None:
                self._fail(encoding, f"{name} is not in the group of nodes")
        try:
            encoding.start()
        except RuntimeError as error:  # there may be no more threads
            encoding.failure = f"{order.names[encoding.place]}: {error}"
            self._fail(encoding, encoding.failure)

    def _refusal(self, order: Encode) -> str:
        """Says why an order is none; empty if it is one."""
        try:
            GenerationId(order.number, order.attempt)
            Striping(len(order.nodes), order.k, order.m, order.block_bytes)
        except (ValueError, NoErasureCode) as error:
            return str(error)
        if len(order.names) != len(order.nodes) or len(set(order.nodes)) != len(order.nodes):
            return "each member of a group has a name, and is named once"
        if order.block_bytes > MOST_BLOCK_BYTES or order.block_bytes * order.m > MOST_STRIPE_BYTES:
            return f"blocks of {order.block_bytes} bytes for {order.k}+{order.m} are too large to be sent"
        if self._node not in order.nodes:
            return f"node {self._node} is no member of the group"
        if order.digest in self._known:
            return "this order was given before: give it with a higher trial"
        if len(self._under_way) >= MOST_ENCODINGS:
            return f"{MOST_ENCODINGS} generations are being encoded"
        return ""

    # ---- the other members

    def hear(self, node: int, message: OrderMessage) -> None:
        """Takes what another node says of an order."""
        digest = message.digest
        if digest in self._under_way:
            self._hear(self._under_way[digest], node, message)
        elif digest not in self._known and not self._station.ended:
            self._early[digest].append((node, message))
            while sum(map(len, self._early.values())) > _MOST_EARLY:
                del self._early[next(iter(self._early))]

    def _hear(self, encoding: Encoding, node: int, message: OrderMessage | memoryview) -> None:
        if node not in encoding.order.nodes:
            raise FrameError(f"node {node} is no member of a group that it speaks of")
        encoding.inbox.put((encoding.order.nodes.index(node), message))

    def take_block(self, node: int, data: memoryview) -> None:
        """Takes a block of a stripe, or sums of it."""
        encoding = self._under_way.get(read_head(data)[1])
        if encoding is not None:
            self._hear(encoding, node, data)

    def pump(self) -> bool:
        """Sends what orders have to send, and tells the agent of those that have ended. Returns whether there was
        anything."""
        moved = False
        for digest, encoding in list(self._under_way.items()):
            failure, order = encoding.failure, encoding.order
            while encoding.outbox:
                place, message = encoding.outbox.popleft()
                moved = True
                say(self._station, order.nodes[place], message)
            if encoding.error is not None:
                raise encoding.error
            if failure is not None:
                moved = True
                del self._under_way[digest]
                facts = failure, encoding.seconds, encoding.bytes_sent, encoding.bytes_read
                if encoding.agent == self._port.number:
                    self._port.send(EncodeEnded(order.number, order.attempt, order.trial, *facts))
        return moved

    # ---- what ends orders

    def agent_gone(self) -> None:
        """Ends all orders, since their agent has gone."""
        for encoding in self._under_way.values():
            self._fail(encoding, f"the checkpoint agent of {encoding.order.names[encoding.place]} has gone")

    def stop(self) -> None:
        """Ends all orders, since the run of this node has ended."""
        for encoding in self._under_way.values():
            self._fail(encoding, f"the run has ended on {encoding.order.names[encoding.place]}")

    def left(self, node: int) -> None:
        """Ends the orders of which a node was a member."""
        for encoding in self._under_way.values():
            if node in encoding.order.nodes:
                name = encoding.order.names[encoding.order.nodes.index(node)]
                self._fail(encoding, f"{name} has left the group of nodes")

    def _fail(self, encoding: Encoding, why: str) -> None:
        """Ends an order: at once at the other members, here as soon as its thread listens."""
        message = Failed(encoding.order.digest, why)
        for node in encoding.order.nodes:
            if node != self._node:
                say(self._station, node, packed(message))
        encoding.inbox.put((encoding.place, message))
