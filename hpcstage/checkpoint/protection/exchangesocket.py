"""Owns an agent's socket to the exchange of its node: whole messages out, whole messages in, no wait without end.

There are no threads: whatever comes is taken in while something is sent or waited for.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from pathlib import Path

from hpcstage import localsocket
from hpcstage.errors import HpcstageError
from hpcstage.protocol import coding
from hpcstage.reading import readable, writable

SEND_S = 30.0
RETRY_S = 0.02
_READ_BYTES = 1 << 20


class LinkLost(HpcstageError):
    """The exchange of this node has gone, or never came; there may be another one soon."""


class ExchangeSocket:
    """A connection to an exchange. It calls `on_message` with each message that comes."""

    def __init__(self, node_dir: Path, on_message: Callable[[coding.Message], None]) -> None:
        """Connects to the exchange whose node directory this is. Raises OSError."""
        self._socket = _connected(node_dir)
        self._on_message = on_message
        self._stream = coding.MessageStream()
        self._gone = ""
        """Why nothing comes any more."""

    def fileno(self) -> int:
        """Returns the descriptor, for select."""
        return self._socket.fileno()

    def close(self) -> None:
        """Closes the connection."""
        self._socket.close()
        self._gone = self._gone or "the link was closed"

    def send(self, message: coding.Message) -> None:
        """Sends a message; waits while the exchange takes none. Raises LinkLost."""
        left, deadline = memoryview(coding.pack(message)), time.monotonic() + SEND_S
        while left:
            self._check()
            try:
                left = left[self._socket.send(left, socket.MSG_NOSIGNAL) :]
            except BlockingIOError:
                self.take()
                is_late = time.monotonic() >= deadline
                if not writable(self._socket.fileno(), 0.0 if is_late else RETRY_S) and is_late:
                    self._lose("it takes no more messages")
            except OSError as error:
                self._lose(str(error.strerror))

    def wait_until(self, is_done: Callable[[], bool], timeout_s: float) -> bool:
        """Takes in what comes until something is so; returns False after the time. Raises LinkLost."""
        deadline = time.monotonic() + timeout_s
        self.take()
        while not is_done():
            self._check()
            left_s = deadline - time.monotonic()
            if left_s <= 0 or not readable([self._socket.fileno()], left_s):
                return False
            self.take()
        return True

    def take(self) -> None:
        """Takes in what has come. What has come before the end of the connection is kept."""
        while not self._gone:
            try:
                data = self._socket.recv(_READ_BYTES)
            except BlockingIOError:
                return
            except OSError as error:
                self._gone = str(error.strerror)
                return
            if not data:
                self._gone = "it has gone"
                return
            try:
                for message in self._stream.add(data):
                    self._on_message(message)
            except (coding.CodingLinkError, ValueError) as error:
                self._gone = f"it says what makes no sense: {error}"

    def _check(self) -> None:
        if self._gone:
            raise LinkLost(f"the exchange of this node: {self._gone}")

    def _lose(self, why: str) -> None:
        self._gone = why
        self._check()


def _connected(node_dir: Path) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        localsocket.connect(connection, node_dir, coding.SOCK)
        connection.setblocking(False)
    except BaseException:
        connection.close()
        raise
    return connection
