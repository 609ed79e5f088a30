"""Runs the exchange of a node: one loop over its daemon's link, the messages of other exchanges, and its services.

The module owns when the loop sleeps: the longer nothing has happened, the longer, since MPI has nothing that one could
wait for. It knows what a service is and no service.
"""

from __future__ import annotations

import select
import time
from collections.abc import Sequence

from hpcstage.exchange.daemonlink import LinkReplaced
from hpcstage.exchange.service import ExchangeService, Station
from hpcstage.exchange.transport.frames import FrameError
from hpcstage.protocol import exchange

SPIN_S = 500e-6
"""While something is under way, the loop polls MPI for this long, since MPI moves a piece of it at each poll."""
BUSY_S = 2e-3
"""Once nothing has happened for this long, the other side is slow, and the loop polls for SLOW_SPIN_S only."""
SLOW_SPIN_S = 100e-6
MOVING_S = 50e-3
"""For this long after the last message, those that are under way may move all the same: MPI tells only of whole ones,
and a network moves no more of them at a poll than its buffers hold. So the loop sleeps for LEAST_SLEEP_S only."""
LEAST_SLEEP_S = 50e-6
LAZY_SLEEP_S = 500e-6
"""The same while only blocks of checkpoints are under way: some MB of them are, so they go on all the same."""
MOST_SLEEP_S = 20e-3
SLEEP_SHARE = 1 / 8
"""The loop sleeps for this share of the time since something last happened: a message that comes meanwhile is late by
at most that."""


class Exchange:
    """The exchange of this node: its services, which are served in their order."""

    def __init__(self, station: Station, services: Sequence[ExchangeService]) -> None:
        self._station = station
        self._services = services
        self._by_sort = {sort: service for service in services for sort in service.sorts}
        self._by_order = {order: service for service in services for order in service.orders}
        self._by_descriptor = {fd: service for service in services for fd in service.descriptors()}
        self._membership = station.membership
        self._moved = time.monotonic()
        """When something happened last."""
        self._at_rest = False

    @property
    def ended(self) -> bool:
        """Whether the daemon has said End."""
        return self._station.ended

    @property
    def is_quiet(self) -> bool:
        """Whether nothing of this node is under way to another."""
        return not self._station.post.sending and not self._station.lanes.reading.pending

    def step(self) -> None:
        """Waits a little if nothing happened in the step before, and does what there is to do."""
        now = time.monotonic()
        moved = self._wait(now) | self._station.post.poll(self._spin_s(now))
        for mail in self._station.post.take():
            self._station.heard[mail.source] = now
            service = self._by_sort.get(mail.sort)
            if service is None:
                raise FrameError(f"a message of the sort {mail.sort.name}, which no service takes")
            service.take(mail)
            moved = True
        for service in self._services:
            moved |= service.pump()
        if self._station.membership is not self._membership:
            self._follow()
        self._at_rest = not moved
        if moved:
            self._moved = now
            for service in self._services:
                service.report()

    def _follow(self) -> None:
        """Tells the services which nodes have left."""
        before, self._membership = self._membership, self._station.membership
        for node in set(before.present).difference(self._membership.present):
            for service in self._services:
                service.left(node)

    def _obey(self, message: exchange.Message) -> None:
        if isinstance(message, exchange.End):
            self._station.ended = True
            for service in self._services:
                service.stop()
        elif isinstance(message, exchange.Replaced):
            raise LinkReplaced("another exchange is connected to the daemon")
        elif type(message) in self._by_order:
            self._by_order[type(message)].obey(message)

    # ---- waiting

    def _spin_s(self, now: float) -> float:
        if not self._at_rest:
            return 0.0
        return SPIN_S if now - self._moved < BUSY_S else SLOW_SPIN_S

    def _sleep_s(self, now: float) -> float:
        still_s = now - self._moved
        if self._station.post.is_active:
            if still_s < BUSY_S:
                return 0.0
            still_s = max(0.0, still_s - MOVING_S)
        next_s = min(service.next_at() for service in self._services) - now
        least_s = LAZY_SLEEP_S if self._station.post.is_lazy else LEAST_SLEEP_S
        return max(0.0, min(MOST_SLEEP_S, next_s, max(least_s, still_s * SLEEP_SHARE)))

    def _wait(self, now: float) -> bool:
        """Waits for the daemon, for what wakes the services, or as long as messages of others may be late. Obeys the
        daemon. Returns whether anything came."""
        timeout = self._sleep_s(now) if self._at_rest else 0.0
        daemon = self._station.daemon
        link_open = () if self._station.ended else (daemon,)
        unsent = link_open if daemon.has_unsent else ()
        readable, _, _ = select.select((*link_open, *self._by_descriptor), unsent, (), timeout)
        if unsent:
            daemon.flush()
        for found in readable:
            if found is daemon:
                for message in daemon.receive():
                    self._obey(message)
            else:
                self._by_descriptor[found].ready()
        return bool(readable)
