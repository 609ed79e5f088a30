"""The staging daemon of a node: its services, from the scan to the removal of the node directory.

Owns lifecycle and signals. It lives while a wrapper is attached, or a child whose wrapper was killed runs.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import selectors
import signal
import time
import traceback
from collections.abc import Collection
from functools import partial
from pathlib import Path

from hpcstage.daemon.inbox import UNANSWERED, Inbox, Item
from hpcstage.daemon.peers.nodegroup import NodeGroup
from hpcstage.daemon.preparing import Phase, Preparing, Unstaged
from hpcstage.daemon.process.daemonpage import Page
from hpcstage.daemon.process.server import Reply, open_listener
from hpcstage.daemon.programs import Programs
from hpcstage.daemon.queue.answers import Answers
from hpcstage.daemon.reading.openwatch import OpenLog
from hpcstage.daemon.reading.scanning import Prepared
from hpcstage.daemon.reporting import HELPER as PART_HELPER
from hpcstage.daemon.reporting import Reporter, Standstills
from hpcstage.daemon.resources import Gate, Resources
from hpcstage.daemon.service import Loop, Message, Service
from hpcstage.daemon.staging import Staging
from hpcstage.daemon.telemetry import Snapshot
from hpcstage.errors import HpcstageError
from hpcstage.forked import Helpers
from hpcstage.node import directory as node_directory
from hpcstage.plan.placement.placements import Placing
from hpcstage.problem import Problem
from hpcstage.protocol import nodedir
from hpcstage.protocol.daemonspec import NICE, DaemonSpec
from hpcstage.protocol.shim import Answer, Kind, Reason, State
from hpcstage.stderr import log
from hpcstage.store import storedir
from hpcstage.store.copier import CopierSettings
from hpcstage.store.pool import CopierPool

POOL_END_S = 1.0
LEAST_WRITE_S = 2.0
SWEEP_END_S = 2.0
"""The longest wait at the end for the removal of what earlier runs left, which may take longer than a short command."""
OWN_DRAIN_SHARE = 0.8
"""The share of the wrapper's wait that the daemon uses to end: it must answer before the wrapper takes it for dead."""
_SWEEP = "sweep"


