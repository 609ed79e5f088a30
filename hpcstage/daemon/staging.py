"""Stages the files of a node: copies what `preparing` found, and meanwhile answers wants and writes.

Owns the states STAGING and SETTLED; `answers` owns the wants that wait. It is built when the manifest is there. It has
no socket: the daemon gives it requests and tells it which descriptors are ready.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Container, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from hpcstage.daemon.copying.alone import Reopened
from hpcstage.daemon.copying.changes import Changes
from hpcstage.daemon.copying.engine import Engine
from hpcstage.daemon.copying.inodes import Inodes
from hpcstage.daemon.copying.openfiles import LargeInUse
from hpcstage.daemon.copying.sightings import Pausing
from hpcstage.daemon.copying.writes import Writes
from hpcstage.daemon.inbox import Item
from hpcstage.daemon.part import counted, described, problems
from hpcstage.daemon.peers.nodegroup import NodeGroup, PeerCounts
from hpcstage.daemon.peers.peers import Peers
from hpcstage.daemon.peers.sharing import FileSharing
from hpcstage.daemon.preparing import Phase
from hpcstage.daemon.process.descriptors import Receive
from hpcstage.daemon.process.server import Reply
from hpcstage.daemon.queue.queue import Queue
from hpcstage.daemon.queue.rates import Limits, Verdict
from hpcstage.daemon.queue.states import FINAL, FileState
from hpcstage.daemon.queue.useful import Little
from hpcstage.daemon.reading import scanning
from hpcstage.daemon.reading.ordering import Ordering
from hpcstage.daemon.reading.scanning import AUTO_MODE, DIRECT_MODE, Prepared
from hpcstage.daemon.reading.watch import OpenLog
from hpcstage.daemon.resources import Resources
from hpcstage.daemon.service import Request, Service
from hpcstage.daemon.telemetry import Snapshot
from hpcstage.node import page
from hpcstage.plan.types import Budget
from hpcstage.problem import Problem
from hpcstage.protocol import exchange, nodedir
from hpcstage.protocol.shim import LANDED, Answer, Counter, Kind, Reason, State
from hpcstage.store import directory
from hpcstage.store.pool import CopierPool

if TYPE_CHECKING:
    from hpcstage.record.parts.part import NodePart

PLAN_HELPER = "plan"
LOOK_EVERY_S = 1.0


class Staging(Phase):
    """Owns the staging and its state."""

    kinds = frozenset({Kind.WANT, Kind.WROTE, Kind.LANDED, Kind.STAGED})

    def __init__(
        self, base: Resources, pool: CopierPool, log: OpenLog, prepared: Prepared, group: NodeGroup | None
    ) -> None:
        super().__init__(base)
        self.state = State.STAGING
        self.prepared = prepared
        self.limit = directory.budget(base.node_dir, base.spec.budget) if group is None else group.limit
        """The budget of the store."""
        self.staged_at: float | None = None
        """The time at which all was staged that comes without a want."""
        manifest = prepared.manifest
        pool.open_manifest()
        limits = _limits(base, prepared, self.limit, shared=group is not None)
        queue = Queue(manifest.sizes, limits, prepared.order.ids, read_of=pool.stats.read_of)
        store = directory.Store(base.node_dir, base.gate.close)
        self.engine = Engine(
            manifest,
            queue,
            pool,
            store,
            on_final=self._final,
            on_result=base.events.copied,
            is_wanted=base.answers.waits_for,
            run_started=base.started,
            on_hold=base.page.hold,
            on_given=self._given,
        )
        own_scan = prepared.scanned is not None
        inodes = Inodes(manifest, base.helpers, own_scan=own_scan)
        self._writes = Writes(base.helpers, self.engine, inodes, self._voided)
        self._changes = Changes(base.helpers, base.selector, manifest, queue, self._changed, self._unseen)
        self.ordering = Ordering(base, log, prepared, queue, self._reordered)
        if prepared.mode == DIRECT_MODE:
            queue.states.close(Reason.LATER)
        self.sharing: FileSharing | None = None
        self.pausing: Pausing | None = None
        if group is not None:
            self.sharing = FileSharing(group, prepared, self.engine, self)
            group.participant = self.sharing
        else:
            self.pausing = Pausing(base, self.engine)
        self.reopened = Reopened(base.helpers)
        self._little = Little()
        self._in_use = LargeInUse(self.engine)
        self._waiting_for_staged: list[int] = []
        self._closed_seen = Reason.NONE
        self._next_look = 0.0
        if not manifest.has_links():
            base.page.set_unlinked()
        if own_scan and len(devices := set(manifest.devices)) == 1:
            base.page.set_device(devices.pop())

    def services(self) -> tuple[Service, ...]:
        """See Phase."""
        return self, self.ordering

    # ---- the beginning and the end

    def begin(self, writes: Iterable[Item]) -> None:
        """Voids what was written to before, and looks at what programs read at the source; the page says STAGING, and
        nothing is copied yet."""
        self._writes.void_early()
        for write in writes:
            if isinstance(write, Request):
                self._void(write)
            elif isinstance(write, exchange.Written):
                self._void_elsewhere(write.ids)
        self._look(time.monotonic())

    def publish_plan(self) -> None:
        """Writes the plan in a helper and announces the manifest to the other nodes. In mode auto it announces it only
        afterwards, since they read the decision from the plan; at once where no helper writes the plan."""
        spec, prepared, helper = self.base.spec, self.prepared, None
        if spec.node_index == 0 and prepared.scanned is not None:
            work = partial(scanning.save_plan, spec, self.limit, prepared.mode)
            helper = self.base.helpers.start(PLAN_HELPER, work, lambda _: self._announce())
        if helper is None or spec.mode != AUTO_MODE:
            self._announce()

    def _announce(self) -> None:
        if self.sharing is not None:
            self.sharing.announce()

    def stop(self, reason: Reason) -> None:
        """Stops copying: what is in flight may finish, nothing more is begun."""
        self.engine.queue.states.close(reason)
        self._pump(time.monotonic())

    def drain(self) -> tuple[str, ...]:
        """See Service."""
        self.base.answers.end(Reason.SETTLED)
        self.engine.queue.states.close(Reason.LATER)
        return (PLAN_HELPER,)

    def _complete(self) -> None:
        """Notes that every file that comes without a want is here, and answers those who wait for that."""
        queue = self.engine.queue
        if not queue.states.closed and not queue.states.count(FileState.REFUSED):
            self.staged_at = self.staged_at or self.engine.last_stored or time.monotonic()
        if self.state is State.SETTLED or self._waiting_for_staged:
            self._note_progress()
        for token in self._waiting_for_staged:
            self.base.answer(token, Reply(Answer.DONE, keep=True))
        self._waiting_for_staged.clear()

    def _note_progress(self) -> None:
        page.note_progress(self.base.node_dir / nodedir.PAGE, self.engine.progress)

    # ---- the clock and the copiers

    def work(self, now: float) -> None:
        """See Service."""
        self._pump(now)
        if now >= self._next_look:
            self._next_look = now + LOOK_EVERY_S
            self._look(now)
        if self.state is State.SETTLED and self.base.spec.node_index == 0:
            engine = self.engine
            self.reopened.look(now, engine.alone, lambda ids: [engine.manifest.source_path(id_) for id_ in ids])

    def _pump(self, now: float) -> None:
        """Fills the copiers, answers wants that have waited long enough, and notices when everything is settled."""
        engine, peers, answers = self.engine, self.peers, self.base.answers
        states = engine.queue.states
        engine.pump(now)
        for id_ in answers.expire(now):
            if peers is not None:
                peers.timed_out(id_, now)
        if states.closed is not self._closed_seen:
            self._closed_seen = states.closed
            for id_ in answers.wanted():
                if states.of(id_) in FINAL:
                    self._final(id_)
            if peers is not None:
                peers.refused()
        if peers is not None:
            peers.pump(now)
        if self.state is State.STAGING and engine.queue.settled:
            if states.closed or not states.count(FileState.AWAY):  # else wants for what others keep are still answered
                self.state = State.SETTLED
                self.base.page.set_state(self.state)
                if self.pausing is not None:
                    self.pausing.close()
            self._complete()

    def _look(self, now: float) -> None:
        """Looks, once a tick, at what the program reads at the source itself, which is not copied meanwhile."""
        if self.state is not State.STAGING:
            return
        engine = self.engine
        self._note_progress()
        self._in_use.look(self.base.programs, self.base.page.sums()[Counter.SOURCE_READ_BYTES], now)
        self._yield_to_programs(now)
        if self.peers is not None:
            self.peers.hold_back(now)
        if self.pausing is not None and not engine.queue.states.closed:
            self._stop_if_little_is_read()
            self.pausing.look(now, is_waited_for=bool(self._waiting_for_staged))

    def _stop_if_little_is_read(self) -> None:
        watch = self.ordering.watch
        share = self._little.share(
            watch.opened_files,
            watch.opened_bytes,
            self.base.page.sums(),
            self.base.page.attached(),
            lambda: self._in_use.are_mapped(self.base.programs),
        )
        if share is not None:
            text = f"copying was stopped, as the program reads {share:.1%} of the bytes of the files that it opens"
            remedy = "--mode upfront copies all files before the program starts"
            self.base.problems.append(Problem("little-read", text, remedy))
            self.stop(Reason.LATER)

    @property
    def peers(self) -> Peers | None:
        """The object that exchanges files with other nodes; None without a group."""
        return None if self.sharing is None else self.sharing.peers

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
            None if deadline is None else deadline - now,
            None if self.peers is None else self.peers.wake_after(now),
            self.engine.queue.source.wake_after(now),
            self.engine.alone.wake_after(now),
        )
        return max(0.0, min(wait_s for wait_s in waits if wait_s is not None))

    def _given(self, id_: int) -> None:
        if self.pausing is not None:
            self.pausing.given(id_)

    def _reordered(self) -> None:
        self._pump(time.monotonic())

    # ---- requests

    def request(self, request: Request) -> Reply | None:
        """See Service."""
        if request.kind is Kind.WANT:
            return self._want(request.token, request.payload, time.monotonic())
        if request.kind is Kind.STAGED:
            return self._staged(request.token)
        self._void(request)
        self._pump(time.monotonic())
        return Reply(Answer.DONE)

    def _want(self, token: int, path: bytes, now: float) -> Reply | None:
        """Returns the answer to a want, or None if it comes later: when the copy is there or has taken too long."""
        engine, answers = self.engine, self.base.answers
        id_ = engine.manifest.find_source(path)
        if id_ is None:
            return answers.reply(Reason.UNKNOWN)
        if self.pausing is not None:
            self.pausing.served(now)
        decision = engine.queue.want(id_, now)
        if decision.verdict is not Verdict.WAIT:
            self._yield_to_programs(now)
            return answers.told(decision)
        answers.park(id_, token, decision.deadline)
        if engine.queue.states.of(id_) is FileState.FLYING:
            engine.pool.hurry(id_)
        else:
            engine.pump(now)
            if self.peers is not None:
                self.peers.pump(now)
        self._yield_to_programs(now)
        return None

    def _staged(self, token: int) -> Reply | None:
        """Returns the answer to STAGED, or None if it comes later: when there is nothing more to copy."""
        if self.state is State.SETTLED or self.engine.queue.settled:
            return Reply(Answer.DONE, keep=True)
        self._waiting_for_staged.append(token)
        return None

    def dropped(self, token: int) -> None:
        """See Service."""
        self.base.answers.drop(token)
        if token in self._waiting_for_staged:
            self._waiting_for_staged.remove(token)

    def _yield_to_programs(self, now: float) -> None:
        """Holds back the copying of files that programs read at the source, here and in a group on other nodes."""
        self.engine.yield_to_program(now)
        if self.sharing is not None and (untold := self.engine.queue.large.reads.untold(now)):
            self.sharing.reading(untold)

    def _final(self, id_: int) -> None:
        if self.peers is not None:
            self.peers.final(id_)
        self.base.answers.settle(id_, self.engine.queue)

    # ---- writes

    def _void(self, request: Request) -> None:
        """Drops the copies of what a program begins to write: when this returns, no stale copy is visible or will
        be."""
        landed = None
        if request.kind is Kind.LANDED:
            device, inode = LANDED.unpack_from(request.payload)
            landed = device, inode
        self._writes.void(request.payload if landed is None else request.payload[LANDED.size :], landed)

    def _changed(self, path: bytes) -> None:
        """Drops the copies of what a program without the shim changed."""
        self._writes.void(path)
        self._pump(time.monotonic())

    def _unseen(self, what: str) -> None:
        text = f"on {self.base.spec.host}, changes by programs without hpcstage are not noticed in {what}"
        remedy = "if such programs write to the datasets during the job, use --mode direct"
        self.base.problems.append(Problem("changes-unseen", text, remedy))

    def _voided(self, ids: Collection[int]) -> None:
        self._tell_parked(ids)
        if self.sharing is not None:
            self.sharing.written(ids)

    def _tell_parked(self, ids: Container[int]) -> None:
        for id_ in self.base.answers.wanted(ids):
            self._final(id_)
        if self.peers is not None:
            self.peers.voided(ids)

    # ---- what other nodes say

    def message(self, message: exchange.Message, now: float) -> None:
        """See Phase."""
        if self.sharing is not None:
            self.sharing.message(message, now)

    def read_elsewhere(self, ids: Collection[int]) -> None:
        """Holds back the copying of large files that programs of other nodes read at the source."""
        now = time.monotonic()
        self.engine.queue.large.read_elsewhere(ids, now)
        self.engine.yield_to_program(now)
        if self.peers is not None:
            self.peers.hold_back(now)

    def written_elsewhere(self, ids: Collection[int]) -> None:
        """Drops the copies of files that programs of other nodes write to: none is visible here, or will be."""
        self._void_elsewhere(ids)
        self._pump(time.monotonic())

    def _void_elsewhere(self, ids: Collection[int]) -> None:
        known = [id_ for id_ in ids if id_ < len(self.engine.manifest)]
        self.engine.void(known)
        self._tell_parked(frozenset(known))

    # ---- the record

    def record(self, part: NodePart) -> NodePart:
        """See Service."""
        engine, prepared, unserved = self.engine, self.prepared, None
        if self.pausing is not None:
            unserved = self.pausing.unserved
        part = described(part, prepared, engine, self.limit)
        return replace(
            part,
            staged_s=None if self.staged_at is None else round(self.staged_at - self.base.started, 6),
            totals=counted(part.totals, engine, self.reopened),
            alone=self.reopened.record(engine.alone.record()),
            problems=[*part.problems, *problems(engine, self.limit, unserved, part.host)],
        )

    def snapshot(self, now: float, sums: list[int]) -> Snapshot:
        """See Phase."""
        engine, counts = self.engine, PeerCounts() if self.peers is None else self.peers.counts
        engine.advance(now)
        return Snapshot(
            engine.pool.stats.totals(),
            sums,
            replace(engine.busy),
            queued_files=engine.queue.states.waiting,
            store_bytes=engine.stored_bytes,
            peer_bytes=counts.peer_bytes,
            sent_bytes=counts.sent_bytes,
        )

    def status(self) -> str:
        """See Phase."""
        states = self.engine.queue.states
        counts = ", ".join(f"{state.name.lower()} {states.count(state)}" for state in FileState)
        return f"{super().status()}: {counts}; {self.engine.stored_bytes} bytes in the store"


def _limits(base: Resources, prepared: Prepared, limit: Budget, *, shared: bool) -> Limits:
    spec = base.spec
    rate = spec.own_rate_bytes_per_s
    return Limits(limit, prepared.directories, rate, spec.patience_s, spec.want_cap_s, shared=shared)
