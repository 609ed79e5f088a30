"""Defines a service of the daemon, and the event loop, which asks every service the same and knows none of them.

A service handles its kinds of messages, has work by the clock and descriptors to read from, ends in a bounded time and
fills its part of the record. The defaults are those of a service that has none of it.
"""

from __future__ import annotations

import selectors
import socket
import time
import traceback
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from hpcstage.daemon.process.descriptors import Descriptors, Receive
from hpcstage.daemon.process.server import Reply, Server
from hpcstage.forked import Helpers
from hpcstage.protocol.shim import Answer, Kind, Reason

if TYPE_CHECKING:
    from hpcstage.record.parts.part import NodePart

MOST_MISTAKES, MISTAKES_S = 100, 300.0


class Message(NamedTuple):
    """A message of a program, a wrapper or the exchange. The token stands for its connection."""

    token: int
    kind: Kind
    pid: int
    payload: bytes


class Service:
    """A service of the daemon. Every call is short; whatever may hang is for a helper."""

    kinds: frozenset[Kind] = frozenset()
    """The kinds of messages that the service handles; no other service has them at the same time."""

    def handle(self, message: Message) -> Reply | None:  # noqa: ARG002
        """Returns the answer to a message, or None if it comes later."""
        return Reply(Answer.REFUSED)

    def dropped(self, token: int) -> None:
        """Takes the end of a connection that was still open."""

    def descriptors(self) -> Mapping[int, Receive]:
        """Returns the descriptors that are read as soon as they are ready, and what reads them."""
        return {}

    def work(self, now: float) -> None:
        """Does what is to be done by the clock; called after all that came was handled."""

    def wake_after(self, now: float) -> float | None:  # noqa: ARG002
        """Returns the seconds until `work` has something to do; None if it has nothing to wait for."""
        return None

    def stop(self, reason: Reason) -> None:
        """Begins nothing more, and goes on answering."""

    def drain(self) -> Collection[str]:
        """Ends the service with the run. Returns the names of helpers that the end of the run waits for."""
        return ()

    def record(self, part: NodePart) -> NodePart:
        """Returns the node's part of the record with what the service knows."""
        return part


class Loop:
    """Owns the selector, the socket, the helpers and the list of services: it gives each its messages, descriptors and
    turns. A mistake of a service is logged and does not end the others, unless there are many in a short time."""

    def __init__(self, selector: selectors.BaseSelector, helpers: Helpers, listener: socket.socket) -> None:
        self.server = Server(listener, selector, self)
        self.is_ending = False
        self.services: Sequence[Service] = ()
        self._workers: Sequence[Service] = ()
        self._waiting: Sequence[Service] = ()
        self._reading: Sequence[Service] = ()
        self._by_kind: dict[Kind, Service] = {}
        self._selector = selector
        self._helpers = helpers
        self._descriptors = Descriptors(selector)
        self._mistakes: deque[float] = deque()

    def serve(self, services: Sequence[Service]) -> None:
        """Gives these services their turns from here on, in this order. In a turn a service is asked only for what it
        defines itself, since each message brings a turn."""
        self.services = services
        self._by_kind = {kind: service for service in services for kind in service.kinds}
        self._workers = [service for service in services if type(service).work is not Service.work]
        self._waiting = [service for service in services if type(service).wake_after is not Service.wake_after]
        self._reading = [service for service in services if type(service).descriptors is not Service.descriptors]

    def run(self) -> None:
        """Runs until `is_ending` is set."""
        while not self.is_ending:
            self._descriptors.watch(self._descriptors_now())
            for key, _ in self._selector.select(self._timeout_s()):
                self.guarded(key.data)
            now = time.monotonic()
            for service in self._workers:
                self.guarded(partial(service.work, now))

    def guarded(self, work: Callable[[], object]) -> None:
        """Calls `work` and logs its exceptions; more than MOST_MISTAKES in MISTAKES_S end the loop."""
        try:
            work()
        except Exception:  # noqa: BLE001  a mistake of ours must not end the staging
            traceback.print_exc()
            now = time.monotonic()
            self._mistakes.append(now)
            while now - self._mistakes[0] > MISTAKES_S:
                self._mistakes.popleft()
            self.is_ending = self.is_ending or len(self._mistakes) > MOST_MISTAKES

    def _descriptors_now(self) -> dict[int, Receive]:
        wanted: dict[int, Receive] = dict.fromkeys(self._helpers.fds(), self._helper_ready)
        for service in self._reading:
            wanted.update(service.descriptors())
        return wanted

    def _helper_ready(self, fd: int) -> bool:
        return fd not in self._helpers.fds() or self._helpers.receive(fd)

    def _timeout_s(self) -> float | None:
        now = time.monotonic()
        waits = [wait_s for service in self._waiting if (wait_s := service.wake_after(now)) is not None]
        return max(0.0, min(waits)) if waits else None

    def handle(self, token: int, kind: Kind, pid: int, payload: bytes) -> Reply | None:
        """Returns the answer of the service that handles the kind, or None if it comes later."""
        service = self._by_kind.get(kind)
        if service is None:
            return Reply(Answer.REFUSED)
        return service.handle(Message(token, kind, pid, payload))

    def dropped(self, token: int) -> None:
        """Tells all services of the end of a connection that was still open."""
        for service in self.services:
            service.dropped(token)
