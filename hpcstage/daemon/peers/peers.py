"""Asks other nodes for files: between the queue and the link to the exchange.

Owns the peer requests that are out, and how files are shared as long as the group stands. When it is gone, files that
were not received wait for another group for a bounded time and are then read from the source. `arrivals` takes in the
copies that come, `offers` answers the nodes that ask this one. `nodegroup` decides whether this node takes part and
where its manifest comes from. On a node without a group nothing is ever asked.
"""

from __future__ import annotations

from collections.abc import Callable

from hpcstage.daemon.copying.engine import Engine
from hpcstage.daemon.peers.asks import Asks, by_owner
from hpcstage.daemon.peers.offers import Offers
from hpcstage.daemon.peers.received import Received
from hpcstage.daemon.peers.routes import Routes
from hpcstage.daemon.queue.states import NodeShare
from hpcstage.plan.types import Budget
from hpcstage.protocol import exchange
from hpcstage.protocol.arriving import MOST_SHARING
from hpcstage.protocol.exchange import Why

LOOK_EVERY_S = 0.1
MOST_LOOKS = 512
MOST_REQUESTED, REQUESTED_BYTES = 16, 16 << 20
"""The files and bytes that may be asked for beside the credits when a program waits for them."""
Send = Callable[[exchange.Message], None]


