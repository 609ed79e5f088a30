"""The TCP connections of a process group, which are shut down to end its running collectives.

PyTorch's own ways leave a gloo collective hanging whose peer has stopped. Connections are found in the process's own
table of descriptors; none that was there before the group is touched.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import sys

_INFO = struct.Struct("=BxB5x16xI16xI8xI")
"""Values of the kernel's tcp_info: the state, how often data was sent again since some was last acknowledged, the
number of segments that are not, and the milliseconds since something was last sent, and since an answer last came."""
_OFTEN = 2
_SYN_SENT = 2
"""The state of a connection that the other host has yet to answer. Nothing but the kernel's tables says whose it is."""
_TABLES = ((socket.AF_INET, "/proc/self/net/tcp"), (socket.AF_INET6, "/proc/self/net/tcp6"))
_PROBE_PORT, _PROBE_S = 1, 0.3
"""A host that is reached refuses a connection at a port at which nobody listens, within a round trip."""


def connections() -> dict[int, int]:
    """Returns the sockets of this process: the descriptor of each by its inode."""
    found: dict[int, int] = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError, ValueError):
            target = os.readlink(f"/proc/self/fd/{name}")
            if target.startswith("socket:["):
                found[int(target[8:-1])] = int(name)
    return found


class GroupConnections:
    """The connections that a group opens, from the making of this object on."""

    def __init__(self) -> None:
        self._before = frozenset(connections())
        self._own: frozenset[int] | None = None

    def complete(self) -> None:
        """Notes that the group has all of its connections: later ones are the program's."""
        self._own = frozenset(connections()) - self._before

    def stuck(self) -> dict[int, str]:
        """Returns the connections, by their inodes, on which the other host does not answer, though data was sent
        again, and its address; until the group has all of its connections also those that are yet to be made. A process
        that is stopped has nothing to do with that: its kernel answers."""
        return {
            inode: address
            for inode, fd in connections().items()
            if self._is_own(inode) and (address := _stuck_at(fd, inode)) is not None
        }

    def shut_down(self) -> None:
        """Ends all of them. Any thread may call it."""
        for inode, fd in connections().items():
            if self._is_own(inode):
                _shut_down(fd, inode)

    def _is_own(self, inode: int) -> bool:
        return inode not in self._before if self._own is None else inode in self._own


def answers(address: str) -> bool:
    """Whether a host takes or refuses a connection now. The kernel sends ever more rarely again what was not
    acknowledged: a connection may look stuck for seconds after what cut it is over. A host whose firewall says
    nothing does not answer."""
    try:
        socket.create_connection((address, _PROBE_PORT), _PROBE_S).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        return False
    return True


def _stuck_at(fd: int, inode: int) -> str | None:
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as found:
        if os.fstat(found.fileno()).st_ino != inode or found.family not in (socket.AF_INET, socket.AF_INET6):
            return None
        info = found.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO.size)
        state, resent, unacknowledged, sent_ms, answered_ms = _INFO.unpack(info)
        if state == _SYN_SENT:
            return _remote_of(inode) if resent >= _OFTEN else None
        if resent >= _OFTEN and unacknowledged and answered_ms > sent_ms:
            return str(found.getpeername()[0]).removeprefix("::ffff:")
    return None


def _remote_of(inode: int) -> str | None:
    """Returns the address of the other host of a connection, from the kernel's tables."""
    for family, table in _TABLES:
        with contextlib.suppress(OSError), open(table, encoding="ascii") as rows:
            for row in rows:
                found = row.split()
                if found[9] == str(inode):
                    words = bytes.fromhex(found[2].partition(":")[0])
                    address = b"".join(words[at : at + 4][::-1] for at in range(0, len(words), 4))
                    native = address if sys.byteorder == "little" else words
                    return socket.inet_ntop(family, native).removeprefix("::ffff:")
    return None


def _shut_down(fd: int, inode: int) -> None:
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as found:
        is_it = os.fstat(found.fileno()).st_ino == inode  # otherwise the number has become that of another
        if is_it and found.family in (socket.AF_INET, socket.AF_INET6) and found.getpeername():
            found.shutdown(socket.SHUT_RDWR)
