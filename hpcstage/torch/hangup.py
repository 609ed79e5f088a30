"""Ends running collectives: shuts the connections of a process group down, at which gloo gives up at once.

PyTorch's own ways leave a gloo collective hanging whose peer has stopped. The module finds connections in the process's
own table of descriptors, and touches none that was there before the group.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct

_INFO = struct.Struct("=2xB5x16xI16xI8xI")
"""Four values of the kernel's tcp_info: how often data was sent again since some was last acknowledged, the number of
segments that are not, and the milliseconds since something was last sent, and since an answer last came."""
_OFTEN = 2
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
        again, and its address. A process that is stopped has nothing to do with that: its kernel answers."""
        if self._own is None:
            return {}
        return {
            inode: address
            for inode, fd in connections().items()
            if inode in self._own and (address := _stuck_at(fd, inode)) is not None
        }

    @staticmethod
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

    def shut_down(self) -> int:
        """Ends all of them, and returns how many there were. Any thread may call it."""
        count = 0
        for inode, fd in connections().items():
            if inode not in self._before if self._own is None else inode in self._own:
                count += _shut_down(fd, inode)
        return count


def _stuck_at(fd: int, inode: int) -> str | None:
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as found:
        if os.fstat(found.fileno()).st_ino != inode or found.family not in (socket.AF_INET, socket.AF_INET6):
            return None
        info = found.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO.size)
        resent, unacknowledged, sent_ms, answered_ms = _INFO.unpack(info)
        if resent >= _OFTEN and unacknowledged and answered_ms > sent_ms:
            return str(found.getpeername()[0]).removeprefix("::ffff:")
    return None


def _shut_down(fd: int, inode: int) -> int:
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as found:
        if os.fstat(found.fileno()).st_ino != inode:
            return 0  # the number has become that of another
        if found.family in (socket.AF_INET, socket.AF_INET6) and found.getpeername():
            found.shutdown(socket.SHUT_RDWR)
            return 1
    return 0
