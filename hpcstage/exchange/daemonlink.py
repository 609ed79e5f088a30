"""Owns the connection to the node's daemon: datagrams of `protocol.exchange`; nothing waits after the daemon's
Hello."""

from __future__ import annotations

import os
import socket
import time
from collections import deque
from collections.abc import Sequence

from hpcstage.protocol import exchange
from hpcstage.protocol.shim import MESSAGE, VERSION, Kind

_RETRY_S = 0.02
GONE_S = 5.0
"""A daemon that is there listens before the exchanges are started."""
MOST_AT_ONCE = 64
"""The most messages that are taken before others get their turn."""


class LinkEnded(Exception):
    """The daemon has gone, or sends what makes no sense."""


class LinkReplaced(LinkEnded):
    """The daemon has another exchange."""


class DaemonLink:
    """A connection to the daemon, with the messages that are not sent yet."""

    def __init__(self, connection: socket.socket, hello: exchange.Hello) -> None:
        self._socket = connection
        self._unsent: deque[bytes] = deque()
        self.hello = hello
        connection.setblocking(False)

    @classmethod
    def connect(cls, sock: str, timeout_s: float) -> DaemonLink:
        """Connects, and waits for the daemon's Hello; less long where nobody listens, or the daemon takes no exchange.
        Raises LinkEnded."""
        began = time.monotonic()
        while True:
            try:
                return cls._greet(sock, max(_RETRY_S, began + timeout_s - time.monotonic()))
            except (OSError, exchange.LinkError) as error:
                is_busy = isinstance(error, TimeoutError | BlockingIOError)  # the latter: its queue is full
                patience_s = timeout_s if is_busy else min(timeout_s, GONE_S)
                if time.monotonic() > began + patience_s:
                    raise LinkEnded(f"no daemon answers at {sock}: {error}") from None
                time.sleep(_RETRY_S)

    @classmethod
    def _greet(cls, sock: str, timeout_s: float) -> DaemonLink:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            connection.settimeout(timeout_s)
            connection.connect(sock)
            connection.send(MESSAGE.pack(VERSION, Kind.PEER, 0, os.getpid()), socket.MSG_NOSIGNAL)
            hello = exchange.unpack(connection.recv(exchange.MAX_MESSAGE_BYTES))
            if not isinstance(hello, exchange.Hello):
                raise exchange.LinkError(f"{type(hello).__name__} instead of Hello")
            return cls(connection, hello)
        except BaseException:
            connection.close()
            raise

    def fileno(self) -> int:
        """Returns the descriptor, for select."""
        return self._socket.fileno()

    @property
    def has_unsent(self) -> bool:
        """Whether messages wait until more can be written."""
        return bool(self._unsent)

    def send(self, *messages: exchange.Message) -> None:
        """Queues messages and sends what can be sent."""
        self._unsent.extend(map(exchange.pack, messages))
        self.flush()

    def send_got(self, messages: Sequence[exchange.Got]) -> None:
        """Does the same for many messages of the most frequent kind."""
        self._unsent.extend(exchange.pack_all(messages))
        self.flush()

    def flush(self) -> None:
        """Sends what can be sent."""
        while self._unsent:
            try:
                self._socket.send(self._unsent[0], socket.MSG_NOSIGNAL)
            except BlockingIOError:
                return
            except OSError:
                self._unsent.clear()  # the reader finds out why it has gone: it may have said End
                return
            self._unsent.popleft()

    def receive(self) -> list[exchange.Message]:
        """Returns the messages that have come. Raises LinkEnded."""
        found: list[exchange.Message] = []
        while True:
            try:
                data = self._socket.recv(exchange.MAX_MESSAGE_BYTES)
            except BlockingIOError:
                return found
            except ConnectionResetError:
                continue  # it closed without reading everything; what it sent before is still to come, once
            except OSError as error:
                raise LinkEnded(f"the daemon has gone: {error}") from None
            if not data:
                if found:
                    return found
                raise LinkEnded("the daemon has gone")
            try:
                found += exchange.unpack_all(data)
            except exchange.LinkError as error:
                raise LinkEnded(f"the daemon says what makes no sense: {error}") from None
            if len(found) >= MOST_AT_ONCE:
                return found

    def close(self) -> None:
        """Closes the connection."""
        self._socket.close()
