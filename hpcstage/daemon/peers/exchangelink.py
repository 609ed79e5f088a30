"""Connects to the node's exchange: passes whole messages in and out and never waits. Owns the socket, no decision."""

from __future__ import annotations

import contextlib
import selectors
import socket
import sys
import time
from collections import deque
from collections.abc import Callable

from hpcstage.protocol import exchange

_MOST_READS = 64
"""The most datagrams that are read per round, so that requests and copiers get their turn."""
MOST_OUT = 4096
"""The most messages that wait to be sent; an exchange that is further behind is given up."""
FINISH_S = 1.0


class PeerLink:
    """Owns the connection. It calls `on_end` once, when the exchange is gone; not after `close`."""

    def __init__(
        self,
        connection: socket.socket,
        selector: selectors.BaseSelector,
        on_message: Callable[[exchange.Message], None],
        on_end: Callable[[str], None],
    ) -> None:
        self._connection = connection
        self._selector = selector
        self._on_message = on_message
        self._on_end = on_end
        self._out: deque[bytes] = deque()
        self._open = True
        self._lost = False
        """Whether the connection was given up while its end has yet to be read."""
        self._why = "the exchange ended"
        connection.setblocking(False)
        selector.register(connection, selectors.EVENT_READ, self._ready)

    def send(self, message: exchange.Message) -> None:
        """Sends a message now, or as soon as the socket takes it."""
        if self._open and not self._lost:
            self._out.append(exchange.pack(message))
            if len(self._out) == 1 or len(self._out) > MOST_OUT:
                self._flush()

    def _ready(self) -> None:
        self._flush()
        for _ in range(_MOST_READS):
            if not self._open or not self._take():
                return

    def _take(self) -> bool:
        try:
            data = self._connection.recv(exchange.MAX_MESSAGE_BYTES)
        except BlockingIOError:
            return False
        except OSError as error:
            self._end(f"the link to the exchange failed: {error.strerror}")
            return False
        if not data:
            self._end(self._why)
            return False
        try:
            for message in exchange.unpack_all(data):
                self._on_message(message)
        except exchange.LinkError as error:
            self._end(f"the exchange sent something strange: {error}")
            return False
        return True

    def _flush(self) -> None:
        try:
            while self._out:
                self._connection.send(self._out[0], socket.MSG_NOSIGNAL)
                self._out.popleft()
        except BlockingIOError:
            if len(self._out) > MOST_OUT:
                self._give_up("the exchange does not read what it is told")
        except OSError as error:
            self._give_up(f"the link to the exchange failed: {error.strerror}")
        self._watch()

    def _give_up(self, why: str) -> None:
        """Gives the connection up. `on_end` does not interrupt the sender: it comes once the end is read."""
        self._lost, self._why = True, why
        self._out.clear()
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)

    def _watch(self) -> None:
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._out else 0)
        if self._open and self._selector.get_key(self._connection).events != events:
            self._selector.modify(self._connection, events, self._ready)

    def _end(self, why: str) -> None:
        if self._open:
            self.close()
            self._on_end(why)

    def finish(self, message: exchange.Message) -> None:
        """Sends a last message, after what is left before it, and closes the connection. The exchange has FINISH_S to
        read it all."""
        self.send(message)
        deadline = time.monotonic() + FINISH_S
        with contextlib.suppress(OSError):
            while self._out and (left_s := deadline - time.monotonic()) > 0:
                self._connection.settimeout(left_s)
                self._connection.send(self._out[0], socket.MSG_NOSIGNAL)
                self._out.popleft()
        self.close()

    def close(self) -> None:
        """Closes the connection."""
        if self._open:
            self._open = False
            with contextlib.suppress(KeyError, ValueError):
                self._selector.unregister(self._connection)
            self._connection.close()


def note(text: str) -> None:
    """Writes a line to the daemon's log."""
    print(f"group: {text}", file=sys.stderr, flush=True)  # noqa: T201  standard error is daemon.log
