"""One end of the connection between a checkpoint agent and the exchange of its node: whole messages out, whole messages
in. Nothing waits here; whoever owns the end waits for its descriptor.
"""

from __future__ import annotations

import socket

from hpcstage.errors import HpcstageError
from hpcstage.protocol.coding import CodingLinkError, Message, MessageStream, pack

_READ_BYTES = 1 << 20
_MOST_READ_BYTES = 8 << 20
"""The bytes that are taken before others get their turn."""


class LinkLost(HpcstageError):
    """The exchange of this node has gone, or never came; there may be another one soon."""


class ExchangeSocket:
    """Owns the connection, and what is not sent yet."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._stream = MessageStream()
        self._unsent = bytearray()
        self.gone = ""
        """Why nothing comes or goes any more. What came before is returned all the same."""
        connection.setblocking(False)

    def fileno(self) -> int:
        """Returns the descriptor, for select."""
        return self._socket.fileno()

    @property
    def unsent_bytes(self) -> int:
        """Returns the bytes that wait until more can be written."""
        return 0 if self.gone else len(self._unsent)

    def send(self, message: Message) -> None:
        """Sends a message as soon as can be: the rest of it goes with the next call of anything here."""
        self._unsent += pack(message)
        self._flush()

    def receive(self) -> list[Message]:
        """Returns what has come."""
        found: list[Message] = []
        left = _MOST_READ_BYTES
        self._flush()
        while left > 0 and not self.gone:
            try:
                data = self._socket.recv(_READ_BYTES)
                left -= len(data)
                found += list(self._stream.add(data))
                self.gone = "" if data else "it has gone"
            except BlockingIOError:
                break
            except CodingLinkError as error:
                self.gone = f"it says what makes no sense: {error}"
            except OSError as error:
                self.gone = str(error.strerror)
        return found

    def close(self) -> None:
        """Closes the connection."""
        self._socket.close()
        self.gone = self.gone or "the link was closed"

    def _flush(self) -> None:
        while self._unsent and not self.gone:
            try:
                with memoryview(self._unsent) as view:
                    count = self._socket.send(view, socket.MSG_NOSIGNAL)
                del self._unsent[:count]
            except BlockingIOError:
                return
            except OSError:
                self._unsent.clear()  # `receive` finds out why it has gone, and what it said before
