"""The staging daemon of a node: one event loop, from the scan to the removal of the node directory.

Owns lifecycle, clock and signals. It lives while a wrapper is attached, or a child whose wrapper was killed runs.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from hpcstage.daemon import part as nodepart
from hpcstage.daemon.copying.alone import Reopened
from hpcstage.daemon.copying.copier import CopierSettings
from hpcstage.daemon.copying.engine import Busy
from hpcstage.daemon.copying.pool import Pool
from hpcstage.daemon.preparing import DIRECT_MODE, PLAN_HELPER
from hpcstage.daemon.process import signals
from hpcstage.daemon.process.descriptors import Descriptors
from hpcstage.daemon.process.events import Events
from hpcstage.daemon.process.helpers import Helpers
from hpcstage.daemon.process.looks import Looks
from hpcstage.daemon.process.page import Page
from hpcstage.daemon.process.proc import descendants
from hpcstage.daemon.process.server import Reply, Server, open_listener
from hpcstage.daemon.process.slots import Slots
from hpcstage.daemon.process.wrappers import Wrappers
from hpcstage.daemon.queue.queue import Place
from hpcstage.daemon.reading import lists
from hpcstage.daemon.reading.ordering import TRACE_HELPER
from hpcstage.daemon.reading.watch import Watch
from hpcstage.daemon.staging import Staging
from hpcstage.daemon.telemetry import Reading, Sampler
from hpcstage.errors import HpcstageError
from hpcstage.node import directory as node_directory
from hpcstage.protocol import nodedir
from hpcstage.protocol.daemonspec import DaemonSpec
from hpcstage.protocol.shim import END, LANDED, Answer, Kind, Layer, Reason, State
from hpcstage.record.parts.part import write_part
from hpcstage.store import directory
from hpcstage.store.counters import Totals

TICK_S = 1.0
PART_EVERY_S = 10.0
MISSED_EVERY_S = 2.0
POOL_END_S = 1.0
MOST_MISTAKES = 100
LEAST_WRITE_S = 2.0
SWEEP_END_S = 2.0
"""The longest wait at the end for the removal of what earlier runs left, which may take longer than a short command."""
OWN_DRAIN = 0.8
"""The share of the wrapper's wait that the daemon uses to end: it must answer before the wrapper takes it for dead."""
_PART = "part"
_SWEEP = "sweep"


