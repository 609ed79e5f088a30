"""Owns the group on the side of an exchange: its membership, and the signs of life by which the exchanges end together.

The first exchange of the MPI program alone makes a new membership, when a node's run has ended, and passes it on whole,
down the tree of `broadcast`; it stays until all have ended. An exchange that hears nothing from its neighbour in the
ring for too long ends the group, as does one whose launcher has gone, so that no node waits for files that cannot come.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

from hpcstage.exchange.broadcast import children_of
from hpcstage.exchange.service import ExchangeService, Silence, Station
from hpcstage.exchange.transport.frames import CONTROL_TAG, ControlFrame, Sort
from hpcstage.exchange.transport.mpi import Mail
from hpcstage.protocol import exchange
from hpcstage.protocol.exchangespec import STANDS
from hpcstage.protocol.membership import Membership


class GroupService(ExchangeService):
    """Owns the signs of life, and who has ended."""

    sorts = (Sort.BEAT, Sort.ENDED, Sort.MEMBERS)

    def __init__(self, station: Station, silence_s: float) -> None:
        super().__init__(station)
        self._silence_s = silence_s
        self._position = station.position
        self._parent = os.pidfd_open(os.getppid())
        self._pieces = exchange.GroupPieces()
        self._told: set[int] = set()
        """Nodes of which the first exchange knows that they have ended."""
        self._beat_due = self._beaten = time.monotonic()

    def begin(self) -> None:
        """Tells the daemon, and the lead, that the group stands."""
        self._announce()

    def take(self, mail: Mail) -> None:
        """Takes a new membership, or that a node has ended."""
        if mail.sort is Sort.ENDED:
            self.station.ended_nodes.update(ControlFrame.unpack(mail.data).ids)
        elif mail.sort is Sort.MEMBERS:
            message = exchange.unpack(bytes(mail.data[1:]))
            found = self._pieces.add(message) if isinstance(message, exchange.Group) else None
            if found is not None and found.generation > self.station.membership.generation:
                self._follow(found)

    def pump(self) -> bool:
        """Says which nodes have ended, and shows and watches for signs of life."""
        self._beat(time.monotonic())
        if not self.station.ended_nodes:
            return False
        ended, self.station.ended_nodes = self.station.ended_nodes - self._told, set()
        if not ended:
            return False
        self._told |= ended
        if self._position == 0:
            self._follow(self.station.membership.without(ended))
        else:
            self.station.post.send(ControlFrame(Sort.ENDED, ids=tuple(sorted(ended))).pack(), 0, CONTROL_TAG)
        return True

    def descriptors(self) -> Sequence[int]:
        """Returns what shows the end of the process that started this one."""
        return (self._parent,)

    def ready(self) -> None:
        """Raises Silence."""
        raise Silence("who started it has gone")

    def next_at(self) -> float:
        """Returns when the next beat is due."""
        return self._beat_due

    def _follow(self, membership: Membership) -> None:
        """Takes a newer membership and passes it on."""
        self.station.membership = membership
        for message in exchange.group_messages(membership):
            packed = bytes((Sort.MEMBERS,)) + exchange.pack(message)
            for child in children_of(self._position, len(self.station.nodes)):
                self.station.post.send(packed, child, CONTROL_TAG)
        self._announce()

    def _announce(self) -> None:
        membership = self.station.membership
        if self._position == 0:
            print(f"{STANDS}{membership.generation}", flush=True)  # noqa: T201  for the lead
        self.station.tell(*exchange.group_messages(membership))

    def _beat(self, now: float) -> None:
        """Sends a beat to the next node of the ring, and raises Silence if nothing has come from the one before for too
        long. Time in which this process was stopped is not counted."""
        heard, nodes = self.station.heard, self.station.nodes
        neighbour = (self._position - 1) % len(nodes)
        if now - self._beaten > self._silence_s / 4:
            heard[neighbour] = now
        self._beaten = now
        if now > self._beat_due:
            self._beat_due = now + self._silence_s / 4
            self.station.post.send(ControlFrame(Sort.BEAT).pack(), (self._position + 1) % len(nodes), CONTROL_TAG)
        if now - heard[neighbour] > self._silence_s:
            raise Silence(f"nothing was heard from node {nodes[neighbour]} for {self._silence_s:g} s")
