"""Stages the files of a node: copies what `preparing` found, and meanwhile answers requests and writes.

Owns the states STAGING and SETTLED, and the services that the staging consists of: `requests`, `voiding` and
`reading.ordering`. It is built when the manifest is there. It has no socket: the daemon gives it messages and tells it
which descriptors are ready.
"""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from hpcstage.daemon.copying.engine import Engine, Hooks
from hpcstage.daemon.copying.inodes import Inodes
from hpcstage.daemon.copying.openfiles import LargeInUse
from hpcstage.daemon.inbox import Item
from hpcstage.daemon.nodepart import Findings
from hpcstage.daemon.peers.nodegroup import NodeGroup
from hpcstage.daemon.peers.peers import Peers
from hpcstage.daemon.peers.sharing import FileSharing, Neighbours
from hpcstage.daemon.preparing import Phase
from hpcstage.daemon.process.descriptors import Receive
from hpcstage.daemon.queue.queue import Queue
from hpcstage.daemon.queue.rates import Limits
from hpcstage.daemon.queue.states import FileState
from hpcstage.daemon.reading.openwatch import OpenLog
from hpcstage.daemon.reading.ordering import Ordering
from hpcstage.daemon.reading.scanning import Prepared
from hpcstage.daemon.requests import Requests
from hpcstage.daemon.resources import Resources
from hpcstage.daemon.service import Service
from hpcstage.daemon.telemetry import Snapshot
from hpcstage.daemon.usefulness import Usefulness
from hpcstage.daemon.voiding import Voiding
from hpcstage.node import page
from hpcstage.protocol import exchange, nodedir
from hpcstage.protocol.daemonspec import RUNTIME_MODE
from hpcstage.protocol.shim import Kind, Reason, State
from hpcstage.store import storedir
from hpcstage.store.attributes import devices_here
from hpcstage.store.pool import CopierPool

if TYPE_CHECKING:
    from hpcstage.record.parts.part import NodePart

LOOK_EVERY_S = 1.0
FOLLOW_EVERY_S = 0.2
"""The interval at which it is decided anew which large files are copied while programs read some at the source."""
DEVICES_HELPER = "devices"


