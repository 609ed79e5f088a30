"""Serves the keeper of this node: a service of the exchange.

Owns the connection to the keeper, who is told what, and the orders that are under way. What keepers say to each other
passes here unread. Encoding is done in a thread of the lowest priority, reads for others in another.
"""

from __future__ import annotations

import contextlib
import errno
import math
import time
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from hpcstage.exchange.coding import stores
from hpcstage.exchange.coding.pace import become_background
from hpcstage.exchange.coding.port import KeeperPort
from hpcstage.exchange.coding.stores import Found, Stores
from hpcstage.exchange.coding.wire import BlockHead, Word
from hpcstage.exchange.lane import Lane, Wake
from hpcstage.exchange.service import ExchangeService, Station
from hpcstage.exchange.transport.frames import BLOCK_TAG, WORD_TAG, FrameError, Sort
from hpcstage.exchange.transport.mpi import Mail
from hpcstage.protocol import coding

if TYPE_CHECKING:
    from hpcstage.exchange.coding.encoding import Encoding

MOST_HELD_BYTES = 32 << 20
"""The most bytes of messages that wait for a keeper which has not come."""
MOST_ENCODINGS = 8
"""The most orders that are under way at a time."""
READS_S = 0.05
"""The next read of a rebuild is expected for so long; meanwhile this node looks for it every _LOOK_S."""
_LOOK_S = 0.3e-3
_MOST_EARLY = 1024
_MOST_KNOWN = 1024