class Daemon(Service):
    """The daemon of a node: builds its services and owns its phase. `run` returns when the node directory is gone."""

    kinds = frozenset({Kind.STATUS})

    def __init__(self, spec: DaemonSpec, umask: int) -> None:
        started = time.monotonic()
        node_dir = Path(spec.node_dir)
        selector, helpers = selectors.DefaultSelector(), Helpers(umask)
        page = Page(node_dir / nodedir.PAGE)
        storedir.Store(node_dir).make()
        self._pool = _fork_copiers(spec)  # before there is a thread
        self._loop = Loop(selector, helpers, open_listener(f"{spec.node_dir}/{nodedir.SOCK}", spec.listen_fd))
        self._log = OpenLog(node_dir, page)
        programs = Programs(page, selector, self._log.retire, self._ended, started)
        self.base = Resources(
            spec,
            started,
            selector,
            page,
            Gate(page, spec.host),
            helpers,
            Answers(self._loop.server.answer),
            self._loop.server.answer,
            programs.pids,
            lambda: programs.accounts.own_bytes,
        )
        self._reporter = Reporter(self.base, lambda: self._loop.services, self._snapshot)
        self._programs = programs
        self._last_token: int | None = None
        self._group: NodeGroup | None = None
        self._outputs = _outputs(self.base)
        self._saves = Standstills(node_dir)
        self._phase: Phase = Unstaged(self.base, State.MEASURING)
        if self._pool is not None:
            self._phase = self._preparing(self._pool)
        self._talk: tuple[Service, ...] = () if self._group is None else (self._group,)
        if self._group is None and spec.checkpoints and spec.node_count > 1:
            self._talk = (NodeGroup.idle(self.base, self._loop.server.hand_over),)

    def _preparing(self, pool: CopierPool) -> Preparing:
        def ready(prepared: Prepared) -> None:
            self._stage(pool, prepared, preparing.inbox)

        def failed(why: str | None) -> None:
            self._give_up(why, preparing.inbox)

        preparing = Preparing(self.base, self._log, ready, failed)
        spec = self.base.spec
        if spec.node_count > 1 and spec.placement != Placing.PRIVATE.value:
            hand_over = self._loop.server.hand_over
            self._group = NodeGroup(self.base, preparing.inbox, hand_over, preparing.scan, preparing.receive)
        return preparing

    # ---- the phases

    def run(self) -> None:
        """Runs the event loop until no wrapper or child is left, then ends the staging."""
        spec, helpers = self.base.spec, self.base.helpers
        out = _take_signals()
        self.base.selector.register(out, selectors.EVENT_READ, lambda: self._signals(os.read(out, 64)))
        if leftovers := [Path(path) for path in spec.leftovers]:
            helpers.start(_SWEEP, lambda: _remove_all(leftovers), lambda _: None, gives_way=True)
        self._enter(self._phase)
        if isinstance(self._phase, Preparing):
            self._phase.start(waits=self._group is not None and spec.node_index != 0)
        self._loop.run()
        self._end()

    def _enter(self, phase: Phase) -> None:
        """Shows the state of a phase and gives its services their turns. The daemon's priority is lowered once the scan
        is over: nothing is staged before the scan has ended, so the scan is worth hurrying."""
        if phase.state is not State.SCANNING:
            with contextlib.suppress(OSError):
                os.nice(NICE)
        self._phase = phase
        self.base.page.set_state(phase.state)
        self._loop.serve(
            (self, *self._talk, self._programs, *phase.services(), *self._outputs, self._saves, self._reporter)
        )

    def _stage(self, pool: CopierPool, prepared: Prepared, inbox: Inbox) -> None:
        """Begins the staging, and hands it what came before."""
        try:
            staging = Staging(self.base, pool, self._log, prepared, self._group)
            self._enter(staging)
            staging.begin(inbox.take_writes())
        except Exception:  # noqa: BLE001  a program may wait for the end of the staging, and no write may be forgotten
            traceback.print_exc()
            self._give_up("the staging could not begin", inbox)
            return
        self._replay(inbox)
        staging.sharing.announce()

    def _give_up(self, why: str | None, inbox: Inbox) -> None:
        """Stages nothing: because of a mistake if there is a reason, else because the run ends."""
        if why is not None:
            host = self.base.spec.host
            remedy = f"the program reads the source; the daemon's log is nodes/{host}.log in the run directory"
            self.base.problems.append(Problem("scan-failed", why, remedy))
            if self._group is not None:
                self._group.give_up()
        self._loop.guarded(lambda: self._log.stop(None))
        self._enter(Unstaged(self.base, State.SETTLED))
        self._replay(inbox)

    def _replay(self, inbox: Inbox) -> None:
        for item in inbox.take():
            self._loop.guarded(partial(self._replay_one, item))

    def _replay_one(self, item: Item) -> None:
        if not isinstance(item, Message):
            self._phase.message(item, time.monotonic())
            return
        reply = self._loop.handle(*item)
        if reply is not None and item.kind in UNANSWERED:
            self.base.answer(item.token, reply)

    # ---- the service

    def handle(self, message: Message) -> Reply:  # noqa: ARG002
        """See Service."""
        return Reply(Answer.DONE, value=self._phase.state)

    def work(self, now: float) -> None:  # noqa: ARG002
        """Reads the writes that programs did not wait for; until then they open no copy. Stops the staging once the
        store is closed."""
        page = self.base.page
        if (given_up := page.behind) is not None:
            self._loop.server.read_all()
            page.catch_up(given_up)
        if (problem := self.base.gate.found_closed()) is not None:
            self.base.problems.append(problem)
            self._phase.stop(Reason.FAILED)

    def _snapshot(self, now: float) -> Snapshot:
        return self._phase.snapshot(now, self.base.page.attached.sums())

    def _signals(self, numbers: bytes) -> None:
        if signal.SIGUSR1 in numbers:
            log(self._phase.status())
        if signal.SIGTERM in numbers:
            log("SIGTERM: copying stops; what is staged stays until the command ends")
            for service in self._loop.services:
                service.stop(Reason.LATER)
            self._reporter.write(time.monotonic())

    # ---- the end

    def _ended(self, token: int | None) -> None:
        """Ends the daemon. The wrapper behind the token waits for that."""
        self._last_token = token
        self._loop.is_ending = True

    def _end(self) -> None:
        """Stops, reports, answers and cleans up; every step but the deletion of the store is bounded."""
        deadline = time.monotonic() + OWN_DRAIN_SHARE * self.base.spec.drain_s
        loop, server, helpers = self._loop, self._loop.server, self.base.helpers
        self.base.page.set_state(State.ENDED)
        _hurry()
        awaited: list[str] = []
        for service in loop.services:
            loop.guarded(lambda service=service: awaited.extend(service.drain()))  # type: ignore[misc]
        if self._pool is not None:
            self._pool.kill()
        self._look_for_store()
        loop.guarded(lambda: self._write_last_part(awaited, deadline))
        if self._last_token is not None:
            server.answer(self._last_token, Reply(Answer.LAST, keep=True))
        server.stop_listening()
        if self._pool is not None:
            self._pool.close(POOL_END_S)
        loop.guarded(lambda: helpers.wait(_SWEEP, SWEEP_END_S))
        helpers.close()
        storedir.remove_tree(self._out_of_sight(), last=(nodedir.LOCK,))
        server.close_all()

    def _look_for_store(self) -> None:
        """Notes that somebody has removed the copies, such as a service that cleans temporary directories."""
        node_dir = self.base.node_dir
        if self._pool is not None and not (node_dir / nodedir.STORE).is_dir():
            text = f"the local directory {node_dir} was removed while the command ran: from then on it read the source"
            remedy = "see who cleans there, or name another with --local-dir"
            self.base.problems.append(Problem("store-gone", text, remedy))

    def _write_last_part(self, awaited: Collection[str], deadline: float) -> None:
        helpers = self.base.helpers
        for name in (*awaited, PART_HELPER):
            helpers.wait(name, max(0.0, deadline - LEAST_WRITE_S - time.monotonic()))
        self._reporter.write(time.monotonic(), complete=True)
        helpers.wait(PART_HELPER, max(0.1, deadline - time.monotonic()))

    def _out_of_sight(self) -> Path:
        """Renames the node directory aside and returns its new name: a wrapper of the same launch that comes late must
        make its own directory, not join one that is being deleted."""
        try:
            return node_directory.retire(self.base.node_dir)
        except (OSError, HpcstageError):
            return self.base.node_dir