class Staging(Phase):
    """Owns the staging and its state."""

    kinds: frozenset[Kind] = frozenset()

    def __init__(
        self, base: Resources, pool: CopierPool, log: OpenLog, prepared: Prepared, group: NodeGroup | None
    ) -> None:
        super().__init__(base)
        self.state = State.STAGING
        self.limit = storedir.budget(base.node_dir, base.spec.budget) if group is None else group.limit
        """The budget of the store."""
        manifest, spec = prepared.manifest, base.spec
        pool.open_manifest()
        limits = Limits(
            self.limit,
            prepared.directories,
            spec.own_rate_bytes_per_s,
            shared=group is not None,
            programs_wait=spec.mode == RUNTIME_MODE,
        )
        queue = Queue(manifest.sizes, limits, prepared.order.ids, read_of=pool.stats.read_of)
        hooks = Hooks(
            final=self._final,
            given=self._given,
            hold=base.page.hold,
            is_requested=base.answers.waits_for,
            published=base.page.published,
            voided=base.page.voided,
        )
        store = storedir.Store(base.node_dir, base.gate.close)
        self.engine = engine = Engine(manifest, queue, pool, store, hooks, base.started)
        self.peers = Peers(engine, base.answers.waits_for)
        self._ordering = Ordering(base, log, prepared, queue, self._pump_now)
        self._in_use = LargeInUse(engine, base.helpers)
        self._usefulness = Usefulness(
            base,
            engine,
            self._ordering.watch,
            self._in_use,
            lambda: self.stop(Reason.LATER),
            is_alone=group is None,
        )
        self.sharing = Neighbours()
        if group is not None:
            self.sharing = FileSharing(group, prepared, engine, self.peers, self._written_elsewhere)
            group.participant = self.sharing
        own_scan = prepared.is_own
        self._requests = Requests(base, engine, self.peers, self.sharing, self._usefulness)
        inodes = Inodes(manifest, base.helpers, own_scan=own_scan)
        self._voiding = Voiding(base, engine, inodes, self._requests, self.sharing, self._pump_now)
        self._findings = Findings(base, engine, self.limit, self._usefulness.unserved)
        self._next_look = self._next_follow = 0.0
        if not manifest.has_links():
            base.page.set_unlinked()
        _learn_devices(base, engine, own_scan=own_scan)

    def services(self) -> tuple[Service, ...]:
        """See Phase."""
        return self, self._requests, self._voiding, self._ordering, self._findings

    # ---- the beginning and the end

    def begin(self, writes: Iterable[Item]) -> None:
        """Voids what was written to before, and looks at what programs read at the source; the page says STAGING, and
        nothing is copied yet."""
        self._voiding.begin(writes)
        self._look(time.monotonic())

    def stop(self, reason: Reason) -> None:
        """Stops copying: what is in flight may finish, nothing more is begun."""
        self.engine.queue.states.close(reason)
        self._pump_now()

    def drain(self) -> tuple[str, ...]:
        """See Service."""
        self.base.answers.end(Reason.SETTLED)
        self.engine.queue.states.close(Reason.LATER)
        return ()

    def _complete(self) -> None:
        """Notes that every file that comes without a request is here, and answers those who wait for that."""
        self._findings.staged()
        if self.state is State.SETTLED or self._requests.are_waiting_for_staged:
            self._note_progress()
        self._requests.staged(is_settled=self.state is State.SETTLED)

    def _note_progress(self) -> None:
        page.note_progress(self.base.node_dir / nodedir.PAGE, self.engine.progress)

    # ---- the clock and the copiers

    def work(self, now: float) -> None:
        """See Service."""
        if self._follows(now):
            if now >= self._next_follow:
                self.engine.follow(now)
                self._next_follow = now + FOLLOW_EVERY_S
            self.sharing.reading(now)
        self._pump(now)
        if now >= self._next_look:
            self._look(now)
            self._next_look = now + LOOK_EVERY_S

    def _follows(self, now: float) -> bool:
        """Returns whether large files are read at the source, or shown while they come."""
        large = self.engine.queue.large
        return bool(large.shown) or (self.state is State.STAGING and bool(large.reads.ids(now)))

    def _pump(self, now: float) -> None:
        """Fills the copiers, answers requests that have waited long enough, and notices when everything is settled."""
        self.engine.pump(now)
        self._requests.look(now)
        self.peers.pump(now)
        states = self.engine.queue.states
        if self.state is State.STAGING and self.engine.queue.settled:
            if states.closed or not states.count(
                FileState.REMOTE
            ):  # else requests for what others keep are still answered
                self.state = State.SETTLED
                self.base.page.set_state(self.state)
                self._usefulness.close()
            self._complete()

    def _pump_now(self) -> None:
        self._pump(time.monotonic())

    def _look(self, now: float) -> None:
        """Looks, once a tick, at what the program reads at the source itself, which is not copied meanwhile."""
        if self.state is not State.STAGING:
            return
        self._note_progress()
        self._in_use.look(self.base.programs, self.base.page.attached.sums(), now)
        self._requests.yield_to_programs(now)
        self.peers.offers.defer(now)
        self._usefulness.look(now, is_waited_for=self._requests.are_waiting_for_staged)

    def descriptors(self) -> Mapping[int, Receive]:
        """See Service."""
        return dict.fromkeys(self.engine.pool.fds(), self._receive)

    def _receive(self, fd: int) -> bool:
        """Takes the results of a copier."""
        now = time.monotonic()
        self.engine.receive(fd, now)
        self._pump(now)
        return fd not in self.engine.pool.fds()

    def wake_after(self, now: float) -> float | None:
        """See Service."""
        deadline = self.base.answers.next_deadline()
        waits = (
            self._next_look - now,
            self._next_follow - now if self._follows(now) else None,
            None if deadline is None else deadline - now,
            self.peers.wake_after(now),
            self.engine.queue.wake_after(now),
        )
        return max(0.0, min(wait_s for wait_s in waits if wait_s is not None))

    # ---- what is passed on

    def _final(self, id_: int) -> None:
        self._requests.final(id_)

    def _given(self, id_: int) -> None:
        self._usefulness.given(id_)

    def _written_elsewhere(self, ids: Collection[int]) -> None:
        self._voiding.elsewhere(ids)

    def message(self, message: exchange.Message, now: float) -> None:
        """See Phase."""
        self.sharing.message(message, now)

    def record(self, part: NodePart) -> NodePart:
        """Says what nodes of another job had, where this node has no group that would say it."""
        counts = self.peers.received.counts
        if not counts.peer_files or part.group is not None:
            return part
        totals = replace(part.totals, peer_bytes=counts.peer_bytes, peer_files=counts.peer_files)
        return replace(part, totals=totals)

    def snapshot(self, now: float, sums: list[int]) -> Snapshot:
        """See Phase."""
        self.engine.advance(now)
        peer_bytes = self.peers.received.counts.peer_bytes
        return Snapshot(self.engine.pool.stats.totals(), sums, replace(self.engine.busy), peer_bytes)

    def status(self) -> str:
        """See Phase."""
        states = self.engine.queue.states
        counts = ", ".join(f"{state.name.lower()} {states.count(state)}" for state in FileState)
        return f"{super().status()}: {counts}; {self.engine.copies.size_bytes} bytes in the store"


def _learn_devices(base: Resources, engine: Engine, *, own_scan: bool) -> None:
    """Finds out which device each of the manifest's devices is on this node: the same where this node scanned, else a
    helper looks."""
    manifest = engine.manifest
    devices = set(manifest.devices)

    def learn(found: Mapping[int, int | None]) -> None:
        engine.copies.attributes.learn(found)
        base.page.published()  # copies that came before have their attributes now

    if own_scan:
        if len(devices) == 1:
            base.page.set_device(*devices)
        learn({device: device for device in devices})
        return
    started = base.helpers.start(
        DEVICES_HELPER,
        lambda: json.dumps(list(devices_here(manifest).items())).encode(),
        lambda found: learn(dict(json.loads(found or b"[]"))),
    )
    if started is None:
        learn({})
