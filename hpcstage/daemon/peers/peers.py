"""What this node asks other nodes for and gives them: between the queue and the link to the exchange.

Owns the requests that are out, who waits for what here, and how files are shared as long as the group stands. When it
is gone, what was not received waits for another group for a bounded time, and then comes from the source. Whether this
node may take part, and where its manifest comes from, is `joining`'s.
"""

from __future__ import annotations

import os
import stat
import time
from collections import Counter
from collections.abc import Callable, Container

from hpcstage.daemon.copying.engine import Engine
from hpcstage.daemon.copying.messages import Result
from hpcstage.daemon.peers.requests import Askers, Requests, by_owner
from hpcstage.daemon.peers.routes import Routes
from hpcstage.daemon.queue.groupqueue import GroupQueue
from hpcstage.daemon.queue.queue import FINAL, Place, Verdict
from hpcstage.daemon.queue.sharedqueue import Share
from hpcstage.plan.placement.placements import Placement
from hpcstage.plan.types import Budget
from hpcstage.protocol import exchange
from hpcstage.protocol.exchange import Why
from hpcstage.store.copyfile import Status

LOOK_EVERY_S = 0.1
MOST_LOOKS = 512
MOST_WANTED, WANTED_BYTES = 16, 16 << 20
"""Beside the credits."""
_WHY: dict[Place | None, Why] = {
    Place.STORED: Why.NONE,
    Place.VOID: Why.VOID,
    Place.FAILED: Why.FAILED,
    Place.REFUSED: Why.FULL,
}
Send = Callable[[exchange.Message], None]


