"""This node among the nodes of its job: knows whether there is a group, who is in it, and whose manifest counts.

Owns the link to the exchange, the waits for a group and for the manifest, and what the record says of them. The first
node of the group scans and sends its manifest to the others, which stage nothing before they have it; a node that
waits in vain scans and stages alone. `Awaiting` handles messages until this node has a manifest, `FileSharing` from
then on.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from hpcstage.daemon.inbox import Inbox
from hpcstage.daemon.peers.exchangelink import PeerLink, note
from hpcstage.daemon.peers.groupstate import GroupState
from hpcstage.daemon.peers.received import PeerCounts
from hpcstage.daemon.peers.routes import Routes
from hpcstage.daemon.process.server import Reply
from hpcstage.daemon.resources import Resources
from hpcstage.daemon.service import Message, Service
from hpcstage.plan.placement.placements import Placing
from hpcstage.problem import Problem
from hpcstage.protocol import exchange
from hpcstage.protocol.shim import Answer, Kind
from hpcstage.store import storedir

if TYPE_CHECKING:
    from hpcstage.record.parts.part import NodePart

MANIFEST_WAIT_S = 600.0
"""The longest wait for the manifest in a group that stands: a scan of a million files takes long."""


class Participant(Protocol):
    """Takes part in the group for this node: `Awaiting` as long as there is no manifest, then `FileSharing`."""

    routes: Routes | None
    """The routes in the group; once this node has left it, the last ones."""

    @property
    def wait_until(self) -> float | None:
        """The time at which a wait for other nodes ends."""

    @property
    def counts(self) -> PeerCounts:
        """The counts of files that nodes passed on."""

    def stands(self, now: float) -> None:
        """Begins to take part, since a group stands."""

    def message(self, message: exchange.Message, now: float) -> None:
        """Takes a message of the exchange or of another node."""

    def gone(self, node: int) -> None:
        """Goes on without a node that has left the group."""

    def ended(self, now: float) -> None:
        """Stops taking part, since the group has ended; there may be another one."""

    def poll(self, now: float) -> None:
        """Ends a wait that has lasted too long."""


class NodeGroup(Service):
    """Owns the link to the exchange and the group's state. It exists only where a job has more than one node."""

    kinds = frozenset({Kind.PEER})

    def __init__(
        self,
        base: Resources,
        inbox: Inbox,
        hand_over: Callable[[int], socket.socket | None],
        scan: Callable[[], None],
        receive: Callable[[int], None],
    ) -> None:
        """`scan` starts the scan by which this node makes the manifest. `receive` takes over the manifest of another
        node, with its number of directories. `hand_over` gives the connection of a token away."""
        self.base = base
        self.limit = storedir.budget(base.node_dir, base.spec.budget)
        """The budget of this node, the same for all generations of the group, whatever has been staged since."""
        self.nodes = GroupState(base.spec.node_index, base.spec.membership)
        self.is_alone = False
        """Whether this node has staged without the others for a while; the record says so."""
        self._hand_over = hand_over
        self._link: PeerLink | None = None
        self._is_closed = False
        """Whether no exchange may connect any more."""
        self.participant: Participant = Awaiting(self, inbox, scan, receive)

    @classmethod
    def idle(cls, base: Resources, hand_over: Callable[[int], socket.socket | None]) -> NodeGroup:
        """Returns a group whose nodes share no files: checkpoint agents talk over its exchange."""
        group = cls(base, Inbox(), hand_over, lambda: None, lambda _: None)
        group.participant = _Idle()
        return group

    # ---- the link

    def handle(self, message: Message) -> Reply | None:
        """Takes the connection of the node's exchange, in place of an earlier one."""
        if self._is_closed:
            return Reply(Answer.REFUSED)
        connection = self._hand_over(message.token)
        if connection is None:
            return None
        if self._link is not None:
            self._link.send(exchange.Replaced())
            self._link.close()
            self._ended("a new group was started")
        self.nodes.begin()
        self._link = PeerLink(connection, self.base.selector, self._message, self._ended)
        self.send(exchange.Hello(self.nodes.index, self.limit.size_bytes, self.limit.inodes))
        return None

    def send(self, message: exchange.Message) -> None:
        """Sends a message if there is an exchange."""
        if self._link is not None:
            self._link.send(message)

    def _message(self, message: exchange.Message) -> None:
        now = time.monotonic()
        if isinstance(message, exchange.Group):
            self._follow(message, now)
        else:
            self.participant.message(message, now)
            if isinstance(message, exchange.Written):
                self.send(exchange.Confirmed(message.node, message.number))

    def _follow(self, message: exchange.Group, now: float) -> None:
        before = self.nodes.members
        left = self.nodes.take(message)
        members = self.nodes.members
        if left is not None and members is not None:
            note(f"group {members.generation} stands: {len(members.present)} of {len(members)} nodes")
            if before is None:
                self.participant.stands(now)
            for node in left:
                self.participant.gone(node)

    def _ended(self, why: str) -> None:
        note(why)
        self.nodes.end(why)
        self._link = None
        self.participant.ended(time.monotonic())

    def give_up(self) -> None:
        """Leaves the group for good: this node will never have a manifest, and the others must not wait for it."""
        self._is_closed = True
        if self._link is not None:
            self._link.close()
            self._ended("this node could not scan the datasets")

    def alone(self, why: str) -> None:
        """Notes that this node stages without the others."""
        note(f"staging alone: {why}")
        self.nodes.why = why
        if not self.is_alone:
            self.is_alone = True
            host, spec = self.base.spec.host, self.base.spec
            text = f"node {host} (number {spec.node_index}) staged without the others: {why}"
            remedy = f"see nodes/{host}.log and nodes/lead.log in the run directory"
            self.base.problems.append(Problem("group-missing", text, remedy))

    # ---- the service

    def work(self, now: float) -> None:
        """See Service."""
        self.participant.poll(now)

    def wake_after(self, now: float) -> float | None:
        """See Service."""
        until = self.participant.wait_until
        return None if until is None else max(0.0, until - now)

    def drain(self) -> tuple[str, ...]:
        """Tells the exchange that the run has ended and closes the link."""
        self._is_closed = True
        if self._link is not None:
            self._link.finish(exchange.End())
        return ()

    def record(self, part: NodePart) -> NodePart:
        """Says how files were shared, and with whom."""
        routes, counts = self.participant.routes, self.participant.counts
        placement, why = Placing.PRIVATE, self.nodes.why
        if routes is not None and self.nodes.groups:
            placement, why = routes.kind, routes.why
        totals = replace(
            part.totals,
            peer_bytes=counts.peer_bytes,
            peer_files=counts.peer_files,
        )
        group = self.nodes.record()
        return replace(part, totals=totals, placement=placement.value, placement_why=why, group=group)