class CodingService(ExchangeService):
    """Serves one node's keeper, and the exchanges of other nodes."""

    sorts = (Sort.WORD, Sort.BLOCK)

    def __init__(self, station: Station) -> None:
        """Raises OSError."""
        super().__init__(station)
        self._node = station.daemon.hello.index
        self._port = KeeperPort()
        self._stores = Stores()
        self._wake = Wake()
        self._encoding_lane, self._reading_lane = Lane("encoding", self._wake, slow_s=0.0), Lane("serving", self._wake)
        self._encoding_lane.submit(become_background, lambda _: None)
        self._membership = station.membership
        self._read_at = -math.inf
        """When somebody read last."""
        self._held: deque[coding.KeeperMessage] = deque()
        self._held_bytes = 0
        self._asked: dict[tuple[int, int], int] = {}
        """The nodes that were asked, by the keeper's number and the id of its question."""
        self._encodings: dict[int, Encoding] = {}
        self._known: OrderedDict[int, None] = OrderedDict()
        """The digests of orders that were under way."""
        self._early: defaultdict[int, list[tuple[int, Word]]] = defaultdict(list)
        """Words about orders that the keeper has not given yet, by digest."""
        self._words: dict[str, Callable[[int, Word], None]] = {
            "tell": self._heard_tell,
            "gone": lambda node, _: self._port.send(coding.KeeperGone(node)),
            "read": self._heard_read,
            "list": self._heard_list,
            "answer": self._heard_answer,
        }

    # ---- the keeper

    def descriptors(self) -> Sequence[int]:
        """Returns what shows that the keeper said something, and what that work is done."""
        return () if self.station.ended else (self._port.fileno(), self._wake.fileno())

    def ready(self) -> None:
        """Takes what the keeper says."""
        self._wake.clear()
        if self.station.ended:
            return
        was_connected = self._port.is_connected
        for message in self._port.receive():
            self._obey(message)
        if was_connected and not self._port.is_connected:
            self._keeper_gone()
        was_connected = self._port.is_connected
        if self._port.accept():
            if was_connected:
                self._keeper_gone()
            self._welcome()

    def _welcome(self) -> None:
        self._encoding_lane.submit(_import_early, lambda _: None)
        self._port.send(coding.Welcome(self._node))
        self._port.send(coding.Members(self.station.membership.pack()))
        while self._held:
            self._port.send(self._held.popleft())
        self._held_bytes = 0

    def _keeper_gone(self) -> None:
        for encoding in list(self._encodings.values()):
            encoding.fail(f"the keeper of {encoding.name(encoding.place)} has gone")
        self._collect_ended()
        self._say_to_all(Word("gone", {}))

    def _obey(self, message: coding.FromKeeper) -> None:
        if isinstance(message, coding.Hold):
            self._stores.hold(message.key, message.directory)
        elif isinstance(message, coding.KeeperMessage):
            self._tell(message)
        elif isinstance(message, coding.Encode):
            self._encode(message)
        else:
            self._ask(message)

    def _tell(self, message: coding.KeeperMessage) -> None:
        if message.node == self._node:
            self._deliver(self._node, message.message)
        else:
            self._say(message.node, Word("tell", {}, message.message))

    def _deliver(self, node: int, message: bytes) -> None:
        if self._port.is_connected:
            self._port.send(coding.KeeperMessage(node, message))
            return
        self._held.append(coding.KeeperMessage(node, message))
        self._held_bytes += len(message)
        if self._held_bytes > MOST_HELD_BYTES:  # a keeper that never comes; who counted on it hears of it
            self._held.clear()
            self._held_bytes = 0
            self._say_to_all(Word("gone", {}))

    # ---- files

    def _ask(self, message: coding.Read | coding.ListStore) -> None:
        key = self._port.number, message.id
        values = {"keeper": key[0], "id": message.id, "key": message.key}
        kind = "list"
        if isinstance(message, coding.Read):
            kind = "read"
            places = {"part": message.part, "offset": message.offset, "length": message.length}
            values.update(number=message.number, **places)
        word = Word(kind, values)
        if message.node == self._node:
            self._words[kind](self._node, word)
            return
        self._asked[key] = message.node
        self._read_at = time.monotonic()
        if not self._say(message.node, word):
            self._unreachable(key)

    def _unreachable(self, key: tuple[int, int]) -> None:
        node = self._asked.pop(key)
        if key[0] == self._port.number:
            self._port.send(coding.StoreAnswer(key[1], errno.EHOSTUNREACH, f"node {node} is not in the group", 0, b""))

    def _heard_read(self, node: int, word: Word) -> None:
        where = word.number("number"), word.text("part"), word.number("offset"), word.number("length")
        self._serve(node, word, lambda store: stores.read(store, *where))

    def _heard_list(self, node: int, word: Word) -> None:
        self._serve(node, word, stores.listed)

    def _serve(self, node: int, word: Word, look: Callable[[Any], Found]) -> None:
        self._read_at = time.monotonic()
        store, key = self._stores.directory(word.text("key")), (word.number("keeper"), word.number("id"))
        then = partial(self._give, node, key)
        if store is None:
            then(Found(errno.ENOENT, f"node {self._node} holds nothing of that name"))
        else:
            self._reading_lane.submit(lambda: look(store), then)

    def _give(self, node: int, key: tuple[int, int], found: Found) -> None:
        if node == self._node:
            self._answer(key, found)
            return
        values = {"keeper": key[0], "id": key[1], "errno": found.errno, "why": found.why, "size": found.size_bytes}
        self._say(node, Word("answer", values, found.content))

    def _heard_answer(self, node: int, word: Word) -> None:
        key = word.number("keeper"), word.number("id")
        if self._asked.get(key) == node:
            del self._asked[key]
            self._answer(key, Found(word.number("errno"), word.text("why"), word.number("size"), word.body))

    def _answer(self, key: tuple[int, int], found: Found) -> None:
        if key[0] == self._port.number:
            self._port.send(coding.StoreAnswer(key[1], found.errno, found.why, found.size_bytes, found.content))

    # ---- orders

    def _encode(self, message: coding.Encode) -> None:
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
        if len(self._encodings) >= MOST_ENCODINGS:
            self._refuse(message, f"{MOST_ENCODINGS} generations are being encoded")
            return
        self._known[order.digest] = None
        while len(self._known) > _MOST_KNOWN:
            self._known.popitem(last=False)
        send = partial(self._send_member, order.nodes)
        encoding = self._encodings[order.digest] = Encoding(order, self._node, self._encoding_lane, send)
        for node in order.nodes:
            if node != self._node and self.station.place(node) is None:
                encoding.fail(f"{encoding.name(order.nodes.index(node))} is not in the group of nodes")
        for node, word in self._early.pop(order.digest, ()):
            self._about(encoding, node, word)
        self._collect_ended()

    def _refuse(self, message: coding.Encode, why: str) -> None:
        self._port.send(coding.EncodeEnded(message.number, message.attempt, message.trial, why, 0.0, 0, 0))

    def _send_member(self, nodes: tuple[int, ...], member: int, data: bytes | bytearray) -> None:
        place = self.station.place(nodes[member])
        if place is not None:
            self.station.post.send(memoryview(data), place, BLOCK_TAG if data[0] == Sort.BLOCK else WORD_TAG)

    def _about(self, encoding: Encoding, node: int, word: Word) -> None:
        if node not in encoding.order.nodes:
            raise FrameError(f"node {node} is no member of a group that it speaks of")
        encoding.hear(encoding.order.nodes.index(node), word)

    def _collect_ended(self) -> bool:
        ended = [digest for digest, encoding in self._encodings.items() if encoding.outcome is not None]
        for digest in ended:
            encoding = self._encodings.pop(digest)
            order, outcome = encoding.order, encoding.outcome
            assert outcome is not None
            number, attempt, facts = order.generation.number, order.generation.attempt, vars(outcome)
            self._port.send(coding.EncodeEnded(number, attempt, order.trial, **facts))
        return bool(ended)

    # ---- other exchanges

    def take(self, mail: Mail) -> None:
        """Takes what another exchange says, or blocks of a stripe."""
        node = self.station.nodes[mail.source]
        if mail.sort is Sort.BLOCK:
            head = BlockHead.unpack(mail.data)
            encoding = self._encodings.get(head.digest)
            if encoding is not None:
                encoding.block(head, mail.data)
            return
        word = Word.unpack(mail.data)
        if word.kind in self._words:
            self._words[word.kind](node, word)
            return
        from hpcstage.exchange.coding.encoding import KINDS

        if word.kind not in KINDS:
            raise FrameError(f"a word about checkpoints that nobody knows: {word.kind}")
        digest = word.number("digest")
        if digest in self._encodings:
            self._about(self._encodings[digest], node, word)
        elif digest not in self._known and not self.station.ended:
            self._early[digest].append((node, word))
            while sum(map(len, self._early.values())) > _MOST_EARLY:
                del self._early[next(iter(self._early))]

    def _heard_tell(self, node: int, word: Word) -> None:
        if not self.station.ended:
            self._deliver(node, word.body)

    def _say(self, node: int, word: Word) -> bool:
        """Says something to another node. Returns False if it is not there."""
        place = self.station.place(node)
        if place is None:
            return False
        self.station.post.send(word.pack(), place, WORD_TAG)
        return True

    def _say_to_all(self, word: Word) -> None:
        for node in self.station.membership.present:
            self._say(node, word)

    # ---- what there is to do

    def pump(self) -> bool:
        """Goes on with the orders, and hands over what is done."""
        moved = self._encoding_lane.collect() | self._reading_lane.collect()
        if self.station.membership is not self._membership:
            self._membership = self.station.membership
            self._port.send(coding.Members(self._membership.pack()))
        if self._encodings:
            now = time.monotonic()
            for encoding in self._encodings.values():
                moved |= encoding.pump(now, self.station.files_at)
            moved |= self._collect_ended()
        return moved

    def next_at(self) -> float:
        """Returns when an order goes on, or a read may come."""
        now = time.monotonic()
        look = now + _LOOK_S if now - self._read_at < READS_S else math.inf
        return min((look, *(encoding.next_at() for encoding in self._encodings.values())))

    def left(self, node: int) -> None:
        """Ends the orders of which a node was a member, and answers what it was asked."""
        for encoding in self._encodings.values():
            if node in encoding.order.nodes:
                encoding.fail(f"{encoding.name(encoding.order.nodes.index(node))} has left the group of nodes")
        self._collect_ended()
        for key in [key for key, asked in self._asked.items() if asked == node]:
            self._unreachable(key)

    def stop(self) -> None:
        """Ends all orders, and the link to the keeper."""
        for encoding in self._encodings.values():
            encoding.fail(f"the run has ended on {encoding.name(encoding.place)}")
        self._collect_ended()
        if self._port.is_connected:
            self._say_to_all(Word("gone", {}))
        self._port.close()


def _import_early() -> None:
    """Imports what an order needs: NumPy takes long, and the loop is not to wait for it."""
    with contextlib.suppress(ImportError):
        import hpcstage.exchange.coding.stripework  # noqa: F401
