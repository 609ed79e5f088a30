"""Shares files with the other nodes of the group, once this node has a manifest.

Owns which manifest is staged, whether this node is in a group that has the same one, and the writes that it has told
the others. `peers` asks other nodes for files.
"""

from __future__ import annotations

import os
import time
from array import array
from collections import deque
from collections.abc import Callable, Collection, Iterable
from itertools import compress, count

from hpcstage.daemon.copying.engine import Engine
from hpcstage.daemon.inbox import Inbox
from hpcstage.daemon.peers.groupstate import Staged
from hpcstage.daemon.peers.nodegroup import NodeGroup
from hpcstage.daemon.peers.peers import Peers
from hpcstage.daemon.peers.received import PeerCounts
from hpcstage.daemon.peers.routes import ALL_DEALT, Estate, Inquiry, Routes, make, temporary_budget_of
from hpcstage.daemon.queue.states import FileState
from hpcstage.daemon.reading.scanning import Prepared
from hpcstage.plan.order import orders
from hpcstage.problem import Problem
from hpcstage.protocol import exchange, nodedir
from hpcstage.protocol.membership import Membership


class Neighbours:
    """The other nodes of a node without a group: there are none to be told anything. See FileSharing for a group."""

    def announce(self) -> None:
        """Sends this node's manifest to the others if it leads; called once staging has begun."""

    def message(self, message: exchange.Message, now: float) -> None:
        """Takes a message of the exchange or of another node."""

    told = confirmed = 0
    """Until the second number is as high as the first, other nodes may open copies of files that were written to."""

    def written(self, ids: Iterable[int]) -> None:
        """Tells the other nodes which files a program of this node writes to: none of them may keep a copy."""

    def unconfirmed(self, path: bytes) -> None:
        """Notes that a write was answered although other nodes may have a copy of its file."""

    def reading(self, now: float) -> None:
        """Tells the other nodes which large files programs of this node read at the source: they do not copy them
        meanwhile, but for those that they are told to bring together with this node."""


