"""This node among the nodes of its job: knows whether there is a group, who is in it, and whose manifest counts.

Owns the link to the exchange, the waits for a group and for the manifest, and what the record says of them. The first
node of the group scans and sends its manifest to the others, which stage nothing before they have it; a node that
waits in vain scans and stages alone. `peers` then asks other nodes for files.
"""

from __future__ import annotations

import selectors
import socket
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from hpcstage.daemon.copying.engine import Engine
from hpcstage.daemon.copying.messages import Result
from hpcstage.daemon.peers.firstreader import FirstReader
from hpcstage.daemon.peers.invalidation import Written
from hpcstage.daemon.peers.link import PeerLink, note
from hpcstage.daemon.peers.membership import Membership, Stage, Staged, size_of
from hpcstage.daemon.peers.peers import Peers
from hpcstage.daemon.peers.routes import Members, Routes, make, transit_of
from hpcstage.daemon.process.helpers import Helpers
from hpcstage.daemon.queue.groupqueue import GroupQueue
from hpcstage.daemon.reading.watch import Watch
from hpcstage.plan.order import orders
from hpcstage.plan.placement.placements import Kind
from hpcstage.problem import Problem
from hpcstage.protocol import exchange, nodedir
from hpcstage.protocol.daemonspec import DaemonSpec
from hpcstage.store import directory

MANIFEST_WAIT_S = 600.0
"""The longest wait for the manifest in a group that stands: a scan of a million files takes long."""
MOST_EARLY = 1024


