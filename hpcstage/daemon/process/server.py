"""Owns the daemon's socket: connections, messages, answers. Owns no decision; a `MessageHandler` makes them.

A token stands for a connection. A handler answers at once by returning a reply, or later through `answer`.
"""

from __future__ import annotations

import contextlib
import os
import resource
import selectors
import socket
import traceback
from dataclasses import dataclass
from itertools import count
from typing import Protocol

from hpcstage.localsocket import is_own_users
from hpcstage.protocol.shim import MAX_DATAGRAM, MESSAGE, REPLY, VERSION, Answer, Kind, Reason

_MOST_ACCEPTS = 64
"""The most connections that are accepted per round, so that results and clocks get their turn."""


@dataclass(frozen=True)
class Reply:
    """An answer. `keep` says that the connection stays open."""

    answer: Answer
    reason: Reason = Reason.NONE
    value: int = 0
    keep: bool = False


class MessageHandler(Protocol):
    """Decides what messages are answered."""

    def handle(self, token: int, kind: Kind, pid: int, payload: bytes) -> Reply | None:
        """Returns the answer to a message, or None if the handler will call `Server.answer`."""

    def dropped(self, token: int) -> None:
        """Takes the end of a connection that was still open."""


class Server:
    """A listening socket and its connections, watched by a selector."""

    def __init__(self, listener: socket.socket, selector: selectors.BaseSelector, handler: MessageHandler) -> None:
        self._listener = listener
        self._selector = selector
        self._handler = handler
        self._connections: dict[int, socket.socket] = {}
        self._tokens = count(1)
        listener.setblocking(False)
        selector.register(listener, selectors.EVENT_READ, self._accept)

    def read_all(self) -> None:
        """Reads all messages that have been sent until now."""
        for token in list(self._connections):
            self._read(token)
        while self._accept() == _MOST_ACCEPTS:
            pass

    def _accept(self) -> int:
        for accepted in range(_MOST_ACCEPTS):
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return accepted
            token = next(self._tokens)
            self._connections[token] = connection
            connection.setblocking(False)
            if is_own_users(connection):
                self._read(token)
            else:
                self.answer(token, Reply(Answer.REFUSED))
        return _MOST_ACCEPTS

    def _read(self, token: int) -> None:
        """Reads one datagram; watches the connection if none has come yet."""
        connection = self._connections.get(token)
        if connection is None:
            return
        try:
            data = connection.recv(MAX_DATAGRAM)
        except BlockingIOError:
            self._watch(token, connection)
            return
        except OSError:
            data = b""
        if not data:
            self._handler.dropped(token)
            self.close(token)
            return
        reply = self._dispatch(token, data)
        if reply is not None:
            self.answer(token, reply)
        else:
            self._watch(token, connection)

    def _dispatch(self, token: int, data: bytes) -> Reply | None:
        if len(data) < MESSAGE.size:
            return Reply(Answer.REFUSED)
        version, kind, _, pid = MESSAGE.unpack_from(data)
        if version != VERSION or kind not in Kind._value2member_map_:
            return Reply(Answer.REFUSED)
        try:
            return self._handler.handle(token, Kind(kind), pid, data[MESSAGE.size :])
        except Exception:  # noqa: BLE001  one message must not end the staging of a node
            traceback.print_exc()
            return Reply(Answer.REFUSED)

    def _watch(self, token: int, connection: socket.socket) -> None:
        if token not in self._connections:
            return
        with contextlib.suppress(KeyError):
            self._selector.register(connection, selectors.EVENT_READ, lambda: self._read(token))

    def answer(self, token: int, reply: Reply) -> None:
        """Sends an answer; it is dropped where the connection has ended."""
        connection = self._connections.get(token)
        if connection is None:
            return
        with contextlib.suppress(OSError):
            connection.send(REPLY.pack(VERSION, reply.answer, reply.reason, reply.value), socket.MSG_NOSIGNAL)
        if reply.keep:
            self._watch(token, connection)
        else:
            self.close(token)

    def hand_over(self, token: int) -> socket.socket | None:
        """Gives a connection away: the caller reads and closes it from here on."""
        connection = self._connections.pop(token, None)
        if connection is not None:
            with contextlib.suppress(KeyError, ValueError):
                self._selector.unregister(connection)
        return connection

    def close(self, token: int) -> None:
        """Ends a connection."""
        connection = self._connections.pop(token, None)
        if connection is not None:
            with contextlib.suppress(KeyError, ValueError):
                self._selector.unregister(connection)
            connection.close()

    def stop_listening(self) -> None:
        """Closes the listening socket: new connections are refused, open ones stay."""
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(self._listener)
        self._listener.close()

    def close_all(self) -> None:
        """Closes the listening socket and all connections."""
        self.stop_listening()
        for token in list(self._connections):
            self.close(token)


def open_listener(path: str, listen_fd: int | None) -> socket.socket:
    """Returns the inherited socket, or one that it binds itself."""
    if listen_fd is not None:
        return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET, fileno=listen_fd)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    listener.bind(path)
    os.chmod(path, 0o600)
    listener.listen(1024)
    return listener


def allow_many_connections() -> None:
    """Raises the limit of open descriptors, since every request that waits takes one."""
    with contextlib.suppress(OSError, ValueError):
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