class FileSharing(Neighbours):
    """Takes part in the group with a manifest; see nodegroup.Participant. It calls `on_written` with files that
    programs of other nodes write to. A node that is in no group is told no writes: its programs may read copies that
    were staged before."""

    def __init__(
        self,
        group: NodeGroup,
        prepared: Prepared,
        engine: Engine,
        peers: Peers,
        on_written: Callable[[Collection[int]], None],
    ) -> None:
        base, nodes = group.base, group.nodes
        self.routes: Routes | None = None
        self._group_until: float | None = None
        """The time at which this node stops waiting for a group."""
        self._inquiry = Inquiry()
        self._group = group
        self._engine = engine
        self._peers = peers
        self._on_written = on_written
        self._directories = prepared.directories
        self._staged = Staged(base.node_dir / nodedir.MANIFEST, prepared.manifest)
        self._early = Inbox()
        """The files that nodes of the group ask for before this node has joined it."""
        self._written = bytearray(len(prepared.manifest))
        """By id: 1 where a program of this node writes to it. A group that is started anew is told them again."""
        self._untold: set[int] = set()
        """The nodes of a group that was started anew that have not told theirs yet; this one serves nothing before."""
        self._apart_until: float | None = None
        """Until when this node serves nothing, since other nodes may write without its knowing."""
        self._many: deque[tuple[int, ...]] = deque()
        """Many files that programs of other nodes write to: until all are voided this node serves nothing."""
        self._is_written = False
        """Whether programs of the job write to files of the datasets."""
        self._announces = False
        """Whether this node's manifest may be sent to the others."""
        self._is_stranger = False
        """Whether this node staged alone and has another manifest than the group."""
        if prepared.order.provenance == orders.MANIFEST:
            engine.queue.sequences.start_at(len(prepared.manifest) * nodes.index // nodes.nodes)
        if nodes.members is not None and not nodes.leads and not prepared.is_own:
            self._join()
        elif group.is_alone:  # the manifest may have come too late; the next group compares it with its own
            self._is_stranger = True
            self._peers.adopt()
        else:
            self._divide(nodes.supposed(group.limit))
            self._group_until = time.monotonic() + base.spec.group_wait_s

    @property
    def wait_until(self) -> float | None:
        """See Participant."""
        times = (self._group_until, self._apart_until, self._inquiry.until, 0.0 if self._many else None)
        found = [until for until in times if until is not None]
        return min(found, default=None)

    @property
    def counts(self) -> PeerCounts:
        """See Participant."""
        return self._peers.received.counts

    @property
    def joined(self) -> bool:
        """Whether this node asks others and is asked."""
        return self._peers.connected

    # ---- the group

    def stands(self, now: float) -> None:
        """See Participant."""
        self._is_stranger = False
        members = self._group.nodes.members
        if self._apart_until is not None and members is not None:
            self._untold = set(members.present) - {self._group.nodes.index}
            self._apart_until = now + self._group.base.spec.group_wait_s
        self._announce()

    def announce(self) -> None:
        """See Neighbours."""
        self._announces = True
        self._announce()

    def _announce(self) -> None:
        nodes = self._group.nodes
        if self._announces and nodes.leads and nodes.members is not None:
            self._group.send(exchange.PlanFiles(self._directories))
            self._join()

    def _compare(self, directories: int) -> None:
        """Joins the group if its manifest names the same files. All nodes count its directories: they divide the files
        alike."""
        nodes = self._group.nodes
        if nodes.leads or nodes.members is None:
            return
        if self._staged.is_groups():
            self._directories = directories
            self._join()
            return
        self._is_stranger = True
        self._send_written(())
        nodes.why = "this node found other files than the first one"
        for early in self._early.take_asks():
            self._refuse(early)

    def _join(self) -> None:
        members = self._group.nodes.members
        if members is None:
            return
        self._group_until = None
        self._follow(members, time.monotonic())
        self._peers.connect(self._group.send)
        self._tell_written(array("I", compress(count(), self._written)))
        self._send_written(())
        for early in self._early.take_asks():
            self._peers.asked(early, time.monotonic())

    def _follow(self, members: Membership, now: float) -> None:
        """Divides the files among the nodes that are there. Those of missing nodes follow when all have said what they
        have of them."""
        if not members.missing:
            self._inquiry.end()
            self._divide(members)
            return
        self._divide(members, Estate(is_divided=False))
        assert self.routes is not None
        own = self._group.nodes.index
        here = [id_ for id_ in self.routes.left() if self._engine.queue.states.of(id_) is FileState.STORED]
        for message in exchange.in_messages(exchange.Holdings(own, tuple(here))):
            self._group.send(message)
        self._group.send(exchange.Holdings(own, ()))
        self._inquiry.begin((node for node in members.present if node != own), now)

    def _take_over(self, members: Membership) -> None:
        """Divides the files of missing nodes, too."""
        self._inquiry.end()
        assert self.routes is not None
        states = self._engine.queue.states
        here = {id_ for id_ in self.routes.left() if states.of(id_) is FileState.STORED}
        self._divide(members, self._inquiry.estate(members.present, here))

    def _divide(self, members: Membership, estate: Estate = ALL_DEALT) -> None:
        index, sizes = self._group.nodes.index, self._staged.manifest.sizes
        self.routes = make(self._group.base.spec.placement, sizes, self._directories, members, index, estate)
        self._peers.divide(self.routes, temporary_budget_of(members, index, self._directories))

    def gone(self, node: int) -> None:
        """See Participant."""
        self._has_told(node)
        members = self._group.nodes.members
        if self.joined and members is not None:
            self._peers.offers.drop(node)
            self._follow(members, time.monotonic())

    def ended(self, now: float) -> None:
        """See Participant."""
        self._early.take_asks()
        if self._is_written and self._group.nodes.groups:
            self._apart_until = now + self._group.base.spec.group_wait_s
            self._show_apart()
        if self.joined:
            self._peers.disconnect(now)
        self._inquiry.end()
        self._group_until = self._group_until or now + self._group.base.spec.group_wait_s

    def poll(self, now: float) -> None:
        """See Participant. A node that has waited for too long reads everything from the source."""
        if self._many:
            self._on_written(self._many.popleft())
            self._show_apart()
        members = self._group.nodes.members
        if members is not None and self.joined and self._inquiry.is_over(now):
            self._take_over(members)
        if self._apart_until is not None and now >= self._apart_until:
            self._apart_until = None
            self._group.base.gate.close_for("programs of other nodes may write below a dataset, and cannot tell it")
        if self._group_until is None or now < self._group_until:
            return
        self._group_until = None
        if self._is_missing_something():
            self._group.alone(self._group.nodes.why)
            self.routes = None
        self._peers.adopt()

    def _is_missing_something(self) -> bool:
        """Returns whether files are yet to come from other nodes."""
        states = self._engine.queue.states
        return states.waiting > states.ordered(from_peers=False) or states.count(FileState.REMOTE) > 0

    # ---- messages

    def message(self, message: exchange.Message, now: float) -> None:
        """See Participant."""
        if isinstance(message, exchange.PlanFiles):
            self._compare(message.listings)
        elif isinstance(message, exchange.Written):
            self._written_elsewhere(message)
        elif isinstance(message, exchange.Confirmed):
            self.confirmed = max(self.confirmed, message.number)
        elif isinstance(message, exchange.Holdings):
            self._inquiry.heard(message.node, message.ids)
        elif isinstance(message, exchange.Reading):
            self._read_elsewhere(message, now)
        elif isinstance(message, exchange.Together):
            if self.joined:
                self._engine.queue.large.together_with(message.id, message.ids)
        elif isinstance(message, exchange.Got):
            self._peers.got(message, now)
        elif isinstance(message, exchange.Ask):
            self._asked(message, now)
        elif isinstance(message, exchange.Missed):
            self._peers.missed(message, now)
        elif isinstance(message, exchange.Sent):
            self._peers.received.sent(message)

    def _written_elsewhere(self, message: exchange.Written) -> None:
        """Voids files that programs of other nodes write to: many, as those of a directory, when there is time."""
        self._is_written = self._is_written or bool(message.ids)
        if len(message.ids) == exchange.MAX_IDS:
            self._many.append(message.ids)
            self._show_apart()
        elif message.ids:
            self._on_written(message.ids)
        else:
            self._has_told(message.node)

    def _read_elsewhere(self, message: exchange.Reading, now: float) -> None:
        """Holds back the copying of large files that programs of other nodes read at the source."""
        if self.joined:
            self._engine.queue.large.read_elsewhere(message.ids, message.node, now)
            self._engine.follow(now)
            self._peers.offers.defer(now)

    def _asked(self, message: exchange.Ask, now: float) -> None:
        if self.joined:
            self._peers.asked(message, now)
        elif self._is_stranger or not self._early.keep(message):
            self._refuse(message)

    def _refuse(self, message: exchange.Ask) -> None:
        self._group.send(exchange.Offer(message.node, exchange.Why.UNKNOWN, message.ids))

    def written(self, ids: Iterable[int]) -> None:
        """See Neighbours."""
        new = array("I", (id_ for id_ in ids if not self._written[id_]))
        for id_ in new:
            self._written[id_] = 1
        self._is_written = self._is_written or bool(new)
        if new and self.joined:
            self._tell_written(new)
        elif new and self._group.nodes.groups and self._group_until is not None:
            self.told += 1  # the next group is told, and confirms it with what it is told then
        elif new and self._group.nodes.groups:
            self.unconfirmed(self._staged.manifest.source_path(new[0]))

    def _tell_written(self, ids: array[int]) -> None:
        for start in range(0, len(ids), exchange.MAX_IDS):
            self._send_written(ids[start : start + exchange.MAX_IDS])

    def _send_written(self, ids: Iterable[int]) -> None:
        self.told += 1
        self._group.send(exchange.Written(self._group.nodes.index, self.told, tuple(ids)))

    def unconfirmed(self, path: bytes) -> None:
        """See Neighbours."""
        base = self._group.base
        if all(problem.id != "write-unconfirmed" for problem in base.problems):
            name, host = os.fsdecode(path) or "a file with several names", base.spec.host
            text = f"a program on {host} wrote to {name}, and not all other nodes said that they serve no copy of it"
            remedy = f"what is read there may be old; see nodes/lead.log and nodes/{host}.log in the run directory"
            base.problems.append(Problem("write-unconfirmed", text, remedy))

    def _has_told(self, node: int) -> None:
        """Serves again once all nodes of a group that was started anew have told what is written to on them."""
        self._untold.discard(node)
        if self._apart_until is not None and not self._untold and self._group.nodes.members is not None:
            self._apart_until = None
            self._show_apart()

    def _show_apart(self) -> None:
        self._group.base.page.set_apart(is_apart=self._apart_until is not None or bool(self._many))

    def reading(self, now: float) -> None:
        """See Neighbours."""
        large = self._engine.queue.large
        untold = large.reads.untold(now)
        if self.joined and untold:
            for message in exchange.in_messages(exchange.Reading(self._group.nodes.index, tuple(untold))):
                self._group.send(message)
        for id_, nodes in large.joint.untold().items():
            self._group.send(exchange.Together(id_, nodes))
