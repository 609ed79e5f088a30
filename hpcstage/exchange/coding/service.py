"""Serves the keeper of this node: a service of the exchange.

Owns the connection to the keeper, and the messages that keepers tell each other, which pass here unread. Encoding is
done in a thread of the lowest priority (`encodings`), reads for others in another (`questions`).
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Sequence

from hpcstage.exchange.coding.encodings import Encodings
from hpcstage.exchange.coding.pace import become_background
from hpcstage.exchange.coding.port import KeeperPort
from hpcstage.exchange.coding.questions import Questions
from hpcstage.exchange.coding.wire import Word
from hpcstage.exchange.lane import Lane, Wake
from hpcstage.exchange.service import ExchangeService, Station
from hpcstage.exchange.transport.frames import WORD_TAG, Sort
from hpcstage.exchange.transport.mpi import Mail
from hpcstage.protocol import coding

MOST_HELD_BYTES = 32 << 20
"""The most bytes of messages that wait for a keeper which has not come."""


class CodingService(ExchangeService):
    """Serves one node's keeper, and the exchanges of other nodes."""

    sorts = (Sort.WORD, Sort.BLOCK)

    def __init__(self, station: Station) -> None:
        """Raises OSError."""
        super().__init__(station)
        self._node = station.daemon.hello.index
        self._port = KeeperPort()
        self._wake = Wake()
        self._encoding_lane, self._reading_lane = Lane("encoding", self._wake, slow_s=0.0), Lane("serving", self._wake)
        self._encoding_lane.submit(become_background, lambda _: None)
        self._encodings = Encodings(station, self._port, self._encoding_lane)
        self._questions = Questions(self._node, self._port, self._reading_lane, self._say)
        self._membership = station.membership
        self._held: deque[coding.KeeperMessage] = deque()
        self._held_bytes = 0
        self._words: dict[str, Callable[[int, Word], None]] = {
            "tell": self._heard_tell,
            "gone": lambda node, _: self._port.send(coding.KeeperGone(node)),
            **self._questions.words,
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
            self._take(message)
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
        self._encodings.fail(lambda name: f"the keeper of {name} has gone")
        self._say_to_all(Word("gone", {}))

    def _take(self, message: coding.FromKeeper) -> None:
        if isinstance(message, coding.Hold):
            self._questions.hold(message)
        elif isinstance(message, coding.KeeperMessage):
            self._tell(message)
        elif isinstance(message, coding.Encode):
            self._encodings.begin(message)
        else:
            self._questions.ask(message)

    def _tell(self, message: coding.KeeperMessage) -> None:
        if message.node == self._node:
            self._deliver(message)
        else:
            self._say(message.node, Word("tell", {}, message.message))

    def _deliver(self, message: coding.KeeperMessage) -> None:
        """Gives this node's keeper what a keeper told; `message` names the node of that one."""
        if self._port.is_connected:
            self._port.send(message)
            return
        self._held.append(message)
        self._held_bytes += len(message.message)
        if self._held_bytes > MOST_HELD_BYTES:  # a keeper that never comes; who counted on it hears of it
            self._held.clear()
            self._held_bytes = 0
            self._say_to_all(Word("gone", {}))

    # ---- other exchanges

    def take(self, mail: Mail) -> None:
        """Takes what another exchange says, or blocks of a stripe."""
        if mail.sort is Sort.BLOCK:
            self._encodings.take_block(mail.data)
            return
        node, word = self.station.nodes[mail.source], Word.unpack(mail.data)
        if word.kind in self._words:
            self._words[word.kind](node, word)
        else:
            self._encodings.hear(node, word)

    def _heard_tell(self, node: int, word: Word) -> None:
        if not self.station.ended:
            self._deliver(coding.KeeperMessage(node, word.body))

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
        return self._encodings.pump() | moved

    def next_at(self) -> float:
        """Returns when an order goes on, or a read may come."""
        return min(self._questions.next_at(), self._encodings.next_at())

    def left(self, node: int) -> None:
        """Ends the orders of which a node was a member, and answers what it was asked."""
        self._encodings.left(node)
        self._questions.left(node)

    def stop(self) -> None:
        """Ends all orders, and the link to the keeper."""
        self._encodings.fail(lambda name: f"the run has ended on {name}")
        if self._port.is_connected:
            self._say_to_all(Word("gone", {}))
        self._port.close()


def _import_early() -> None:
    """Imports what an order needs: NumPy takes long, and the loop is not to wait for it."""
    with contextlib.suppress(ImportError):
        import hpcstage.exchange.coding.stripework  # noqa: F401