class Peers:
    """Owns the peer requests to other nodes. It exists as soon as there is an engine; `_send` is None while there is no
    group."""

    def __init__(
        self,
        engine: Engine,
        is_requested: Callable[[int], bool],
    ) -> None:
        self.routes: Routes | None = None
        self.received = Received(engine)
        self.offers = Offers(
            engine.queue, len(engine.manifest), lambda id_: None if self.routes is None else self.routes.fetcher(id_)
        )
        self._engine = engine
        self._queue = engine.queue
        self._is_requested = is_requested
        self._send: Send | None = None
        self._next_look = 0.0
        self._asks = Asks(exchange.CREDIT_FILES, exchange.CREDIT_BYTES)

    # ---- the group

    def divide(self, routes: Routes, temporary: Budget) -> None:
        """Divides the files among the nodes by `routes`; `temporary` is the budget that is set aside for temporary
        copies where this node does not keep all files."""
        self.routes = routes
        share = NodeShare(routes.own())
        if not routes.keeps_all:
            share = NodeShare(share.own, routes.others(), routes.unplaced(), temporary)
        self._queue.divide(share)
        self._engine.copies.holdings.expect(share.own)
        self._queue.turns = max(1, len(routes.members.present) - 1)
        self._know_others()

    def _know_others(self) -> None:
        """Has the queue bring large files together with all nodes that keep them, too."""
        routes, together = self.routes, self._queue.large.joint
        is_shared = routes is not None and self.connected and routes.keeps_all
        found = routes.members.present if routes is not None and is_shared else ()
        own = 0 if routes is None else routes.node
        together.own, together.present = own, [node for node in found if node < MOST_SHARING and own < MOST_SHARING]

    @property
    def connected(self) -> bool:
        """Whether other nodes can be asked."""
        return self._send is not None

    def connect(self, send: Send) -> None:
        """Begins to ask other nodes."""
        self._send = send
        self._queue.linked = True
        self._know_others()

    def disconnect(self, now: float) -> None:
        """Ends the asking of other nodes. Copies that had come without a message are taken in."""
        asked = self._asks.ids
        self._send = None
        self._know_others()
        self._asks.clear()
        self.offers.clear()
        for id_ in asked:
            self.received.take_if_here(id_, now)
        self._queue.unlink(self._is_requested)

    def adopt(self) -> None:
        """Has this node read everything from the source, as there will be no other group."""
        self._queue.divide(None)
        self._engine.copies.holdings.expect(())

    # ---- asking

    def pump(self, now: float) -> None:
        """Asks for the next files, gives up peer requests that bring nothing, and answers the nodes that wait here."""
        if self._send is None or self.routes is None:
            return
        for id_ in self._asks.give_up(now):
            self._queue.missed(id_, requested=self._is_requested(id_), doubtful=True)
        self._look(now)
        asks = self._asks
        # requested files do not wait for those asked for ahead
        requested = min(len(self._queue.peer_promoted.ids), MOST_REQUESTED)
        files, size_bytes = asks.free()
        ids = self._queue.next_from_peers(
            max(files, requested), max(size_bytes, REQUESTED_BYTES if requested else 0), now
        )
        self._engine.sweep()
        for owner, own in by_owner(ids, map(self.routes.fetcher, ids)).items():
            self._ask(owner, own, now)
        self._ask_again(asks.due(now))
        for offer in self.offers.take():
            self._send(offer)

    def _look(self, now: float) -> None:
        """Finds the copies ahead of the program that it has read since, which makes space for more."""
        if not self._queue.is_stalled or now < self._next_look:
            return
        self._next_look = now + LOOK_EVERY_S
        temporary = self._queue.budget.temporary
        temporary.read([id_ for id_ in temporary.oldest_unread(MOST_LOOKS) if self._engine.copies.was_read(id_)])

    def wake_after(self, now: float) -> float | None:
        """Returns the seconds until `pump` has work by the clock; None if it has none."""
        again = self._asks.wake_after(now)
        if self._send is None or not self._queue.is_stalled:
            return again
        look = max(0.0, self._next_look - now)
        return look if again is None else min(look, again)

    def _ask(self, owner: int, ids: list[int], now: float) -> None:
        assert self.routes is not None
        if owner == self.routes.node or not self._asks.trusts(owner, now):
            for id_ in ids:
                if not self.routes.is_divided and not self._is_requested(id_):
                    self._queue.take_back(id_)
                    continue
                self._queue.missed(id_, requested=self._is_requested(id_))
            return
        for id_ in ids:
            self._asks.asked(id_, owner, self._engine.manifest.size(id_), now)
        self._fetch(owner, ids)

    def _ask_again(self, ids: list[int]) -> None:
        """Asks for ids once more: the nodes that read them now."""
        if not ids:
            return
        assert self.routes is not None
        for owner, own in by_owner(ids, map(self.routes.fetcher, ids)).items():
            for id_ in own:
                self._asks.move(id_, owner)
            self._fetch(owner, own)

    def _fetch(self, owner: int, ids: list[int]) -> None:
        assert self._send is not None
        for message in exchange.in_messages(exchange.Fetch(owner, tuple(ids))):
            self._send(message)

    def timed_out(self, id_: int, now: float) -> None:
        """Notes that the program has waited for an id in vain, and gives up its node after MOST_LATE of these."""
        queue = self._queue
        if self._send is None or self.routes is None or not queue.states.is_from_peer(id_) or queue.large.is_large(id_):
            return
        for given_up in self._asks.late(self.routes.fetcher(id_), now):
            self._queue.missed(given_up, requested=self._is_requested(given_up), doubtful=True)

    def got(self, message: exchange.Got, now: float) -> None:
        """Takes in a copy that has come."""
        self._asks.answered(message.id, now)
        self.received.got(message, now)

    def missed(self, message: exchange.Missed, now: float) -> None:
        """Takes the message that copies do not come, and why."""
        others = self._read_by_others(message, now)
        self._ask_again(others)
        for id_ in message.ids:
            if id_ in others:
                continue
            if message.why is Why.UNKNOWN and self._asks.unready(id_, now):
                continue
            if message.why is not Why.UNKNOWN:
                self._asks.answered(id_, now)
            if message.why is Why.EXISTS and self.received.take_if_here(id_, now):
                continue
            if message.why is Why.LATER:
                self.received.deferred_by_peer(id_, now)
                continue
            self.received.failed(id_)
            self._queue.missed(id_, requested=self._is_requested(id_))

    def _read_by_others(self, message: exchange.Missed, now: float) -> list[int]:
        """Returns what other nodes read from the source, now that a node has left: they are asked instead of it."""
        if message.why is not Why.ENDED or self.routes is None:
            return []
        readers = {id_: self.routes.fetcher(id_) for id_ in message.ids if self._asks.is_out(id_)}
        unfit = (self.routes.node, message.node)
        return [id_ for id_, node in readers.items() if node not in unfit and self._asks.trusts(node, now)]

    def asked(self, message: exchange.Ask, now: float) -> None:
        """Takes the peer request of another node for files, which shows that the node lives."""
        self._asks.heard(message.node, now)
        self.offers.asked(message, now)
