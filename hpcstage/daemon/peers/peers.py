"""Asks other nodes for files and offers them this node's: between the queue and the link to the exchange.

Owns the requests that are out, the other nodes that wait for files of this one, and how files are shared as long as the
group stands. When it is gone, files that were not received wait for another group for a bounded time and are then read
from the source. `nodegroup` decides whether this node takes part and where its manifest comes from.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Callable, Container

from hpcstage.daemon.copying.engine import Engine
from hpcstage.daemon.peers.nodegroup import PeerCounts
from hpcstage.daemon.peers.requests import Askers, Requests, by_owner
from hpcstage.daemon.peers.routes import Routes
from hpcstage.daemon.queue.rates import Verdict
from hpcstage.daemon.queue.states import FileState, NodeShare
from hpcstage.plan.types import Budget
from hpcstage.protocol import exchange
from hpcstage.protocol.exchange import Why
from hpcstage.store.copyfile import Status
from hpcstage.store.messages import Result

LOOK_EVERY_S = 0.1
MOST_LOOKS = 512
MOST_WANTED, WANTED_BYTES = 16, 16 << 20
"""The files and bytes that may be asked for beside the credits when a program waits for them."""
_WHY: dict[FileState | None, Why] = {
    FileState.STORED: Why.NONE,
    FileState.VOID: Why.VOID,
    FileState.FAILED: Why.FAILED,
    FileState.REFUSED: Why.FULL,
}
Send = Callable[[exchange.Message], None]


class Peers:
    """Owns what the module says. It exists as soon as there is an engine; `_send` is None while there is no group."""

    def __init__(
        self,
        engine: Engine,
        is_wanted: Callable[[int], bool],
        on_received: Callable[[Result], None],
    ) -> None:
        self.counts = PeerCounts()
        self.routes: Routes | None = None
        self._engine = engine
        self._queue = engine.queue
        self._is_wanted = is_wanted
        self._on_received = on_received
        self._send: Send | None = None
        self._next_look = 0.0
        self._requests = Requests(exchange.CREDIT_FILES, exchange.CREDIT_BYTES)
        self._askers = Askers()
        self._offers: dict[tuple[int, Why], list[int]] = {}

    # ---- the group

    def divide(self, routes: Routes, transit: Budget) -> None:
        """Divides the files among the nodes by `routes`; `transit` is the budget that is set aside for transit copies
        where this node does not keep all files."""
        self.routes = routes
        share = NodeShare(routes.own())
        if not routes.keeps_all:
            share = NodeShare(share.own, routes.others(), routes.unplaced(), transit)
        self._queue.divide(share)
        self._engine.holdings.expect(share.own)
        self._queue.source.turns = max(1, len(routes.members.present) - 1)

    @property
    def connected(self) -> bool:
        """Whether other nodes can be asked."""
        return self._send is not None

    @property
    def is_missing_something(self) -> bool:
        """Whether files are yet to come from other nodes."""
        states = self._queue.states
        return states.waiting > states.ordered(far=False) or states.count(FileState.AWAY) > 0

    def connect(self, send: Send) -> None:
        """Begins to ask other nodes."""
        self._send = send
        self._queue.peers.linked = True

    def disconnect(self, now: float) -> None:
        """Ends the asking of other nodes. Copies that had come without a message are taken in."""
        asked = self._requests.ids()
        self._send = None
        self._requests.clear()
        self._askers.clear()
        self._offers.clear()
        for id_ in asked:
            self._take_if_here(id_, now)
        self._queue.peers.unlink(self._is_wanted)

    def adopt(self) -> None:
        """Has this node read everything from the source, as there will be no other group."""
        self._queue.divide(None)
        self._engine.holdings.expect(())

    def gone(self, node: int) -> None:
        """Forgets the requests of a node that has left; `divide` deals its share to the others."""
        self._askers.drop(node)

    # ---- asking

    def pump(self, now: float) -> None:
        """Asks for the next files, gives up requests that bring nothing, and answers the nodes that wait here."""
        if self._send is None or self.routes is None:
            return
        for id_ in self._requests.give_up(now):
            self._queue.peers.missed(id_, wanted=self._is_wanted(id_), doubtful=True)
        self._look(now)
        requests = self._requests
        # wanted files do not wait for those asked for ahead
        wanted = min(len(self._queue.peers.promoted.ids), MOST_WANTED)
        files, size_bytes = max(requests.free_files, wanted), max(requests.free_bytes, WANTED_BYTES if wanted else 0)
        ids = self._queue.peers.next(files, size_bytes, now)
        self._engine.sweep()
        for owner, own in by_owner(ids, map(self.routes.fetcher, ids)).items():
            self._ask(owner, own, now)
        again = requests.due(now)
        for owner, own in by_owner(again, map(self.routes.fetcher, again)).items():
            for id_ in own:
                requests.move(id_, owner)
            self._fetch(owner, own)
        self._flush_offers()

    def _look(self, now: float) -> None:
        """Finds the copies ahead of the program that it has read since, which makes space for more."""
        if not self._queue.peers.is_stalled or now < self._next_look:
            return
        self._next_look = now + LOOK_EVERY_S
        transit = self._queue.budget.transit
        transit.read([id_ for id_ in transit.oldest_unread(MOST_LOOKS) if self._engine.was_read(id_)])

    def wake_after(self, now: float) -> float | None:
        """Returns the seconds until `pump` has work by the clock; None if it has none."""
        again = self._requests.wake_after(now)
        if self._send is None or not self._queue.peers.is_stalled:
            return again
        look = max(0.0, self._next_look - now)
        return look if again is None else min(look, again)

    def _ask(self, owner: int, ids: list[int], now: float) -> None:
        assert self.routes is not None
        if owner == self.routes.node or not self._requests.trusts(owner, now):
            for id_ in ids:
                self._queue.peers.missed(id_, wanted=self._is_wanted(id_))
            return
        for id_ in ids:
            self._requests.asked(id_, owner, self._engine.manifest.size(id_), now)
        self._fetch(owner, ids)

    def _fetch(self, owner: int, ids: list[int]) -> None:
        assert self._send is not None
        for message in exchange.in_messages(exchange.Fetch(owner, tuple(ids))):
            self._send(message)

    def timed_out(self, id_: int, now: float) -> None:
        """Notes that the program has waited for an id in vain, and gives up its node after MOST_LATE of these."""
        queue = self._queue
        if self._send is None or self.routes is None or not queue.states.is_far(id_) or queue.large.is_large(id_):
            return
        for given_up in self._requests.late(self.routes.fetcher(id_), now):
            self._queue.peers.missed(given_up, wanted=self._is_wanted(given_up), doubtful=True)

    def got(self, message: exchange.Got, now: float) -> None:
        """Takes in a copy that has come."""
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
            self.counts.peer_files += 1
            self.counts.peer_bytes += result.size_bytes
            self._on_received(result)

    def missed(self, message: exchange.Missed, now: float) -> None:
        """Takes the message that copies do not come, and why."""
        for id_ in message.ids:
            if message.why is Why.UNKNOWN and self._requests.unready(id_, now):
                continue
            if message.why is not Why.UNKNOWN:
                self._requests.answered(id_, now)
            if message.why is Why.EXISTS and self._take_if_here(id_, now):
                continue
            if message.why is Why.LATER:
                self._engine.postponed(id_, now)
                continue
            self._engine.not_received(id_)
            self._queue.peers.missed(id_, wanted=self._is_wanted(id_))

    def _take_if_here(self, id_: int, now: float) -> bool:
        """Takes in a copy that is in the store all the same. Returns whether it is."""
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
        """Takes the request of another node for files."""
        self._requests.heard(message.node, now)
        for id_ in message.ids:
            if id_ >= len(self._engine.manifest) or self._queue.peers.is_held_back(id_, now):
                self._offer(id_, message.node)
            elif self._queue.source.asked(id_) is Verdict.WAIT:
                self._askers.add(id_, message.node)
            else:
                self._offer(id_, message.node)

    def final(self, id_: int) -> None:
        """Answers the nodes that asked for an id, which is in its final state here."""
        for node in self._askers.settle(id_):
            self._offer(id_, node)

    def hold_back(self, now: float) -> None:
        """Answers the nodes that asked for large files that programs read at the source: they do not wait for them."""
        for id_ in self._askers.ids():
            if self._queue.peers.is_held_back(id_, now):
                self.final(id_)

    def voided(self, ids: Container[int]) -> None:
        """Answers the nodes that asked for files that were written to."""
        for id_ in self._askers.ids():
            if id_ in ids:
                self.final(id_)

    def refused(self) -> None:
        """Answers the nodes that asked for files that this node will not read, as it reads nothing more."""
        for id_ in self._askers.ids():
            if self._queue.source.asked(id_) is Verdict.DIRECT:
                self.final(id_)

    def _offer(self, id_: int, node: int) -> None:
        self._offers.setdefault((node, self._why(id_, node)), []).append(id_)

    def _why(self, id_: int, node: int) -> Why:
        state = self._queue.states.of(id_) if id_ < len(self._engine.manifest) else None
        if state in _WHY:
            return _WHY[state]
        if state is not None and self._queue.peers.is_held_back(id_, time.monotonic()):
            return Why.LATER
        # Another node reads it: the asking one, or one that it asks later, when it knows as much as this node.
        owns = state is not None and self.routes is not None and self.routes.fetcher(id_) == node
        return Why.ABSENT if owns else Why.UNKNOWN

    def _flush_offers(self) -> None:
        if self._send is None or not self._offers:
            return
        offers, self._offers = self._offers, {}
        for (node, why), ids in offers.items():
            for message in exchange.in_messages(exchange.Offer(node, why, tuple(ids))):
                self._send(message)

    def sent(self, message: exchange.Sent) -> None:
        """Counts files that the exchange has sent to another node."""
        self.counts.sent_files += message.files
        self.counts.sent_bytes += message.size_bytes