class Peers:
    """See the module. There is one as soon as there is an engine; `send` is None while there is no group."""

    def __init__(
        self,
        engine: Engine,
        queue: GroupQueue,
        is_wanted: Callable[[int], bool],
        on_received: Callable[[Result], None],
    ) -> None:
        self.counts: Counter[str] = Counter()
        """peer_bytes, peer_files: received; sent_bytes, sent_files; missed: asked for and not received."""
        self.routes: Routes | None = None
        self._engine = engine
        self._queue = queue
        self._is_wanted = is_wanted
        self._on_received = on_received
        self._send: Send | None = None
        self._next_look = 0.0
        self._requests = Requests(exchange.CREDIT_FILES, exchange.CREDIT_BYTES)
        self._askers = Askers()
        self._offers: dict[tuple[int, Why], list[int]] = {}

    # ---- the group

    def divide(self, routes: Routes, transit: Budget) -> None:
        """Files are shared like this from here on; `transit`: what is set aside where not all of them are kept."""
        self.routes = routes
        ids = range(len(self._queue))
        share = Share(routes.own(ids))
        if not routes.keeps_all:
            share = Share(share.own, routes.others(ids), routes.unplaced(), transit)
        self._queue.divide(share)
        self._engine.holdings.expect(share.own)
        self._queue.turns = max(1, len(routes.members.present) - 1)

    @property
    def connected(self) -> bool:
        """Whether other nodes can be asked."""
        return self._send is not None

    @property
    def is_missing_something(self) -> bool:
        """Whether files are yet to come from other nodes."""
        return self._queue.waiting > self._queue.near_waiting or self._queue.count(Place.AWAY) > 0

    def switch(self, later: Placement) -> None:
        """Version 1: what this node has not begun and another reads first is that node's from here on."""
        routes = self.routes
        if routes is None or not routes.shares_all or routes.later is not None:
            return
        routes.later = later
        lost = [id_ for id_ in routes.own(range(len(self._queue))) if routes.owner(id_) != routes.node]
        self._queue.hand_over(lost, frozenset(self._askers.ids()))
        self._queue.turns = 1

    def connect(self, send: Send) -> None:
        """Other nodes can be asked."""
        self._send = send
        self._queue.linked = True

    def disconnect(self, now: float) -> None:
        """They cannot any more. What had come without a word counts."""
        asked = self._requests.ids()
        self._send = None
        self._requests.clear()
        self._askers.clear()
        self._offers.clear()
        for id_ in asked:
            self._take_if_here(id_, now)
        self._queue.unlink(self._is_wanted)

    def adopt(self) -> None:
        """There will be no other group: everything comes from the source."""
        self._queue.adopt()
        self._engine.holdings.expect(())

    def gone(self, node: int) -> None:
        """A node has left; its share is dealt to the others by `divide`."""
        self._askers.drop(node)

    # ---- asking

    def pump(self, now: float) -> None:
        """Asks for what comes next, gives up what does not come, tells those who wait here."""
        if self._send is None or self.routes is None:
            return
        for id_ in self._requests.give_up(now):
            self._queue.missed(id_, wanted=self._is_wanted(id_), doubtful=True)
        self._look(now)
        requests = self._requests
        wanted = min(self._queue.far_wanted, MOST_WANTED)  # does not wait for what is asked for ahead
        files, size_bytes = max(requests.free_files, wanted), max(requests.free_bytes, WANTED_BYTES if wanted else 0)
        ids = self._queue.next_requests(files, size_bytes, now)
        self._engine.sweep()
        for owner, own in by_owner(ids, map(self.routes.asked, ids)).items():
            self._ask(owner, own, now)
        again = requests.due(now)
        for owner, own in by_owner(again, map(self.routes.asked, again)).items():
            for id_ in own:
                requests.move(id_, owner)
            self._fetch(owner, own)
        self._flush_offers()

    def _look(self, now: float) -> None:
        """Which copies that came ahead of the program it has read: that makes room for more."""
        if not self._queue.is_stalled or now < self._next_look:
            return
        self._next_look = now + LOOK_EVERY_S
        transit = self._queue.transit
        transit.read([id_ for id_ in transit.oldest_unread(MOST_LOOKS) if self._engine.was_read(id_)])

    def wake_after(self, now: float) -> float | None:
        """Seconds until `pump` has work by the clock."""
        again = self._requests.wake_after(now)
        if self._send is None or not self._queue.is_stalled:
            return again
        look = max(0.0, self._next_look - now)
        return look if again is None else min(look, again)

    def _ask(self, owner: int, ids: list[int], now: float) -> None:
        assert self.routes is not None
        if owner == self.routes.node or not self._requests.trusts(owner, now):
            for id_ in ids:
                self._queue.missed(id_, wanted=self._is_wanted(id_))
            return
        for id_ in ids:
            self._requests.asked(id_, owner, self._engine.manifest.size(id_), now)
        self._fetch(owner, ids)

    def _fetch(self, owner: int, ids: list[int]) -> None:
        assert self._send is not None
        for message in exchange.in_messages(exchange.Fetch(owner, tuple(ids))):
            self._send(message)

    def timed_out(self, id_: int, now: float) -> None:
        """The program has waited for an id in vain."""
        if self._send is None or self.routes is None or not self._queue.is_far(id_) or self._queue.is_large(id_):
            return
        for given_up in self._requests.late(self.routes.asked(id_), now):
            self._queue.missed(given_up, wanted=self._is_wanted(given_up), doubtful=True)

    def got(self, message: exchange.Got, now: float) -> None:
        """A copy has come."""
        self._requests.answered(message.id, now)
        result = Result(
            message.id,
            Status.OK,
            size_bytes=message.size_bytes,
            mtime_ns=message.mtime_ns,
            started_ns=time.monotonic_ns() - message.open_ns - message.read_ns - message.write_ns,
            open_ns=message.open_ns,
            read_ns=message.read_ns,
            write_ns=message.write_ns,
        )
        self._received(result, now)

    def _received(self, result: Result, now: float) -> None:
        if self._engine.received(result, now):
            self.counts["peer_files"] += 1
            self.counts["peer_bytes"] += result.size_bytes
            self._on_received(result)

    def missed(self, message: exchange.Missed, now: float) -> None:
        """Copies do not come."""
        for id_ in message.ids:
            if message.why is Why.UNKNOWN and self._requests.unready(id_, now):
                continue
            self.counts["missed"] += 1
            if message.why is not Why.UNKNOWN:
                self._requests.answered(id_, now)
            if message.why is Why.EXISTS and self._take_if_here(id_, now):
                continue
            if message.why is Why.LATER:
                self._engine.postponed(id_, now)
                continue
            self._engine.not_received(id_)
            self._queue.missed(id_, wanted=self._is_wanted(id_))

    def _take_if_here(self, id_: int, now: float) -> bool:
        """It may be in the store all the same."""
        path = self._engine.store.path(self._engine.manifest.store_path(id_))
        try:
            status = os.lstat(path)
        except OSError:
            return False
        if not stat.S_ISREG(status.st_mode):
            return False
        result = Result(
            id_, Status.OK, size_bytes=status.st_size, mtime_ns=status.st_mtime_ns, started_ns=time.monotonic_ns()
        )
        self._received(result, now)
        return True

    # ---- being asked

    def asked(self, message: exchange.Ask, now: float) -> None:
        """Another node wants files."""
        self._requests.heard(message.node, now)
        for id_ in message.ids:
            if id_ >= len(self._queue) or self._queue.is_held_back(id_, now):
                self._offer(id_, message.node)
            elif self._queue.asked(id_) is Verdict.WAIT or self._expects(id_):
                self._askers.add(id_, message.node)
            else:
                self._offer(id_, message.node)

    def _expects(self, id_: int) -> bool:
        """Whether this node will read it, once it has heard of the one that may have begun it."""
        queue, routes = self._queue, self.routes
        if routes is None or queue.closed or not queue.is_far(id_) or queue.place(id_) in FINAL:
            return False
        if routes.later is None or routes.owner(id_) != routes.node:
            return False
        queue.hasten(id_)
        return True

    def final(self, id_: int) -> None:
        """An id came to its end here: those who asked are told."""
        for node in self._askers.settle(id_):
            self._offer(id_, node)

    def hold_back(self, now: float) -> None:
        """Those who asked for large files that programs read at the source do not wait for them here."""
        for id_ in self._askers.ids():
            if self._queue.is_held_back(id_, now):
                self.final(id_)

    def voided(self, ids: Container[int]) -> None:
        """These were written to: nobody waits for them."""
        for id_ in self._askers.ids():
            if id_ in ids:
                self.final(id_)

    def refused(self) -> None:
        """Nothing more is read from the source: nobody waits for it."""
        for id_ in self._askers.ids():
            if self._queue.asked(id_) is Verdict.DIRECT:
                self.final(id_)

    def _offer(self, id_: int, node: int) -> None:
        self._offers.setdefault((node, self._why(id_, node)), []).append(id_)

    def _why(self, id_: int, node: int) -> Why:
        place = self._queue.place(id_) if id_ < len(self._queue) else None
        if place in _WHY:
            return _WHY[place]
        if place is not None and self._queue.is_held_back(id_, time.monotonic()):
            return Why.LATER
        # Another node reads it: the one that asks, or it is asked once more when it knows as much as this one.
        owns = place is not None and self.routes is not None and self.routes.owner(id_) == node
        return Why.ABSENT if owns else Why.UNKNOWN

    def _flush_offers(self) -> None:
        if self._send is None or not self._offers:
            return
        offers, self._offers = self._offers, {}
        for (node, why), ids in offers.items():
            for message in exchange.in_messages(exchange.Offer(node, why, tuple(ids))):
                self._send(message)

    def sent(self, message: exchange.Sent) -> None:
        """The exchange has sent files to another node."""
        self.counts["sent_files"] += message.files
        self.counts["sent_bytes"] += message.size_bytes
