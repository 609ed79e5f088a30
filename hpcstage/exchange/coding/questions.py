"""Asks other nodes for what their agents hold, and answers what they ask: ranges of files, lists of generations.

Owns the questions of this node's agent that are open, and the directories that it lets others read. A question that
cannot be answered any more is answered with an error.
"""

from __future__ import annotations

import errno
import math
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from hpcstage.exchange.coding import stores
from hpcstage.exchange.coding.port import AgentPort
from hpcstage.exchange.coding.stores import Found, HeldGenerations
from hpcstage.exchange.coding.wire import ExchangeMessage
from hpcstage.exchange.lane import Lane
from hpcstage.protocol import coding

READS_S = 0.05
"""The next read of a rebuild is expected for so long; meanwhile this node looks for it every _LOOK_S."""
_LOOK_S = 0.3e-3
_Key = tuple[int, int]
"""The number of an agent, and the id of its question."""


class Questions:
    """Owns what is asked, of this node and by it. Reads run on `lane`."""

    def __init__(self, node: int, port: AgentPort, lane: Lane, say: Callable[[int, ExchangeMessage], bool]) -> None:
        """`say` says something to another node, and returns False if it is not there."""
        self._node = node
        self._port = port
        self._lane = lane
        self._say = say
        self._stores = HeldGenerations()
        self._read_at = -math.inf
        """When somebody read last."""
        self._asked: dict[_Key, int] = {}
        """The nodes that were asked."""
        self.by_kind: dict[str, Callable[[int, ExchangeMessage], None]] = {
            "read": self._heard_read,
            "list": self._heard_list,
            "answer": self._heard_answer,
        }
        """By the kind of another node's message: what takes it."""

    def hold(self, message: coding.Hold) -> None:
        """Lets other nodes read a directory of this node's agent."""
        self._stores.hold(message.key, message.directory)

    def ask(self, message: coding.Read | coding.ListStore) -> None:
        """Asks a node what the agent wants to know; it may be this one."""
        key = self._port.number, message.id
        values = {"agent": key[0], "id": message.id, "key": message.key}
        kind = "list"
        if isinstance(message, coding.Read):
            kind = "read"
            places = {"part": message.part, "offset": message.offset, "length": message.length}
            values.update(number=message.number, **places)
        told = ExchangeMessage(kind, values)
        if message.node == self._node:
            self.by_kind[kind](self._node, told)
            return
        self._asked[key] = message.node
        self._read_at = time.monotonic()
        if not self._say(message.node, told):
            self._unreachable(key)

    def left(self, node: int) -> None:
        """Answers what a node was asked that is not there any more."""
        for key in [key for key, asked in self._asked.items() if asked == node]:
            self._unreachable(key)

    def next_at(self) -> float:
        """Returns when a read may come."""
        now = time.monotonic()
        return now + _LOOK_S if now - self._read_at < READS_S else math.inf

    def _unreachable(self, key: _Key) -> None:
        self._answer(key, Found(errno.EHOSTUNREACH, f"node {self._asked.pop(key)} is not in the group"))

    def _heard_read(self, node: int, message: ExchangeMessage) -> None:
        where = message.number("number"), message.text("part"), message.number("offset"), message.number("length")
        self._serve(node, message, lambda store: stores.read(store, *where))

    def _heard_list(self, node: int, message: ExchangeMessage) -> None:
        self._serve(node, message, stores.listed)

    def _serve(self, node: int, message: ExchangeMessage, look: Callable[[Any], Found]) -> None:
        self._read_at = time.monotonic()
        store, key = self._stores.directory(message.text("key")), (message.number("agent"), message.number("id"))
        then = partial(self._give, node, key)
        if store is None:
            then(Found(errno.ENOENT, f"node {self._node} holds nothing of that name"))
        else:
            self._lane.submit(lambda: look(store), then)

    def _give(self, node: int, key: _Key, found: Found) -> None:
        if node == self._node:
            self._answer(key, found)
            return
        values = {"agent": key[0], "id": key[1], "errno": found.errno, "why": found.why, "size": found.size_bytes}
        self._say(node, ExchangeMessage("answer", values, found.content))

    def _heard_answer(self, node: int, message: ExchangeMessage) -> None:
        key = message.number("agent"), message.number("id")
        if self._asked.get(key) == node:
            del self._asked[key]
            self._answer(key, Found(message.number("errno"), message.text("why"), message.number("size"), message.body))

    def _answer(self, key: _Key, found: Found) -> None:
        if key[0] == self._port.number:
            self._port.send(coding.StoreAnswer(key[1], found.errno, found.why, found.size_bytes, found.content))
