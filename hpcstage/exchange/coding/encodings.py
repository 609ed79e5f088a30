"""Owns the orders to encode that are under way on this node, and what others say of orders that have not come yet.

NumPy is imported when the first order comes: it takes long, and many exchanges never encode.
"""

from __future__ import annotations

import math
import time
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from hpcstage.exchange.coding.port import AgentPort
from hpcstage.exchange.coding.wire import BlockHead, ExchangeMessage
from hpcstage.exchange.lane import Lane
from hpcstage.exchange.service import Station
from hpcstage.exchange.transport.frames import BLOCK_TAG, CODING_TAG, FrameError, Sort
from hpcstage.protocol import coding

if TYPE_CHECKING:
    from hpcstage.checkpoint.protection.orders import EncodeOrder
    from hpcstage.exchange.coding.encoding import Encoding

MOST_ENCODINGS = 8
"""The most orders that are under way at a time."""
_MOST_EARLY = 1024
_MOST_KNOWN = 1024


class Encodings:
    """Begins, carries on and ends the orders of this node's agent. Encoding runs on `lane`."""

    def __init__(self, station: Station, port: AgentPort, lane: Lane) -> None:
        self._station = station
        self._node = station.daemon.hello.index
        self._port = port
        self._lane = lane
        self._under_way: dict[int, Encoding] = {}
        self._known: OrderedDict[int, None] = OrderedDict()
        """The digests of orders that were under way."""
        self._early: defaultdict[int, list[tuple[int, ExchangeMessage]]] = defaultdict(list)
        """Messages about orders that the agent has not given yet, by digest."""

    def begin(self, message: coding.Encode) -> None:
        """Begins an order, or tells the agent why not."""
        try:
            from hpcstage.checkpoint.protection.orders import EncodeOrder, NoOrder
            from hpcstage.exchange.coding.encoding import Encoding
        except ImportError as error:
            self._refuse(message, f"{error.name} cannot be imported")
            return
        try:
            order = EncodeOrder.from_values(vars(message))
            if self._node not in order.nodes:
                raise NoOrder(f"node {self._node} is no member of the group")
        except NoOrder as error:
            self._refuse(message, str(error))
            return
        if order.digest in self._known:
            self._refuse(message, "this order was given before: give it with a higher trial")
            return
        if len(self._under_way) >= MOST_ENCODINGS:
            self._refuse(message, f"{MOST_ENCODINGS} generations are being encoded")
            return
        self._known[order.digest] = None
        while len(self._known) > _MOST_KNOWN:
            self._known.popitem(last=False)
        self._start(Encoding(order, self._node, self._lane, partial(self._send_member, order.nodes)), order)

    def _start(self, encoding: Encoding, order: EncodeOrder) -> None:
        self._under_way[order.digest] = encoding
        for node in order.nodes:
            if node != self._node and self._station.place(node) is None:
                encoding.fail(f"{encoding.name(order.nodes.index(node))} is not in the group of nodes")
        for node, message in self._early.pop(order.digest, ()):
            _hear(encoding, node, message)
        self._collect_ended()

    def _refuse(self, message: coding.Encode, why: str) -> None:
        self._port.send(coding.EncodeEnded(message.number, message.attempt, message.trial, why, 0.0, 0, 0))

    def _send_member(self, nodes: tuple[int, ...], member: int, data: bytes | bytearray) -> None:
        place = self._station.place(nodes[member])
        if place is not None:
            self._station.post.send(memoryview(data), place, BLOCK_TAG if data[0] == Sort.BLOCK else CODING_TAG)

    def hear(self, node: int, message: ExchangeMessage) -> None:
        """Takes what another node says of an order."""
        from hpcstage.exchange.coding.encoding import KINDS

        if message.kind not in KINDS:
            raise FrameError(f"a message about checkpoints that nobody knows: {message.kind}")
        digest = message.number("digest")
        if digest in self._under_way:
            _hear(self._under_way[digest], node, message)
        elif digest not in self._known and not self._station.ended:
            self._early[digest].append((node, message))
            while sum(map(len, self._early.values())) > _MOST_EARLY:
                del self._early[next(iter(self._early))]

    def take_block(self, data: memoryview) -> None:
        """Takes a block of a stripe, or sums of it."""
        head = BlockHead.unpack(data)
        encoding = self._under_way.get(head.digest)
        if encoding is not None:
            encoding.block(head, data)

    def pump(self) -> bool:
        """Goes on with the orders. Returns whether anything was done."""
        if not self._under_way:
            return False
        now, moved = time.monotonic(), False
        for encoding in self._under_way.values():
            moved |= encoding.pump(now, self._station.files_at)
        return self._collect_ended() or moved

    def next_at(self) -> float:
        """Returns when an order goes on."""
        return min((encoding.next_at() for encoding in self._under_way.values()), default=math.inf)

    def fail(self, why: Callable[[str], str]) -> None:
        """Ends all orders; `why` says so of this node, whose name it gets."""
        for encoding in list(self._under_way.values()):
            encoding.fail(why(encoding.name(encoding.place)))
        self._collect_ended()

    def left(self, node: int) -> None:
        """Ends the orders of which a node was a member."""
        for encoding in self._under_way.values():
            if node in encoding.order.nodes:
                encoding.fail(f"{encoding.name(encoding.order.nodes.index(node))} has left the group of nodes")
        self._collect_ended()

    def _collect_ended(self) -> bool:
        ended = [digest for digest, encoding in self._under_way.items() if encoding.outcome is not None]
        for digest in ended:
            encoding = self._under_way.pop(digest)
            order, outcome = encoding.order, encoding.outcome
            assert outcome is not None
            number, attempt, facts = order.generation.number, order.generation.attempt, vars(outcome)
            self._port.send(coding.EncodeEnded(number, attempt, order.trial, **facts))
        return bool(ended)


def _hear(encoding: Encoding, node: int, message: ExchangeMessage) -> None:
    if node not in encoding.order.nodes:
        raise FrameError(f"node {node} is no member of a group that it speaks of")
    encoding.hear(encoding.order.nodes.index(node), message)
