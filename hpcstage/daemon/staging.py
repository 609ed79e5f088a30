"""Stages the files of a node: copies what `preparing` found, and meanwhile answers wants and writes.

Owns the states SCANNING, STAGING, SETTLED (or MEASURING); `answers` owns the wants that wait, `ordering` what is
announced. It has no socket: the daemon gives it requests and tells it which descriptors are ready.
"""

from __future__ import annotations

import os
import selectors
import time
from collections.abc import Callable, Collection, Container
from pathlib import Path

from hpcstage.daemon.copying.changes import Changes
from hpcstage.daemon.copying.engine import Engine
from hpcstage.daemon.copying.inodes import Inodes
from hpcstage.daemon.copying.messages import Result
from hpcstage.daemon.copying.pool import Pool
from hpcstage.daemon.copying.sightings import Sightings
from hpcstage.daemon.copying.writes import Writes
from hpcstage.daemon.outlook import Outlook
from hpcstage.daemon.peers.nodegroup import NodeGroup
from hpcstage.daemon.peers.peers import Peers
from hpcstage.daemon.preparing import DIRECT_MODE, Preparing
from hpcstage.daemon.process.events import EventKind, Events
from hpcstage.daemon.process.helpers import Helpers
from hpcstage.daemon.process.page import Page
from hpcstage.daemon.process.server import Reply
from hpcstage.daemon.queue.answers import Answers
from hpcstage.daemon.queue.groupqueue import GroupQueue
from hpcstage.daemon.queue.little import Little
from hpcstage.daemon.queue.queue import FINAL, Place, Queue, Verdict
from hpcstage.daemon.queue.unserved import Unserved
from hpcstage.daemon.reading.ordering import Ordering
from hpcstage.daemon.reading.scanning import AUTO_MODE
from hpcstage.daemon.reading.watch import Watch
from hpcstage.node import page
from hpcstage.plan.dataset.manifest import Manifest
from hpcstage.plan.placement.placements import Kind
from hpcstage.plan.types import Order
from hpcstage.problem import Problem
from hpcstage.protocol import nodedir
from hpcstage.protocol.daemonspec import DaemonSpec
from hpcstage.protocol.shim import Answer, Counter, Reason, State
from hpcstage.store import directory
from hpcstage.store.copyfile import Status

EARLY_S = 0.5
"""Until this long after the start a want waits for the end of the scan; later, and where a probe follows the scan, the
program reads the source meanwhile."""
ACTIVE_S = 5.0
"""A process that opened files of the datasets and did nothing with them for this long does not use them now."""
_OPENS = (Counter.HIT_OPENS, Counter.READY_OPENS, Counter.SOURCE_OPENS)