class NodeGroup:
    """Owns what the module says. It exists only where a job has more than one node."""

    def __init__(self, spec: DaemonSpec, selector: selectors.BaseSelector, stage: Stage) -> None:
        self.peers: Peers | None = None
        self.is_closed = False
        """Whether no exchange may connect any more."""
        self.limit = directory.budget(Path(spec.node_dir), spec.budget)
        """The budget of this node, the same for all generations of the group, whatever has been staged since."""
        self._spec = spec
        self._selector = selector
        self._stage = stage
        self._nodes = Membership(spec.node_index, spec.node_count)
        self._first_reader: FirstReader | None = None
        self._link: PeerLink | None = None
        self._early: list[exchange.Ask] = []
        self._routes: Routes | None = None
        """The routes in the group; once this node has left it, the last ones."""
        self._staged: Staged | None = None
        self._directories = 0
        self._scan_at: float | None = None
        """The time at which this node stops waiting for a manifest."""
        self._adopt_at: float | None = None
        """The time at which it stops waiting for a group."""
        self._announces = False
        """Whether this node's manifest may be sent to the others."""
        self._received = False
        """Whether the manifest came from the group."""
        self._stranger = False
        """Whether this node staged alone and has another manifest than the group."""
        self._said = False
        self._written = Written(stage.written_elsewhere)

    def learn(self, helpers: Helpers, watch: Watch) -> None:
        """Begins to compute first readers from what loaders announce."""
        spec = self._spec
        self._first_reader = FirstReader(
            helpers,
            Path(spec.node_dir),
            (spec.node_index, spec.node_count),
            lambda key: watch.dataset(key).rows,
            lambda _: self._switch(),
        )
        watch.on_mapped = self._first_reader.announced

    # ---- the link

    def attach(self, connection: socket.socket) -> None:
        """Takes the connection of the node's exchange, in place of an earlier one."""
        if self._link is not None:
            self._link.close()
            self._ended("a new group was started")
        self._nodes.begin()
        self._link = PeerLink(connection, self._selector, self._message, self._ended)
        spec, limit = self._spec, self.limit
        self._link.send(exchange.Hello(spec.node_index, spec.node_count, limit.size_bytes, limit.inodes))

    def _message(self, message: exchange.Message) -> None:
        now = time.monotonic()
        if isinstance(message, exchange.Ready):
            if self._nodes.take(message):
                self._stands(message.generation, now)
        elif isinstance(message, exchange.Manifest):
            self._on_manifest(message)
        elif isinstance(message, exchange.Gone):
            self._gone(message.node)
        elif isinstance(message, exchange.Written):
            self._written.hear(message.ids)
        elif isinstance(message, exchange.Reading):
            if self.joined:
                self._stage.read_elsewhere(message.ids)
        elif isinstance(message, exchange.Ask) and not self.joined:
            self._ask_early(message)
        elif self.peers is not None:
            _tell(self.peers, message, now)

    def _ask_early(self, message: exchange.Ask) -> None:
        if self._stranger or len(self._early) >= MOST_EARLY:
            self._refuse(message)
        else:
            self._early.append(message)

    def _refuse(self, message: exchange.Ask) -> None:
        if self._link is not None:
            self._link.send(exchange.Offer(message.node, exchange.Why.UNKNOWN, message.ids))

    def _ended(self, why: str) -> None:
        now = time.monotonic()
        note(why)
        self._nodes.end(why)
        self._link = None
        self._early.clear()
        if self.peers is not None:
            if self.peers.connected:
                self.peers.disconnect(now)
            self._adopt_at = self._adopt_at or now + self._spec.group_wait_s
        if self._scan_at is not None:
            self._scan_at = now + self._spec.group_wait_s

    def give_up(self) -> None:
        """Leaves the group for good: this node will never have a manifest, and the others must not wait for it."""
        self.is_closed = True
        if self._link is not None:
            self._link.close()
            self._ended("this node could not scan the datasets")

    def close(self) -> None:
        """Tells the exchange that the run has ended and closes the link."""
        if self._link is not None:
            self._link.send(exchange.End())
            self._link.close()

    # ---- who is there

    @property
    def joined(self) -> bool:
        """Whether this node asks others and is asked."""
        return self.peers is not None and self.peers.connected

    def _stands(self, generation: int, now: float) -> None:
        members = self._nodes.members
        assert members is not None
        self._stranger = False
        note(f"group {generation} stands: {len(members.budgets)} of {members.nodes} nodes")
        if self._nodes.leads:
            if self._scan_at is not None:
                self._scan_at = None
                self._stage.scan()
            self._announce()
        elif self._scan_at is not None:
            self._scan_at = now + MANIFEST_WAIT_S

    def _gone(self, node: int) -> None:
        if self._nodes.lose(node) and self.joined and self.peers is not None and self._nodes.members is not None:
            self.peers.gone(node)
            self._divide(self._nodes.members)
            self._switch()

    # ---- the manifest

    def is_waiting(self) -> bool:
        """Returns, at the start, whether this node waits for the manifest of another one."""
        if self._spec.node_index != 0:
            self._scan_at = time.monotonic() + self._spec.group_wait_s
        return self._scan_at is not None

    def announce(self) -> None:
        """Sends this node's manifest to the others if it leads; called once manifest and plan are written."""
        self._announces = True
        self._announce()

    def _announce(self) -> None:
        if self._announces and self._nodes.leads and self._link is not None and self._nodes.members is not None:
            node_dir = Path(self._spec.node_dir)
            sizes = size_of(node_dir / nodedir.MANIFEST), size_of(node_dir / nodedir.ORDER)
            self._link.send(exchange.Manifest(*sizes, self._directories))
            self._join()

    def _on_manifest(self, message: exchange.Manifest) -> None:
        if self._nodes.leads or self._nodes.members is None:
            return
        if self._staged is None:
            if self._scan_at is not None:
                self._scan_at = None
                self._received = True
                self._stage.stage_received(message.listings)
        elif self._staged.is_groups():
            self._join()
        else:
            self._stranger = True
            self._nodes.why = "this node found other files than the first one"
            for early in self._early:
                self._refuse(early)
            self._early.clear()

    # ---- staging

    def opened(
        self,
        engine: Engine,
        directories: int,
        provenance: str,
        is_wanted: Callable[[int], bool],
        on_received: Callable[[Result], None],
    ) -> None:
        """Begins the sharing of files, as staging begins with the manifest in the node directory."""
        queue, nodes = engine.queue, self._nodes
        assert isinstance(queue, GroupQueue)
        self._staged = Staged(Path(self._spec.node_dir) / nodedir.MANIFEST, engine.manifest)
        self._directories = directories
        self.peers = Peers(engine, queue, is_wanted, on_received)
        if provenance == orders.MANIFEST:
            queue.start_at(len(queue) * nodes.index // nodes.nodes)
        if nodes.members is not None and not nodes.leads and self._received:
            self._join()
        elif self._said:  # the manifest may have come too late; the next group compares it with its own
            self._stranger = True
            self.peers.adopt()
        else:
            self._divide(nodes.supposed(self.limit))
            self._adopt_at = time.monotonic() + self._spec.group_wait_s
        self._written.open()

    def _join(self) -> None:
        members = self._nodes.members
        if self.peers is None or self._link is None or members is None:
            return
        self._divide(members)
        self._adopt_at = None
        self.peers.connect(self._link.send)
        self._written.connect(self._link.send)
        self._switch()
        early, self._early = self._early, []
        for message in early:
            self.peers.asked(message, time.monotonic())

    def _divide(self, members: Members) -> None:
        assert self.peers is not None
        assert self._staged is not None
        index, sizes = self._nodes.index, self._staged.manifest.sizes
        self._routes = make(self._spec.placement, sizes, self._directories, members, index)
        self.peers.divide(self._routes, transit_of(members, index, self._directories))

    def _switch(self) -> None:
        later = None if self._first_reader is None else self._first_reader.known
        if later is not None and self.joined and self.peers is not None:
            self.peers.switch(later)
            note("files are read by their first readers")

    def written(self, ids: Iterable[int]) -> None:
        """Tells the other nodes which files a program of this node writes to: none of them may keep a copy."""
        self._written.tell(ids, self._link.send if self.joined and self._link is not None else None)

    def reading(self, ids: Iterable[int]) -> None:
        """Tells the other nodes which large files a program of this node reads at the source: they do not copy them
        meanwhile."""
        if self.joined and self._link is not None:
            for message in exchange.in_messages(exchange.Reading(tuple(ids))):
                self._link.send(message)

    # ---- the clock

    def poll(self, now: float) -> None:
        """Ends waits that have lasted too long."""
        if self._first_reader is not None and self.joined:
            self._first_reader.poll(self._routes)
        if self._scan_at is not None and now >= self._scan_at:
            self._scan_at = None
            why = f"{self._nodes.why}; waited {self._spec.group_wait_s:g} s"
            self._alone(why if self._link is None else f"no manifest came in {MANIFEST_WAIT_S:g} s")
            self._stage.scan()
        if self._adopt_at is not None and now >= self._adopt_at and self.peers is not None:
            self._adopt_at = None
            if self.peers.is_missing_something:
                self._alone(self._nodes.why)
                self._routes = None
            self.peers.adopt()

    def _alone(self, why: str) -> None:
        note(f"staging alone: {why}")
        self._nodes.why = why
        if not self._said:
            self._said = True
            text = f"node {self._spec.host} (number {self._nodes.index}) staged without the others: {why}"
            remedy = f"see nodes/{self._spec.host}.log and nodes/lead.log in the run directory"
            self._stage.problem(Problem("group-missing", text, remedy))

    def wake_after(self, now: float) -> float | None:
        """Returns the seconds until `poll` has work; None if it has none."""
        waits = [at - now for at in (self._scan_at, self._adopt_at) if at is not None]
        if self.peers is not None and (again := self.peers.wake_after(now)) is not None:
            waits.append(again)
        return max(0.0, min(waits)) if waits else None

    # ---- the record

    @property
    def placement(self) -> tuple[str, str]:
        """The kind of placement that was used, and why."""
        if self._routes is None or not self._nodes.generations:
            return Kind.PRIVATE.value, self._nodes.why
        return self._routes.kind.value, self._routes.why

    def to_json(self) -> dict[str, Any]:
        """Returns NodePart.group."""
        return self._nodes.to_json(None if self._routes is None else self._routes.members)


def _tell(peers: Peers, message: exchange.Message, now: float) -> None:
    if isinstance(message, exchange.Got):
        peers.got(message, now)
    elif isinstance(message, exchange.Ask):
        peers.asked(message, now)
    elif isinstance(message, exchange.Missed):
        peers.missed(message, now)
    elif isinstance(message, exchange.Sent):
        peers.sent(message)
