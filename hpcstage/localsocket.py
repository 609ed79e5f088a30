"""Connects to sockets of a node directory, and checks who is at the other end of one.

Owns two rules: the path of a node directory may be too long for a socket's name, which has room for 107 bytes; and only
processes of the same user are served.
"""

from __future__ import annotations

import os
import socket
import struct
from pathlib import Path

_CREDENTIALS = struct.Struct("3i")
"""The pid, uid and gid of the other end."""


def connect(connection: socket.socket, directory: Path, name: str) -> None:
    """Connects to the socket of this name in a directory. Raises OSError, and BlockingIOError where the connection does
    not wait and the queue of the socket is full."""
    fd = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        connection.connect(f"/proc/self/fd/{fd}/{name}")
    finally:
        os.close(fd)


def is_own_users(connection: socket.socket) -> bool:
    """Tells whether the process that connected is one of this process's user."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return bool(_CREDENTIALS.unpack(raw)[1] == os.getuid())