def _take_signals() -> int:
    """Returns the descriptor from which the loop reads the numbers of SIGTERM and SIGUSR1, in turn with everything
    else.

    The daemon ignores a terminal's signals, which are for the command; SIGUSR2 writes the stacks to the log.
    """
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    out, into = os.pipe()
    os.set_blocking(out, False)
    os.set_blocking(into, False)
    signal.set_wakeup_fd(into, warn_on_full_buffer=False)
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, lambda *_: None)
    faulthandler.register(signal.SIGUSR2, all_threads=True)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # the wrapper keeps its signals blocked, which a child inherits
    return out


def _fork_copiers(spec: DaemonSpec) -> CopierPool | None:
    """Returns the copiers; None where nothing will be staged."""
    if not spec.stages:
        return None
    node_dir = Path(spec.node_dir)
    settings = CopierSettings(
        node_dir,
        node_dir / nodedir.MANIFEST,
        spec.transfers,
        spec.own_rate_bytes_per_s,
        nice=NICE,
    )
    return CopierPool(settings, spec.copiers)


def _outputs(base: Resources) -> tuple[Service, ...]:
    """Returns the service that drains the command's output files and checkpoints, where there are any."""
    if not (base.spec.outputs or base.spec.checkpoints):
        return ()
    from hpcstage.daemon.drains import begin

    return begin(base)


def _hurry() -> None:
    """Leaves the batch policy: from here on the user waits for the daemon, and the program does not run any more."""
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))


def _remove_all(paths: list[Path]) -> bytes:
    for path in paths:
        storedir.remove_tree(path)
    return b""