class _Idle:
    """Takes no part; see Participant."""

    routes: Routes | None = None
    wait_until: float | None = None
    counts = PeerCounts()

    def stands(self, now: float) -> None:
        """See Participant."""

    def message(self, message: exchange.Message, now: float) -> None:
        """See Participant."""

    def gone(self, node: int) -> None:
        """See Participant."""

    def ended(self, now: float) -> None:
        """See Participant."""

    def poll(self, now: float) -> None:
        """See Participant."""


class Awaiting:
    """Waits for the manifest of another node; see Participant. The first node does not wait, it scans."""

    routes: Routes | None = None
    counts = PeerCounts()

    def __init__(
        self, group: NodeGroup, inbox: Inbox, scan: Callable[[], None], receive: Callable[[int], None]
    ) -> None:
        spec = group.base.spec
        self.wait_until: float | None = time.monotonic() + spec.group_wait_s if spec.node_index else None
        self._group = group
        self._wait_s = spec.group_wait_s
        self._inbox = inbox
        self._scan = scan
        self._receive = receive

    def stands(self, now: float) -> None:
        """See Participant. A node that waited and leads now scans."""
        if self.wait_until is None:
            return
        if self._group.nodes.leads:
            self.wait_until = None
            self._scan()
        else:
            self.wait_until = now + MANIFEST_WAIT_S

    def message(self, message: exchange.Message, now: float) -> None:  # noqa: ARG002
        """See Participant. What other nodes ask for and write to is kept until there is a manifest; the group's counts
        also where this node has begun to scan."""
        if isinstance(message, exchange.PlanFiles):
            nodes = self._group.nodes
            if nodes.members is not None and not nodes.leads:
                self.wait_until = None
                self._receive(message.listings)
        elif isinstance(message, exchange.Written):
            self._inbox.keep(message)
        elif isinstance(message, exchange.Ask) and not self._inbox.keep(message):
            self._group.send(exchange.Offer(message.node, exchange.Why.UNKNOWN, message.ids))

    def gone(self, node: int) -> None:
        """See Participant."""

    def ended(self, now: float) -> None:
        """See Participant."""
        self._inbox.take_asks()
        if self.wait_until is not None:
            self.wait_until = now + self._wait_s

    def poll(self, now: float) -> None:
        """See Participant. A node that has waited for too long scans itself."""
        if self.wait_until is None or now < self.wait_until:
            return
        self.wait_until = None
        stood = self._group.nodes.members is not None
        why = f"no manifest came in {MANIFEST_WAIT_S:g} s" if stood else f"waited {self._wait_s:g} s"
        self._group.alone(why if stood else f"{self._group.nodes.why}; {why}")
        self._scan()
