"""Owns `hpcstage.order(paths)`, with which a program tells the daemon of its node what it will read next.

Outside of `hpcstage run` the call does nothing, so it may stay in the program. The module owns no order: the daemon
maps the paths to the manifest and ignores those that are not in it.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterable
from pathlib import Path

from hpcstage.protocol import nodedir, shim

ANSWER_TIMEOUT_S = 1.0


def order(paths: Iterable[str | bytes | os.PathLike[str]]) -> bool:
    """Announces the files that will be read, in this order. Returns True if a daemon took the order."""
    node_dir, sock = os.environ.get("HPCSTAGE_NODE_DIR"), os.environ.get("HPCSTAGE_SOCKET")
    if not node_dir or not sock:
        return False
    with contextlib.suppress(OSError):
        name = _write(Path(node_dir) / nodedir.ORDERS, paths)
        return _tell(sock, name)
    return False


def _write(directory: Path, paths: Iterable[str | bytes | os.PathLike[str]]) -> bytes:
    name = f"given-{os.getpid()}-{os.urandom(4).hex()}"
    temporary = directory / f".{name}"
    temporary.write_bytes(b"\0".join(os.path.abspath(os.fsencode(path)) for path in paths))
    temporary.rename(directory / name)
    return name.encode()


def _tell(sock: str, name: bytes) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.settimeout(ANSWER_TIMEOUT_S)
        connection.connect(sock)
        connection.send(shim.MESSAGE.pack(shim.VERSION, shim.Kind.ORDER, 0, os.getpid()) + name)
        reply = connection.recv(shim.REPLY.size)
    return len(reply) == shim.REPLY.size and shim.REPLY.unpack(reply)[1] == shim.Answer.DONE
