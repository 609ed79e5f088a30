"""The socket at which an exchange waits for the agent of its node. Owns the connection, and what is not sent yet.

Nothing waits here: one descriptor, `fileno`, tells that something came or can be sent, whoever is connected.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
from collections import deque

from hpcstage.localsocket import is_own_users
from hpcstage.protocol import coding

MOST_UNSENT_BYTES = 128 << 20
"""An agent that takes nothing is cut off."""
_READ_BYTES = 1 << 20
_MOST_READ_BYTES = 8 << 20
"""The bytes that are taken before others get their turn."""


class AgentPort:
    """Takes one agent at a time; one that comes takes the place of the one before."""

    def __init__(self) -> None:
        """Listens in the working directory, which is the node's. Raises OSError."""
        self.number = 0
        """The number of the agent that is connected, or was last."""
        self._epoll = select.epoll()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._connection: socket.socket | None = None
        self._stream = coding.MessageStream()
        self._unsent: deque[memoryview] = deque()
        self._unsent_bytes = 0
        self._waits_to_send = False
        with contextlib.suppress(FileNotFoundError):
            os.unlink(coding.SOCK)  # of an exchange that was killed
        self._listener.bind(coding.SOCK)
        self._listener.listen(4)
        self._listener.setblocking(False)
        self._epoll.register(self._listener, select.EPOLLIN)

    def fileno(self) -> int:
        """Returns the descriptor that can be read when there is something to do."""
        return self._epoll.fileno()

    @property
    def is_connected(self) -> bool:
        """Whether an agent is there."""
        return self._connection is not None

    def accept(self) -> bool:
        """Takes an agent that has come, if it is the same user's. Returns whether one has."""
        try:
            connection = self._listener.accept()[0]
        except OSError:
            return False
        if not is_own_users(connection):
            connection.close()
            return False
        self.drop()
        connection.setblocking(False)
        self._epoll.register(connection, select.EPOLLIN)
        self._connection = connection
        self.number += 1
        return True

    def receive(self) -> list[coding.FromAgent]:
        """Returns what the agent has said. It is gone afterwards if it closed the link, or said what makes no
        sense."""
        found: list[coding.FromAgent] = []
        left = _MOST_READ_BYTES
        self._flush()
        while self._connection is not None and left > 0:
            try:
                data = self._connection.recv(_READ_BYTES)
                left -= len(data)
                found += [one for one in self._stream.add(data) if isinstance(one, coding.FromAgent)]
            except BlockingIOError:
                break
            except (OSError, coding.CodingLinkError):
                data = b""
            if not data:
                self.drop()
        return found

    def send(self, message: coding.FromExchange) -> None:
        """Sends a message as soon as can be; it is lost if no agent is there."""
        if self._connection is None:
            return
        data = coding.pack(message)
        self._unsent.append(memoryview(data))
        self._unsent_bytes += len(data)
        self._flush()
        if self._unsent_bytes > MOST_UNSENT_BYTES:
            self.drop()

    def _flush(self) -> None:
        while self._unsent and self._connection is not None:
            try:
                count = self._connection.send(self._unsent[0], socket.MSG_NOSIGNAL)
            except BlockingIOError:
                break
            except OSError:
                self.drop()
                return
            self._unsent_bytes -= count
            if count < len(self._unsent[0]):
                self._unsent[0] = self._unsent[0][count:]
            else:
                self._unsent.popleft()
        if self._connection is not None and self._waits_to_send is not bool(self._unsent):
            self._waits_to_send = bool(self._unsent)
            self._epoll.modify(self._connection, select.EPOLLIN | (select.EPOLLOUT if self._unsent else 0))

    def drop(self) -> None:
        """Closes the connection to the agent."""
        if self._connection is not None:
            self._epoll.unregister(self._connection)
            self._connection.close()
        self._connection = None
        self._stream = coding.MessageStream()
        self._unsent.clear()
        self._unsent_bytes = 0
        self._waits_to_send = False

    def close(self) -> None:
        """Takes no agent any more."""
        self.drop()
        with contextlib.suppress(OSError):
            self._epoll.unregister(self._listener)
        self._listener.close()
        with contextlib.suppress(OSError):
            os.unlink(coding.SOCK)
