"""The socket at which an exchange waits for copiers of its node that get stripes of large files from other nodes.

Owns the connections and the memory that each brought. Nothing waits here: one descriptor, `fileno`, tells that
something came, whoever is connected.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import select
import socket

from hpcstage.localsocket import is_own_users
from hpcstage.protocol import stripelink as wire
from hpcstage.protocol.arriving import LEAST_STRIPE_BYTES
from hpcstage.protocol.stripelink import ANSWER, ASKED, BEGIN, Asked, Begin, StripeAnswer, slots_of


class StripeLink:
    """A connection to a copier, for one file."""

    def __init__(self, connection: socket.socket) -> None:
        self.begin: Begin | None = None
        self._connection = connection
        self._slots: mmap.mmap | None = None

    def receive(self) -> Asked | None:
        """Returns what the copier asks for next; None if it has asked for nothing. Raises OSError or ValueError once it
        is gone, or says what makes no sense."""
        if self.begin is None:
            data, fds, _, _ = socket.recv_fds(self._connection, wire.MOST_BYTES, 1)
            try:
                if len(data) != BEGIN.size or not fds:
                    raise ValueError("no Begin")
                begin = Begin._make(BEGIN.unpack(data))
                if begin.stripe_bytes < LEAST_STRIPE_BYTES:
                    raise ValueError("no such stripes")
                self._slots = mmap.mmap(fds[0], slots_of(begin.stripe_bytes) * begin.stripe_bytes)
                self.begin = begin
            finally:
                for fd in fds:
                    os.close(fd)
            return None
        data = self._connection.recv(wire.MOST_BYTES)
        if len(data) != ASKED.size:
            raise ValueError("no Asked")
        asked = Asked._make(ASKED.unpack(data))
        if asked.slot >= slots_of(self.begin.stripe_bytes):
            raise ValueError("no such slot")
        return asked

    def put(self, slot: int, at: int, data: memoryview) -> None:
        """Writes bytes of a stripe into its slot."""
        assert self.begin is not None
        assert self._slots is not None
        start = slot * self.begin.stripe_bytes + at
        self._slots[start : start + len(data)] = data

    def answer(self, stripe: int, slot: int, *, is_here: bool) -> None:
        """Tells the copier what became of a stripe; one that is gone shows so when it is read from."""
        with contextlib.suppress(OSError):
            self._connection.send(ANSWER.pack(*StripeAnswer(stripe, slot, is_here)), socket.MSG_NOSIGNAL)

    def fileno(self) -> int:
        """Returns the descriptor of the connection."""
        return self._connection.fileno()

    def close(self) -> None:
        """Ends the connection."""
        self._connection.close()


class StripePort:
    """Owns the listener and the links."""

    def __init__(self) -> None:
        """Listens in the working directory, which is the node's. Raises OSError."""
        self._links: dict[int, StripeLink] = {}
        self._epoll = select.epoll()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(wire.SOCKET)  # of an exchange that was killed
        self._listener.bind(wire.SOCKET)
        self._listener.listen()
        self._listener.setblocking(False)
        self._epoll.register(self._listener, select.EPOLLIN)

    def fileno(self) -> int:
        """Returns the descriptor that can be read when there is something to do."""
        return self._epoll.fileno()

    def take(self) -> tuple[list[tuple[StripeLink, Asked]], list[StripeLink]]:
        """Returns what copiers ask for, and the links that have ended."""
        asked: list[tuple[StripeLink, Asked]] = []
        ended: list[StripeLink] = []
        for fd, _ in self._epoll.poll(0):
            if fd == self._listener.fileno():
                self._accept()
                continue
            link = self._links[fd]
            try:
                while True:
                    found = link.receive()
                    asked += [] if found is None else [(link, found)]
            except BlockingIOError:
                continue
            except (OSError, ValueError):
                self._drop(link)
                ended.append(link)
        return [(link, one) for link, one in asked if link not in ended], ended

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            connection = self._listener.accept()[0]
            if not is_own_users(connection):
                connection.close()
                return
            connection.setblocking(False)
            link = self._links[connection.fileno()] = StripeLink(connection)
            self._epoll.register(link, select.EPOLLIN)

    def _drop(self, link: StripeLink) -> None:
        del self._links[link.fileno()]
        self._epoll.unregister(link)
        link.close()

    def close(self) -> None:
        """Takes no copier any more, and ends all links."""
        for link in list(self._links.values()):
            self._drop(link)
        with contextlib.suppress(OSError):
            self._epoll.unregister(self._listener)
        self._listener.close()
        with contextlib.suppress(OSError):
            os.unlink(wire.SOCKET)
