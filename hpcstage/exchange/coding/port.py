"""The socket at which an exchange waits for the agent of its node, or for a process that reads for it.

Nothing waits here: one descriptor, `fileno`, tells that something came or can be sent, whoever is connected.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket

from hpcstage.checkpoint.protection.exchangesocket import ExchangeSocket
from hpcstage.localsocket import is_own_users
from hpcstage.protocol.coding import SOCK, FromAgent, FromExchange

MOST_UNSENT_BYTES = 128 << 20
"""An agent that takes nothing is cut off."""


class AgentPort:
    """Takes one agent at a time; one that comes takes the place of the one before."""

    def __init__(self, name: str = SOCK) -> None:
        """Listens in the working directory, which is the node's. Raises OSError."""
        self._name = name
        self.number = 0
        """The number of the agent that is connected, or was last."""
        self._epoll = select.epoll()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._agent: ExchangeSocket | None = None
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name)  # of an exchange that was killed
        self._listener.bind(name)
        self._listener.listen(4)
        self._listener.setblocking(False)
        self._epoll.register(self._listener, select.EPOLLIN)

    def fileno(self) -> int:
        """Returns the descriptor that can be read when there is something to do."""
        return self._epoll.fileno()

    @property
    def is_connected(self) -> bool:
        """Whether an agent is there."""
        return self._agent is not None

    def accept(self) -> None:
        """Takes an agent that has come, if it is the same user's."""
        try:
            connection = self._listener.accept()[0]
        except OSError:
            return
        if not is_own_users(connection):
            connection.close()
            return
        self.drop()
        self._agent = ExchangeSocket(connection)
        self._epoll.register(self._agent, select.EPOLLIN)
        self.number += 1

    def receive(self) -> list[FromAgent]:
        """Returns what the agent has said. It is gone afterwards if it closed the link, or said what makes no
        sense."""
        found = [] if self._agent is None else self._agent.receive()
        self._follow()
        return [one for one in found if isinstance(one, FromAgent)]

    def send(self, message: FromExchange) -> None:
        """Sends a message as soon as can be; it is lost if no agent is there."""
        if self._agent is not None:
            self._agent.send(message)
            self._follow()

    def _follow(self) -> None:
        """Drops an agent that has gone or takes nothing; else looks for when more can be sent."""
        if self._agent is None:
            return
        if self._agent.gone or self._agent.unsent_bytes > MOST_UNSENT_BYTES:
            self.drop()
        else:
            self._epoll.modify(self._agent, select.EPOLLIN | (select.EPOLLOUT if self._agent.unsent_bytes else 0))

    def drop(self) -> None:
        """Closes the connection to the agent."""
        if self._agent is not None:
            self._epoll.unregister(self._agent)
            self._agent.close()
        self._agent = None

    def close(self) -> None:
        """Takes no agent any more."""
        self.drop()
        with contextlib.suppress(OSError):
            self._epoll.unregister(self._listener)
        self._listener.close()
        with contextlib.suppress(OSError):
            os.unlink(self._name)
