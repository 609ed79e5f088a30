"""The process group of one membership: its store, its forming, and its end.

The module owns the waits while a group forms, and how its running collectives are ended: by shutting its connections
down, at which gloo gives up at once. PyTorch's own ways leave a gloo collective hanging whose peer has stopped.
Connections are found in the process's own table of descriptors; none that was there before the group is touched.
`seat` says who is in the group.
"""

# ruff: noqa: ANN401 - PyTorch's stores are declared only where PyTorch has them

from __future__ import annotations

import contextlib
import gc
import os
import socket
import struct
import sys
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from hpcstage.torch.elastic.seat import Assignment, Held, Seat

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
            if self._is_own(inode):
                count += _shut_down(fd, inode)
        return count

    def _is_own(self, inode: int) -> bool:
        return inode not in self._before if self._own is None else inode in self._own


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


def _shut_down(fd: int, inode: int) -> int:
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as found:
        if os.fstat(found.fileno()).st_ino != inode:
            return 0  # the number has become that of another
        if found.family in (socket.AF_INET, socket.AF_INET6) and found.getpeername():
            found.shutdown(socket.SHUT_RDWR)
            return 1
    return 0


STORE_S = 30.0
"""The time for which a process tries to reach the store of its next group."""
CONNECT_S = 60.0
"""The time that the processes of a group, which are all there, may take to connect to each other."""


class ElasticGroup:
    """The group in which this process trains, or will."""

    def __init__(self, timeout_s: float) -> None:
        """`timeout_s` bounds its collectives, and the wait for the other processes."""
        self._timeout = timedelta(seconds=timeout_s)
        self._store: Any = None
        self._connections = GroupConnections()

    def form(self, seat: Seat, held: Held) -> Assignment:
        """Waits for a place in the next membership and makes its group the default one."""
        self._connections = GroupConnections()
        place = seat.assigned(held, self._lead, self._connections)
        store = self._store if place.rank == 0 else None
        if store is None:
            limit = timedelta(seconds=STORE_S)
            store = dist.TCPStore(place.address, place.port, None, False, limit)  # type: ignore[attr-defined]
        named = dist.PrefixStore(f"generation/{place.generation}", store)  # type: ignore[attr-defined]
        self._meet(named, place)
        limit = timedelta(seconds=CONNECT_S)
        dist.init_process_group("gloo", store=named, rank=place.rank, world_size=place.world, timeout=limit)
        dist.distributed_c10d._set_pg_timeout(self._timeout)
        return place

    def complete(self) -> None:
        """Notes that the group has all of its connections, when all ranks are here."""
        dist.barrier()
        self._connections.complete()

    def hang_up(self) -> None:
        """Ends the collectives: whoever waits for this rank need not."""
        self._connections.shut_down()

    def end(self) -> None:
        """Ends the group, which nobody uses any more."""
        gc.collect()  # the group's last user may be in a cycle
        if dist.is_initialized():
            dist.destroy_process_group()
        self._store = None

    def _lead(self) -> int:
        self._store = dist.TCPStore(  # type: ignore[attr-defined]
            "localhost", 0, None, True, timedelta(seconds=STORE_S), wait_for_workers=False
        )
        return int(self._store.port)

    def _meet(self, store: Any, place: Assignment) -> None:
        """Waits until all ranks have come: a node may have to start its processes again. Connecting, which nothing
        ends before its limit, then takes little."""
        store.set(f"here/{place.rank}", "")
        store.wait([f"here/{rank}" for rank in range(place.world)], self._timeout)
