"""Runs as `python -m hpcstage.elastic.passing.receiver`: gets copies from givers on other nodes for the copiers of this
one.

It owns a socket in the node directory, and says at once which files it cannot get: copiers read these at the source.
"""

from __future__ import annotations

if __name__ == "__main__":  # before the other imports look for their modules
    from hpcstage.inherited import own_packages_first

    own_packages_first()

import array
import contextlib
import os
import socket
import struct
import threading
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from hpcstage import localsocket
from hpcstage.elastic.passing import process
from hpcstage.elastic.passing.giver import ANSWER, REQUEST, REQUEST_BYTES, SILENT_S
from hpcstage.elastic.passing.pair import BLOCK_BYTES, CONNECT_S, Pair, PairError
from hpcstage.protocol import passing
from hpcstage.protocol.passing import Wanted

ANSWERED_S = 20.0
"""Copiers wait so long, from the receiver's start on, for the first node that says that it will give."""
LOOK_S = 0.2
IDLE_S = 120.0
"""Once copiers have asked for nothing for so long, the node has what it keeps."""
_QUEUE = 128
_NOTHING = Wanted(b"", 0, 0, 0)


class Link:
    """Owns the connection to one giver."""

    def __init__(self, pair: Pair) -> None:
        self._pair = pair
        self._lock = threading.Lock()
        self.is_open = True

    @property
    def is_busy(self) -> bool:
        """Whether another thread waits for the giver."""
        return self._lock.locked()

    def get(self, wanted: Wanted, target: int) -> bool:
        """Returns whether the giver had a copy, whose bytes are in the target. Raises OSError if these cannot be
        written."""
        with self._lock:
            if not self.is_open:
                return False
            try:
                return self._get(wanted, target)
            except (PairError, OSError) as error:
                self.is_open = False  # what comes next would not be an answer to what is asked next
                if isinstance(error, OSError):
                    raise
                return False

    def _get(self, wanted: Wanted, target: int) -> bool:
        pair, packed = self._pair, wanted.pack()
        REQUEST.pack_into(pair.data, 0, len(packed))
        pair.data[REQUEST.size : REQUEST.size + len(packed)] = packed
        pair.send(REQUEST_BYTES)
        pair.receive(ANSWER.size)
        if not ANSWER.unpack_from(pair.data)[0]:
            return False
        for at in range(0, wanted.size_bytes, BLOCK_BYTES):
            size = min(BLOCK_BYTES, wanted.size_bytes - at)
            pair.receive(size)
            _write_all(target, pair.data[:size], at)
        return True


class Receiver:
    """Owns the links."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._links: list[Link] = []
        self._has_begun = threading.Event()
        self._asked_s: float | None = None
        """When a copier asked last."""
        self._began_s = time.monotonic()
        self._ready_s = ANSWERED_S

    def told(self, giver: Mapping[str, Any]) -> None:
        """Connects to a giver, in a thread: PyTorch's constructors may wait for long. Or hears that one comes."""
        self._ready_s = passing.COMING_S
        if giver.get("comes"):
            return
        threading.Thread(target=self._connect, args=(giver,), daemon=True).start()

    def _connect(self, giver: Mapping[str, Any]) -> None:
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        with contextlib.suppress(PairError, RuntimeError, OSError):
            limit = timedelta(seconds=CONNECT_S)
            store = TCPStore(giver["address"], giver["port"], None, False, limit, wait_for_workers=False)
            self._links.append(Link(Pair(store, 1, self._address, bytes.fromhex(giver["key"]))))
            self._has_begun.set()

    def serve(self, connection: socket.socket) -> None:
        """Answers one copier's thread until it is gone."""
        fds = array.array("i")
        with contextlib.suppress(OSError, struct.error), connection:
            while True:
                data, rights, _, _ = connection.recvmsg(passing.MOST_BYTES, socket.CMSG_SPACE(fds.itemsize))
                if not data:
                    return
                fds = array.array("i")
                for _, _, found in rights:
                    fds.frombytes(found[: len(found) - len(found) % fds.itemsize])
                try:
                    is_here = len(fds) == 1 and self.get(Wanted.unpack(data), fds[0])
                finally:
                    for fd in fds:
                        os.close(fd)
                connection.send(passing.HERE if is_here else passing.NOT_HERE, socket.MSG_NOSIGNAL)

    def get(self, wanted: Wanted, target: int) -> bool:
        """Returns whether a giver had a copy, whose bytes are in the target."""
        self._asked_s = time.monotonic()
        self._wait_for_one()
        with contextlib.suppress(OSError):
            return any(link.get(wanted, target) for link in sorted(self._links, key=lambda link: link.is_busy))
        return False

    def _wait_for_one(self) -> None:
        while time.monotonic() - self._began_s < self._ready_s and not self._has_begun.wait(LOOK_S):
            pass

    def look(self) -> None:
        """Says to all givers that this process lives, until copiers ask for nothing any more."""
        if self._asked_s is not None and time.monotonic() - self._asked_s > IDLE_S:
            self._links.clear()  # which ends the givers
        for link in [*self._links]:
            with contextlib.suppress(OSError):
                link.get(_NOTHING, -1)


def _write_all(target: int, data: memoryview, position: int) -> None:
    while data:
        count = os.pwrite(target, data, position)
        data, position = data[count:], position + count


def _accept(listener: socket.socket, receiver: Receiver) -> None:
    while True:
        connection, _ = listener.accept()
        if localsocket.is_own_users(connection):
            threading.Thread(target=receiver.serve, args=(connection,), daemon=True).start()
        else:
            connection.close()


def main() -> None:
    """Runs the process to the end of its agent."""
    first = process.first_told()
    receiver = Receiver(first["address"])
    process.follow(receiver.told)
    process.give_way()
    os.chdir(first["node_dir"])
    os.umask(0o077)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    made = f"{passing.SOCKET}-{os.getpid()}"
    listener.bind(made)
    listener.listen(_QUEUE)
    os.rename(made, passing.SOCKET)  # whoever finds it is answered
    threading.Thread(target=_accept, args=(listener, receiver), daemon=True).start()
    while True:
        time.sleep(SILENT_S / 4)
        receiver.look()


if __name__ == "__main__":
    main()
