"""Defines a service of the exchange: it has its kinds of messages, descriptors, a next time and an end.

Owns the form of a service and what the services of an exchange share. Knows no service; the loop serves them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hpcstage.exchange.lane import Lanes
from hpcstage.exchange.transport.frames import Sort
from hpcstage.exchange.transport.mpi import Mail, Post
from hpcstage.protocol import exchange
from hpcstage.protocol.membership import Membership

if TYPE_CHECKING:
    from hpcstage.exchange.daemonlink import DaemonLink


class Silence(Exception):
    """Another exchange said nothing for too long, or the process that started this one has gone."""


@dataclass
class Station:
    """Holds what the services of an exchange share."""

    daemon: DaemonLink
    post: Post
    lanes: Lanes
    membership: Membership
    """The group as it is now. Messages go to positions: see `nodes`."""
    nodes: list[int]
    """The nodes that met, by their position in the MPI program; each stays there when its run has ended."""
    heard: list[float]
    """When something came last from each position."""
    ended_nodes: set[int] = field(default_factory=set)
    """Nodes that have said that their run has ended, for the service of the group."""
    ended: bool = False
    """Whether this node's daemon has said End: it is told nothing more."""
    files_at: float = -math.inf
    """When staged files were last under way here, to which all else gives way."""

    @property
    def position(self) -> int:
        """Returns this node's position."""
        return self.nodes.index(self.daemon.hello.index)

    def place(self, node: int) -> int | None:
        """Returns the position of another node of the group; None if it is not there, or is this node."""
        if node == self.daemon.hello.index or node not in self.nodes or not self.membership.nodes[node].is_present:
            return None
        return self.nodes.index(node)

    def tell(self, *messages: exchange.Message) -> None:
        """Tells the daemon something, if its run goes on."""
        if not self.ended:
            self.daemon.send(*messages)


class ExchangeService:
    """A part of an exchange. The loop gives it its messages and asks it for the rest; by default it has nothing."""

    sorts: tuple[Sort, ...] = ()
    """The messages of other exchanges that it takes."""
    orders: tuple[type[exchange.Message], ...] = ()
    """The messages of the daemon that it takes."""

    def __init__(self, station: Station) -> None:
        self.station = station

    def obey(self, message: exchange.Message) -> None:
        """Takes a message of the daemon."""

    def take(self, mail: Mail) -> None:
        """Takes a message of another exchange; a buffer is to be given back."""

    def pump(self) -> bool:
        """Begins what can be begun. Returns whether anything was."""
        return False

    def report(self) -> None:
        """Tells the daemon what has happened."""

    def left(self, node: int) -> None:
        """Ends all work with a node whose run has ended."""

    def stop(self) -> None:
        """Ends all work for this node, whose run has ended."""

    def descriptors(self) -> Sequence[int]:
        """Returns what wakes the loop when it can be read."""
        return ()

    def ready(self) -> None:
        """Notes that one of the descriptors can be read."""

    def next_at(self) -> float:
        """Returns the time at which `pump` has something to do even if nothing comes."""
        return math.inf