class Daemon:
    """The daemon of a node: owns its event loop and its parts. `run` returns when the node directory is gone."""

    def __init__(self, spec: DaemonSpec, umask: int) -> None:
        self.spec = spec
        self.node_dir = Path(spec.node_dir)
        self.started = time.monotonic()
        self.selector = selectors.DefaultSelector()
        self.page = Page(self.node_dir / nodedir.PAGE)
        self.helpers = Helpers(umask)
        self.events = Events(self.node_dir / nodedir.EVENTS)
        directory.Store(self.node_dir).make()
        self.pool = self._fork_copiers()
        self.server = Server(open_listener(f"{spec.node_dir}/sock", spec.listen_fd), self.selector, self)
        self.watch = Watch(self.node_dir, self.page, self.started)
        self.staging = Staging(
            spec,
            self.pool,
            self.helpers,
            self.events,
            self.watch,
            self.server.answer,
            self._state,
            self.started,
            self.selector,
            self.page,
        )
        self.wrappers = Wrappers(self.selector, self._nobody_left)
        self.staging.programs = self._programs
        self.sampler = Sampler(self._reading, self.started)
        self.looks = Looks(self.page.several, self.started)
        self.reopened = Reopened(self.helpers)
        self.reporter = nodepart.Reporter(
            spec, self.staging, self.page, self.sampler, self.looks, self.reopened, self.started
        )
        self.staging.own_bytes = lambda: self.reporter.accounts.own_bytes
        self.slots = Slots(self.page, self.watch.retire, self.reporter.retired, self.started)
        self.descriptors = Descriptors(self.selector)
        self._next_tick = self.started + TICK_S
        self._next_part = self.started
        self._next_missed = self.started + MISSED_EVERY_S
        self._ending = False
        self._nice = False
        self._mistakes = 0
        self._last_token: int | None = None

    def _fork_copiers(self) -> Pool | None:
        spec = self.spec
        if spec.mode == DIRECT_MODE:
            return None
        settings = CopierSettings(
            self.node_dir, self.node_dir / nodedir.MANIFEST, spec.transfers, spec.own_rate_bytes_per_s, nice=spec.nice
        )
        return Pool(settings, spec.copiers)

    def _state(self, state: State) -> None:
        """Shows the state and lowers the daemon's priority once the scan is over: nothing is staged before the scan has
        ended, so the scan is worth hurrying."""
        if state is not State.SCANNING and not self._nice:
            self._nice = True
            with contextlib.suppress(OSError):
                os.nice(self.spec.nice)
        self.page.set_state(state)

    # ---- the loop

    def run(self) -> None:
        """Runs the event loop until no wrapper or child is left, then ends the staging."""
        out = signals.take()
        self.selector.register(out, selectors.EVENT_READ, lambda: self._signals(os.read(out, 64)))
        self._sweep_leftovers()
        self.staging.start()
        while not self._ending:
            self._watch()
            for key, _ in self.selector.select(self._timeout()):
                self._guarded(key.data)
            self._guarded(self._by_the_clock)
        self._end()

    def _guarded(self, work: Callable[[], object]) -> None:
        """Calls `work` and logs its exceptions: a mistake of ours must not end the staging; more than MOST_MISTAKES
        in a run do."""
        try:
            work()
        except Exception:  # noqa: BLE001
            traceback.print_exc()
            self._mistakes += 1
            self._ending = self._ending or self._mistakes > MOST_MISTAKES

    def _by_the_clock(self) -> None:
        self._catch_up()
        now = time.monotonic()
        self.staging.pump(now)
        self.watch.look(now)
        self.slots.look(now)
        self.looks.look(now)
        self.sampler.look(now)
        self._reopen(now)
        if now >= self._next_tick:
            self._tick(now)

    def _catch_up(self) -> None:
        """Reads the writes that programs did not wait for; until then they open no copy."""
        if (given_up := self.page.behind) is not None:
            self.server.read_all()
            self.page.catch_up(given_up)
        self.staging.look_at_gate()

    def _timeout(self) -> float:
        now = time.monotonic()
        looks = (self.looks.wake_after(now), self.sampler.wake_after(now), self.slots.wake_after(now))
        until_tick = min(self._next_tick - now, *looks)
        wake = self.staging.wake_after(now)
        return max(0.0, until_tick if wake is None else min(wake, until_tick))

    def _watch(self) -> None:
        wanted: dict[int, Callable[[int], bool]] = dict.fromkeys(self.helpers.fds(), self._helper_ready)
        if self.pool is not None:
            wanted.update(dict.fromkeys(self.pool.fds(), self._copier_ready))
        self.descriptors.watch(wanted)

    def _helper_ready(self, fd: int) -> bool:
        return fd not in self.helpers.fds() or self.helpers.receive(fd)

    def _copier_ready(self, fd: int) -> bool:
        self.staging.receive(fd, time.monotonic())
        return self.pool is None or fd not in self.pool.fds()

    def _tick(self, now: float) -> None:
        self._next_tick = max(self._next_tick + TICK_S, now)
        self.wrappers.poll(now)
        self.reporter.accounts.look(self.page.pids())
        self.staging.look(now)
        if now >= self._next_missed:
            self._next_missed = now + MISSED_EVERY_S
            self.reporter.missed.look(self.wrappers.seen_children, self.page.pids())
        if now >= self._next_part:
            self._next_part = now + PART_EVERY_S
            self._write_part(now, complete=False)

    def _programs(self) -> set[int]:
        children = self.wrappers.seen_children
        return self.page.pids().union(children, *map(descendants, children))

    def _reopen(self, now: float) -> None:
        engine = self.staging.engine
        if engine is not None and self.staging.state is State.SETTLED and self.spec.node_index == 0:
            self.reopened.look(now, engine.alone, lambda ids: [engine.manifest.source_path(id_) for id_ in ids])

    def _reading(self, now: float) -> Reading:
        engine = self.staging.engine
        sums = self.page.sums()
        if engine is None:
            return Reading(Totals(), sums, Busy(now, limited_s=now - self.started))
        engine.advance(now)
        peers = self.staging.peers
        return Reading(
            engine.pool.stats.totals(),
            sums,
            replace(engine.busy),
            queued_files=engine.queue.waiting,
            store_bytes=engine.stored_bytes,
            peer_bytes=0 if peers is None else peers.counts["peer_bytes"],
            sent_bytes=0 if peers is None else peers.counts["sent_bytes"],
        )

    def _write_part(self, now: float, *, complete: bool) -> None:
        part = self.reporter.part(now, complete=complete)
        self.events.flush()
        extra = ((self.node_dir / nodedir.EVENTS, "events"),) if complete else ()
        if part.problems:
            extra = (*extra, (self.node_dir / nodedir.LOG, "log"))
        run_dir, host = Path(self.spec.run_dir), self.spec.host
        self.helpers.start(_PART, lambda: write_part(part, run_dir, host, extra), self._part_written)

    def _part_written(self, answer: bytes | None) -> None:
        if answer is None:
            log(f"the part of the record could not be written below {self.spec.run_dir}")

    def _sweep_leftovers(self) -> None:
        paths = [Path(path) for path in self.spec.leftovers]
        if paths:
            self.helpers.start(_SWEEP, lambda: _remove_all(paths), lambda _: None)

    # ---- signals

    def _signals(self, numbers: bytes) -> None:
        if signal.SIGUSR1 in numbers:
            log(self._status())
        if signal.SIGTERM in numbers:
            log("SIGTERM: copying stops; what is staged stays until the command ends")
            self.staging.close(Reason.LATER)
            self._write_part(time.monotonic(), complete=False)

    def _status(self) -> str:
        engine = self.staging.engine
        text = f"{self.staging.state.name.lower()} after {time.monotonic() - self.started:.1f} s"
        if engine is None:
            return text
        places = ", ".join(f"{place.name.lower()} {engine.queue.count(place)}" for place in Place)
        return f"{text}: {places}; {engine.stored_bytes} bytes in the store"

    # ---- requests

    def request(self, token: int, kind: Kind, pid: int, payload: bytes) -> Reply | None:
        """See server.Handler."""
        now = time.monotonic()
        if kind is Kind.WANT:
            return self.staging.want(token, payload, now)
        if kind is Kind.WROTE:
            return self.staging.wrote(payload)
        if kind is Kind.LANDED:
            device, inode = LANDED.unpack_from(payload)
            return self.staging.wrote(payload[LANDED.size :], (device, inode))
        if kind is Kind.HELLO:
            python = payload[:1] == bytes([Layer.PYTHON])
            return Reply(Answer.DONE, value=self.page.allot_python_slot() if python else 0)
        if kind is Kind.ORDER:
            self.staging.ordering.order(os.fsdecode(payload))
            return Reply(Answer.DONE)
        if kind is Kind.EPOCH:
            self.staging.ordering.epoch(pid, payload)
            return Reply(Answer.DONE)
        if kind is Kind.PEER:
            return self._from_exchange(token)
        if kind is Kind.STATUS:
            return Reply(Answer.DONE, value=self.staging.state)
        return self._from_wrapper(token, kind, payload)

    def _from_exchange(self, token: int) -> Reply | None:
        group = self.staging.group
        if group is None or group.is_closed or self._ending:
            return Reply(Answer.REFUSED)
        connection = self.server.hand_over(token)
        if connection is None:
            return None
        group.attach(connection)
        return None

    def _from_wrapper(self, token: int, kind: Kind, payload: bytes) -> Reply | None:
        if kind is Kind.ATTACH:
            self.wrappers.attach(token, int.from_bytes(payload[:4], "little"))
            return Reply(Answer.DONE, keep=True)
        if kind is Kind.STAGED:
            return self.staging.staged(token)
        if len(payload) >= END.size:
            self.reporter.accounts.ended(END.unpack_from(payload)[1])
        if not self.wrappers.end(token):
            return Reply(Answer.OTHERS)
        self._last_token = token
        self._ending = True
        return None

    def dropped(self, token: int) -> None:
        """See server.Handler."""
        self.staging.dropped(token)
        self.wrappers.dropped(token)

    def _nobody_left(self) -> None:
        self._ending = True

    # ---- the end

    def _end(self) -> None:
        """Stops, reports, answers and cleans up; every step but the deletion of the store is bounded."""
        deadline = time.monotonic() + OWN_DRAIN * self.spec.drain_s
        self.page.set_state(State.ENDED)
        _hurry()
        for stop in (self._stop_answering, self._stop_learning, self._stop_copying):
            self._guarded(stop)
        self._guarded(lambda: self._write_last_part(deadline))
        if self._last_token is not None:
            self.server.answer(self._last_token, Reply(Answer.LAST, keep=True))
        self.server.stop_listening()
        if self.pool is not None:
            self.pool.close(POOL_END_S)
        self._guarded(lambda: self.helpers.wait(_SWEEP, SWEEP_END_S))
        self.helpers.close()
        directory.remove_tree(self._out_of_sight(), last=(nodedir.LOCK,))
        self.server.close_all()

    def _stop_answering(self) -> None:
        self.staging.answers.end(Reason.SETTLED)
        if self.staging.group is not None:
            self.staging.group.close()

    def _stop_learning(self) -> None:
        self.watch.stop()
        if self.spec.node_index == 0:  # the trace is one per command, not per node
            self.staging.ordering.leave_trace()

    def _stop_copying(self) -> None:
        if self.staging.engine is not None:
            self.staging.engine.queue.close(Reason.LATER)
        if self.pool is not None:
            self.pool.kill()

    def _out_of_sight(self) -> Path:
        """Renames the node directory aside and returns its new name: a wrapper of the same launch that comes late must
        make its own directory, not join one that is being deleted."""
        try:
            return node_directory.retire(self.node_dir)
        except (OSError, HpcstageError):
            return self.node_dir

    def _write_last_part(self, deadline: float) -> None:
        announced = [name for name in self.helpers.names() if name.startswith(lists.HELPER)]
        for name in (*announced, TRACE_HELPER, PLAN_HELPER, _PART):
            self.helpers.wait(name, max(0.0, deadline - LEAST_WRITE_S - time.monotonic()))
        now = time.monotonic()
        self.sampler.tick(now)
        self._write_part(now, complete=True)
        self.helpers.wait(_PART, max(0.1, deadline - time.monotonic()))


def _hurry() -> None:
    """Leaves the batch policy: from here on the user waits for the daemon, and the program does not run any more."""
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))


def _remove_all(paths: list[Path]) -> bytes:
    os.nice(19 - os.nice(0))
    for path in paths:
        directory.remove_tree(path)
    return b""


def log(text: str) -> None:
    """Writes a line to daemon.log."""
    stamp = time.strftime("%H:%M:%S")
    print(f"{stamp} {text}", file=sys.stderr, flush=True)  # noqa: T201  standard error is daemon.log