class Staging:
    """Owns the staging and its state. `answer` sends a reply to a token; `on_state` shows the state to the shims."""

    def __init__(
        self,
        spec: DaemonSpec,
        pool: Pool | None,
        helpers: Helpers,
        events: Events,
        watch: Watch,
        answer: Callable[[int, Reply], None],
        on_state: Callable[[State], None],
        started: float,
        selector: selectors.BaseSelector,
        page: Page,
    ) -> None:
        self.spec = spec
        self.node_dir = Path(spec.node_dir)
        self.store = directory.Store(self.node_dir, self._stuck)
        self._page = page
        self._helpers = helpers
        self.pool = pool
        self.engine: Engine | None = None
        self.state = State.STARTING
        self.outlook = Outlook(mode=spec.mode)
        self.programs: Callable[[], Collection[int]] = tuple
        """Returns the pids of the processes that may read the datasets."""
        self.own_bytes: Callable[[], int] = int
        """Returns the bytes that attached processes have read, by the kernel's counters."""
        self.unserved = Unserved()
        self._sightings: Sightings | None = None
        self._opens = 0
        """The number of opens of attached processes at the last look."""
        self._preparing = Preparing(
            spec, helpers, self.outlook, lambda: self.state is State.SCANNING, self._stage, self._give_up
        )
        self.answers = Answers(answer)
        self.ordering = Ordering(spec, helpers, watch, lambda: self.pump(time.monotonic()))
        self._watch = watch
        self._started = started
        self._events = events
        self._answer = answer
        self._on_state = on_state
        self._early_until = started if spec.mode == AUTO_MODE else started + EARLY_S
        self._waiting_for_staged: list[int] = []
        self._little = Little()
        self._early: dict[int, bytes] = {}
        """By token: the paths of wants that came before there was a manifest."""
        self._writes = Writes(helpers, self._voided)
        self._changes = Changes(helpers, self.wrote, self._unseen)
        self._selector = selector
        self._closed_seen = Reason.NONE
        self._why_closed = ""
        self._told_closed = False
        shares = spec.node_count > 1 and spec.placement != Kind.PRIVATE.value
        self.group = NodeGroup(spec, selector, self) if shares else None
        if self.group is not None:
            self.group.learn(helpers, watch)

    # ---- states

    def start(self) -> None:
        """Begins with the scan; in mode direct there is nothing to do."""
        if self.spec.mode == DIRECT_MODE or self.pool is None:
            self._enter(State.MEASURING)
            return
        self._enter(State.SCANNING)
        if self.spec.learn:
            self._watch.start()
        if self.group is None or not self.group.is_waiting():
            self.scan()

    def scan(self) -> None:
        """Starts the scan by which this node makes the manifest."""
        self._preparing.scan()

    def stage_received(self, directories: int) -> None:
        """Takes over the manifest and the order of another node, which lie in the node directory."""
        self._preparing.receive(directories)

    def _enter(self, state: State) -> None:
        self.state = state
        self._on_state(state)

    def _give_up(self, why: str) -> None:
        remedy = f"the program reads the source; the daemon's log is nodes/{self.spec.host}.log in the run directory"
        self.problem(Problem("scan-failed", why, remedy))
        if self.group is not None:
            self.group.give_up()
        self._settle()

    def problem(self, problem: Problem) -> None:
        """Adds a problem to the record."""
        self.outlook.problems.append(problem)

    def _queue(self, manifest: Manifest, order: Order, directories: int) -> Queue:
        spec = self.spec
        limit = directory.budget(self.node_dir, spec.budget) if self.group is None else self.group.limit
        self.outlook.budget = limit
        return (Queue if self.group is None else GroupQueue)(
            manifest.sizes,
            limit,
            order.ids,
            directories=directories,
            max_rate_bytes_per_s=spec.own_rate_bytes_per_s,
            patience_s=spec.patience_s,
            want_cap_s=spec.want_cap_s,
        )

    def _stage(self, manifest: Manifest, order: Order, directories: int) -> None:
        assert self.pool is not None
        queue = self._queue(manifest, order, directories)
        self.engine = Engine(
            manifest,
            queue,
            self.pool,
            self.store,
            on_final=self._final,
            on_result=self._record,
            is_wanted=self.answers.waits_for,
            run_started=self._started,
            on_hold=self._page.hold,
            on_given=self._given,
        )
        self.pool.open_manifest()
        if not manifest.has_links():
            self._page.set_unlinked()
        self._enter(State.STAGING)
        own_scan = self.outlook.scanned is not None
        if own_scan and len(devices := set(manifest.devices)) == 1:
            self._page.set_device(devices.pop())
        self._writes.open(self.engine, Inodes(manifest, self._helpers, own_scan=own_scan))
        self._changes.open(manifest, queue, self._watch_for)
        if self.group is None:
            queue.large.watch()
            self._sightings = Sightings(self._helpers, manifest, self.own_bytes)
        self._preparing.choose()
        if self.outlook.mode == DIRECT_MODE:
            queue.close(Reason.LATER)
        if self.group is not None:
            self.group.opened(self.engine, directories, order.provenance, self.answers.waits_for, self._received)
        self.ordering.open(manifest, queue, order)
        self.look(time.monotonic())
        self._answer_early()
        self.pump(time.monotonic())
        if self.spec.node_index == 0:
            self._preparing.save_plan(manifest, order, self._announce)
        else:
            self._announce()

    def _announce(self) -> None:
        if self.group is not None:
            self.group.announce()

    def close(self, reason: Reason) -> None:
        """Stops copying: what is in flight may finish, nothing more is begun."""
        if self.engine is not None:
            self.engine.queue.close(reason)
            self.pump(time.monotonic())
        elif self.state is State.SCANNING:
            self._settle()

    def _settle(self) -> None:
        self._enter(State.SETTLED)
        self._answer_early()
        self._complete()

    def _complete(self) -> None:
        """Notes that every file that comes without a want is here, and answers those who wait for that."""
        if self.engine is not None and not self.engine.queue.closed and not self.engine.queue.count(Place.REFUSED):
            self.outlook.staged_at = self.outlook.staged_at or self.engine.last_stored or time.monotonic()
        self._note_progress()
        for token in self._waiting_for_staged:
            self._answer(token, Reply(Answer.DONE, keep=True))
        self._waiting_for_staged.clear()

    def _note_progress(self) -> None:
        if self.engine is not None:
            page.note_progress(self.node_dir / nodedir.PAGE, self.engine.progress)

    def _stuck(self, store_path: bytes, why: str) -> None:
        """Closes the store for good, since a stale copy cannot be removed and no program may open it."""
        self._page.close()
        copy = os.fsdecode(store_path)
        self._why_closed = (
            self._why_closed or f"the copy of a file that was written to cannot be removed ({why}): {copy}"
        )

    def look_at_gate(self) -> None:
        """Ends the staging once the store is closed. Programs close it, too, where they cannot tell the daemon that
        they write."""
        if not self._page.is_closed or self._told_closed:
            return
        self._told_closed = True
        why = self._why_closed or "a program wrote below a dataset and could not tell the staging daemon"
        text = f"{why}; from then on the programs on {self.spec.host} read the source"
        remedy = f"check the local disk; the daemon's log is nodes/{self.spec.host}.log in the run directory"
        self.problem(Problem("store-closed", text, remedy))
        self.close(Reason.FAILED)

    # ---- the clock and the copiers

    def pump(self, now: float) -> None:
        """Fills the copiers, answers wants that have waited long enough, and notices when everything is settled."""
        if self.group is not None:
            self.group.poll(now)
        if self._early and now >= self._early_until:
            self._answer_early()
        engine = self.engine
        if engine is None:
            return
        engine.pump(now)
        for id_ in self.answers.expire(now):
            if self.peers is not None:
                self.peers.timed_out(id_, now)
        if engine.queue.closed is not self._closed_seen:
            self._closed_seen = engine.queue.closed
            for id_ in self.answers.wanted():
                if engine.queue.place(id_) in FINAL:
                    self._final(id_)
            if self.peers is not None:
                self.peers.refused()
        if self.peers is not None:
            self.peers.pump(now)
        if self.state is State.STAGING and engine.queue.settled:
            self._settled(engine)

    def _settled(self, engine: Engine) -> None:
        if engine.queue.count(Place.AWAY) and not engine.queue.closed:
            self._complete()  # wants for what other nodes keep are still answered
        else:
            self._settle()

    def look(self, now: float) -> None:
        """Looks, once a tick, at what the program reads at the source itself, which is not copied meanwhile."""
        if self.state is State.STAGING:
            self._note_progress()
        if self.engine is not None and self.state is State.STAGING:
            self.engine.see_use(self.programs, self._page.sums()[Counter.SOURCE_READ_BYTES], now)
            self._yield_to_programs(self.engine, now)
            if self.peers is not None:
                self.peers.hold_back(now)
            if self.group is None and not self.engine.queue.closed:
                self._stop_if_little_is_read(self.engine)
                self._pause_if_unserved(self.engine, now)
        elif self._sightings is not None:
            self._sightings.close()
            self._sightings = None

    def _pause_if_unserved(self, engine: Engine, now: float) -> None:
        if self._sightings is None:
            return
        sums = self._page.sums()
        before, self._opens = self._opens, sum(sums[c] for c in _OPENS)
        if self._opens > before or self._waiting_for_staged or self._page.are_using(ACTIVE_S):
            self._sightings.pass_over(engine.queue.in_flight)
            self._served(now)
            return
        seen = self._sightings.look(self.programs, self._page.pids(), engine.queue.in_flight, now)
        if seen is not None:
            self.unserved.saw(seen, now)
            if self.unserved.is_paused and not engine.is_paused:
                engine.pause()
            engine.is_paused = self.unserved.is_paused

    def _served(self, now: float) -> None:
        """Ends a pause of copying, since a process with the shim uses the datasets."""
        self.unserved.served(now)
        if self.engine is not None:
            self.engine.is_paused = False

    def _given(self, id_: int) -> None:
        if self._sightings is not None:
            self._sightings.given(id_)

    def _stop_if_little_is_read(self, engine: Engine) -> None:
        watch = self._watch
        share = self._little.share(
            watch.opened_files,
            watch.opened_bytes,
            self._page.sums(),
            self._page.attached(),
            lambda: engine.are_mapped(self.programs),
        )
        if share is None:
            return
        text = f"copying was stopped, as the program reads {share:.1%} of the bytes of the files that it opens"
        remedy = "--mode upfront copies all files before the program starts"
        self.problem(Problem("little-read", text, remedy))
        self.close(Reason.LATER)

    @property
    def peers(self) -> Peers | None:
        """The object that exchanges files with other nodes; None before there is a manifest, and without a group."""
        return None if self.group is None else self.group.peers

    def receive(self, fd: int, now: float) -> None:
        """Takes the results of a copier."""
        if self.engine is not None:
            self.engine.receive(fd, now)
            self.pump(now)

    def wake_after(self, now: float) -> float | None:
        """Returns the seconds until `pump` has work by the clock; None if it has none."""
        deadline = self.answers.next_deadline()
        waits = [] if deadline is None else [max(0.0, deadline - now)]
        if self._early:
            waits.append(max(0.0, self._early_until - now))
        if (look := self._watch.look_after(now)) is not None:
            waits.append(look)
        if self.group is not None and (group := self.group.wake_after(now)) is not None:
            waits.append(group)
        if self.engine is not None and (capped := self.engine.queue.wake_after(now)) is not None:
            waits.append(capped)
        if self.engine is not None and (alone := self.engine.alone.wake_after(now)) is not None:
            waits.append(alone)
        return min(waits, default=None)

    def _record(self, result: Result) -> None:
        self._event(result, EventKind.COPIED if result.status is Status.OK else EventKind.FAILED)

    def _received(self, result: Result) -> None:
        self._event(result, EventKind.RECEIVED)

    def _event(self, result: Result, kind: EventKind) -> None:
        now = time.monotonic_ns()
        times = (result.open_ns, result.read_ns, result.write_ns, max(0, now - result.started_ns))
        self._events.add(
            now,
            result.id,
            kind,
            detail=result.status,
            number=result.errno,
            size_bytes=result.size_bytes,
            times_ns=times,
        )

    # ---- wants

    def want(self, token: int, path: bytes, now: float) -> Reply | None:
        """Returns the answer to a want, or None if it comes later: when the copy is there or has taken too long."""
        engine = self.engine
        if self.state is State.SCANNING and now < self._early_until:
            self._early[token] = path
            return None
        if engine is None or self.state not in (State.STAGING, State.SETTLED):
            return self.answers.reply(Reason.SCANNING if self.state is State.SCANNING else Reason.SETTLED)
        id_ = engine.manifest.find_source(path)
        if id_ is None:
            return self.answers.reply(Reason.UNKNOWN)
        self._served(now)
        decision = engine.queue.want(id_, now)
        if decision.verdict is not Verdict.WAIT:
            self._yield_to_programs(engine, now)
            return self.answers.told(decision)
        self.answers.park(id_, token, decision.deadline)
        if engine.queue.place(id_) is Place.FLYING:
            engine.pool.hurry(id_)
        else:
            engine.pump(now)
            if self.peers is not None:
                self.peers.pump(now)
        self._yield_to_programs(engine, now)
        return None

    def _yield_to_programs(self, engine: Engine, now: float) -> None:
        """Holds back the copying of files that programs read at the source, here and in a group on other nodes."""
        engine.yield_to_program(now)
        if self.group is not None and (untold := engine.queue.large.untold(now)):
            self.group.reading(untold)

    def _answer_early(self) -> None:
        """Answers the wants that came early, once the manifest is there or the wait for it is over."""
        early, self._early = self._early, {}
        now = time.monotonic()
        for token, path in early.items():
            reply = self.want(token, path, now)
            if reply is not None:
                self._answer(token, reply)

    def _final(self, id_: int) -> None:
        if self.peers is not None:
            self.peers.final(id_)
        if self.engine is not None:
            self.answers.settle(id_, self.engine.queue)

    def dropped(self, token: int) -> None:
        """Forgets a token whose connection has ended."""
        self._early.pop(token, None)
        self.answers.drop(token)
        if token in self._waiting_for_staged:
            self._waiting_for_staged.remove(token)

    def staged(self, token: int) -> Reply | None:
        """Returns the answer to STAGED, or None if it comes later: when there is nothing more to copy."""
        here = self.engine is not None and self.engine.queue.settled
        if here or self.state in (State.SETTLED, State.MEASURING, State.ENDED):
            return Reply(Answer.DONE, keep=True)
        self._waiting_for_staged.append(token)
        return None

    # ---- writes

    def wrote(self, path: bytes, landed: tuple[int, int] | None = None) -> Reply:
        """Drops the copies of what a program begins to write: when this returns, no stale copy is visible or will be.
        `landed` is the (device, inode) of the file."""
        if self.state is State.SCANNING:
            self._writes.hold(path, landed)
        elif self.engine is not None:
            self._writes.void(path, landed)
            self.pump(time.monotonic())
        return Reply(Answer.DONE)

    def _watch_for(self, fd: int, work: Callable[[], None]) -> None:
        self._selector.register(fd, selectors.EVENT_READ, work)

    def _unseen(self, what: str) -> None:
        text = f"on {self.spec.host}, changes by programs without hpcstage are not noticed in {what}"
        remedy = "if such programs write to the datasets during the job, use --mode direct"
        self.problem(Problem("changes-unseen", text, remedy))

    def _voided(self, ids: Collection[int]) -> None:
        self._tell_parked(ids)
        if self.group is not None:
            self.group.written(ids)

    def _tell_parked(self, ids: Container[int]) -> None:
        for id_ in self.answers.wanted(ids):
            self._final(id_)
        if self.peers is not None:
            self.peers.voided(ids)

    def read_elsewhere(self, ids: Collection[int]) -> None:
        """Holds back the copying of large files that programs of other nodes read at the source."""
        if self.engine is None or self.peers is None:
            return
        now = time.monotonic()
        assert isinstance(self.engine.queue, GroupQueue)
        self.engine.queue.read_elsewhere(ids, now)
        self.engine.yield_to_program(now)
        self.peers.hold_back(now)

    def written_elsewhere(self, ids: list[int]) -> None:
        """Drops the copies of files that programs of other nodes write to: none is visible here, or will be."""
        if self.engine is None:
            return
        known = [id_ for id_ in ids if id_ < len(self.engine.manifest)]
        self.engine.void(known)
        self._tell_parked(frozenset(known))
        self.pump(time.monotonic())
