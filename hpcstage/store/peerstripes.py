"""Gets stripes of a large file from other nodes, by the exchange of this one, for the copier that brings the rest.

Owns the connection to the exchange and the slots in which stripes come. What does not come is read at the source.
"""

from __future__ import annotations

import array
import contextlib
import mmap
import os
import select
import socket
import time
from collections.abc import Iterator

from hpcstage import localsocket
from hpcstage.protocol import stripelink as wire
from hpcstage.protocol.stripelink import ANSWER, ASKED, BEGIN, Asked, Begin, StripeAnswer, slots_of
from hpcstage.store.arrivingrows import StripeShare

SILENT_S = 60.0
"""A node that is asked for stripes and gives none for so long is lost. One that has none says so at once, but the
source may be slow, or programs read there."""


class PeerStripes:
    """Owns what was asked for and has not come."""

    def __init__(self, connection: socket.socket, slots: mmap.mmap, begin: Begin, share: StripeShare) -> None:
        self.share = share
        self.lost: set[int] = set()
        """Nodes that give nothing any more."""
        self._connection = connection
        self._slots = memoryview(slots)
        self._stripe_bytes, self._size_bytes = begin.stripe_bytes, begin.size_bytes
        self._free = list(range(slots_of(begin.stripe_bytes)))
        self._asked: dict[int, tuple[int, int]] = {}
        """By slot: the stripe that is to come there, and the node that was asked for it."""
        self._heard: dict[int, float] = {}

    @classmethod
    def connect(cls, id_: int, size_bytes: int, stripe_bytes: int, share: StripeShare) -> PeerStripes | None:
        """Returns a connection to the exchange, in the working directory, which is the node's; None if there is
        none."""
        begin = Begin(id_, stripe_bytes, size_bytes)
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        memory = -1
        try:
            memory = os.memfd_create("hpcstage-stripes", os.MFD_CLOEXEC)
            os.truncate(memory, slots_of(stripe_bytes) * stripe_bytes)
            slots = mmap.mmap(memory, 0)
            connection.setblocking(False)
            connection.connect(wire.SOCKET)
            if not localsocket.is_own_users(connection):
                raise PermissionError
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [memory]))]
            connection.sendmsg([BEGIN.pack(*begin)], rights, socket.MSG_NOSIGNAL)
            return cls(connection, slots, begin, share)
        except (OSError, ValueError):
            connection.close()
            return None
        finally:
            if memory >= 0:
                os.close(memory)

    # ---- who brings what

    def reader(self, stripe: int) -> int:
        """Returns the node that brings a stripe."""
        return self.share.reader(stripe, self.lost)

    def is_own(self, stripe: int) -> bool:
        """Returns whether this node reads a stripe at the source."""
        return self.reader(stripe) == self.share.own

    # ---- asking

    @property
    def is_waiting(self) -> bool:
        """Whether something was asked for and has not come."""
        return bool(self._asked)

    @property
    def has_room(self) -> bool:
        """Whether one more stripe can be asked for."""
        return bool(self._free)

    def ask(self, stripe: int, now: float) -> list[int]:
        """Asks for a stripe. Returns the stripes that do not come, as the exchange is gone."""
        node, slot = self.reader(stripe), self._free.pop()
        if all(node != other for _, other in self._asked.values()):
            self._heard[node] = now
        self._asked[slot] = stripe, node
        try:
            self._connection.send(ASKED.pack(*Asked(node, stripe, slot)), socket.MSG_NOSIGNAL)
        except OSError:
            return self._end()
        return []

    def answers(self, timeout_s: float) -> Iterator[tuple[int, memoryview | None]]:
        """Waits for answers, for so long at most. Yields stripes with their bytes, which are there until the next step;
        without them what does not come, and then what was asked of the same node."""
        readable, _, _ = select.select((self._connection,), (), (), timeout_s)
        while readable:
            try:
                data = self._connection.recv(wire.MOST_BYTES)
            except BlockingIOError:
                break
            except OSError:
                data = b""
            if len(data) != ANSWER.size:
                yield from ((stripe, None) for stripe in self._end())
                return
            answer = StripeAnswer._make(ANSWER.unpack(data))
            yield from self._answered(answer)
            self._free.append(answer.slot)
        yield from ((stripe, None) for stripe in self._late())

    def _answered(self, answer: StripeAnswer) -> Iterator[tuple[int, memoryview | None]]:
        stripe, node = self._asked.pop(answer.slot, (answer.stripe, None))
        if node is None:  # it was given up, and may have been asked of another node since
            return
        if not answer.is_here:
            yield from ((stripe, None) for stripe in (stripe, *self._lose(node)))
            return
        self._heard[node] = time.monotonic()
        start = answer.slot * self._stripe_bytes
        length = min(self._stripe_bytes, self._size_bytes - stripe * self._stripe_bytes)
        yield stripe, self._slots[start : start + length]

    def _late(self) -> list[int]:
        now = time.monotonic()
        silent = {node for _, node in self._asked.values() if now - self._heard[node] > SILENT_S}
        return [stripe for node in silent for stripe in self._lose(node)]

    def _lose(self, node: int) -> list[int]:
        """Notes that a node gives nothing more. Returns what it was asked for."""
        self.lost.add(node)
        gone = [stripe for stripe, of in self._asked.values() if of == node]
        self._asked = {slot: (stripe, of) for slot, (stripe, of) in self._asked.items() if of != node}
        return gone

    def _end(self) -> list[int]:
        self.lost.update(node for node in self.share.nodes if node != self.share.own)
        gone, self._asked = [stripe for stripe, _ in self._asked.values()], {}
        self._free.clear()
        return gone

    def close(self) -> None:
        """Ends the connection."""
        self._free.clear()
        self._slots.release()
        with contextlib.suppress(OSError):
            self._connection.close()
