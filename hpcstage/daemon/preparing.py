"""Prepares the staging of a node: gets the manifest, by a scan or from another node.

Owns the helper that scans, and the inbox that keeps what comes meanwhile. Where nothing is ever staged, `Unstaged`
answers instead.
"""

from __future__ import annotations

import math
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from hpcstage.daemon.copying.engine import Busy
from hpcstage.daemon.inbox import UNANSWERED, Inbox
from hpcstage.daemon.process.server import Reply
from hpcstage.daemon.reading import scanning
from hpcstage.daemon.reading.openwatch import OpenLog
from hpcstage.daemon.reading.scanning import Prepared, Scanned
from hpcstage.daemon.resources import Resources
from hpcstage.daemon.service import Message, Service
from hpcstage.daemon.telemetry import Snapshot
from hpcstage.protocol import exchange
from hpcstage.protocol.shim import Answer, Kind, Reason, State
from hpcstage.stderr import log
from hpcstage.store.counters import Totals

if TYPE_CHECKING:
    from hpcstage.record.parts.part import NodePart

SCAN_HELPER = "scan"
AGAIN_S = 5.0
"""So long after a scan that got no answer the next one begins."""
EARLY_S = 0.5
"""Until this long after the start a request waits for the end of the scan; later the program reads the source."""


class Phase(Service):
    """A phase of the daemon: it prepares, it stages, or it stages nothing. There is one at a time."""

    kinds = frozenset({Kind.REQUEST, Kind.WROTE, Kind.LANDED, Kind.STAGED, Kind.ORDER, Kind.EPOCH})
    state = State.SCANNING
    """The state that programs and wrappers are told."""

    def __init__(self, base: Resources) -> None:
        self.base = base

    def services(self) -> tuple[Service, ...]:
        """Returns the services that the phase consists of."""
        return (self,)

    def message(self, message: exchange.Message, now: float) -> None:
        """Takes a message of another node that came before."""

    def snapshot(self, now: float, sums: list[int]) -> Snapshot:
        """Returns all counters; `sums` are those of the programs."""
        return Snapshot(Totals(), sums, Busy(now, limited_s=now - self.base.started))

    def record(self, part: NodePart) -> NodePart:
        """See Service."""
        return replace(part, order=replace(part.order, announcements=0))

    def status(self) -> str:
        """Returns how far the staging is, for the log."""
        return f"{self.state.name.lower()} after {time.monotonic() - self.base.started:.1f} s"


class Unstaged(Phase):
    """Stages nothing: in mode direct, without a manifest, or because the run ends before there was one."""

    def __init__(self, base: Resources, state: State) -> None:
        super().__init__(base)
        self.state = state

    def handle(self, message: Message) -> Reply:
        """See Service."""
        if message.kind is Kind.REQUEST:
            return self.base.answers.reply(Reason.SETTLED)
        return Reply(Answer.DONE, keep=message.kind is Kind.STAGED)


class Preparing(Phase):
    """Owns the work before the staging. `ready` is called with what staging begins with, `failed` with the reason why
    there will be none; neither after `stop`."""

    def __init__(
        self, base: Resources, log: OpenLog, ready: Callable[[Prepared], None], failed: Callable[[str | None], None]
    ) -> None:
        super().__init__(base)
        self.inbox = Inbox()
        self._log = log
        self._ready = ready
        self._failed = failed
        self._requests_until = base.started + EARLY_S
        self._is_over = False
        self._again_at = math.inf
        self._directories_told: int | None = None
        """The number of directories that came with the group's manifest while this node's own scan, which found the
        same files, was about to end."""

    # ---- the manifest

    def start(self, *, waits: bool) -> None:
        """Begins with the scan, unless this node waits for another one's."""
        self._log.start()
        if not waits:
            self.scan()

    def scan(self) -> None:
        """Starts the scan by which this node makes the manifest."""
        self._again_at = math.inf
        work = partial(scanning.scan_into, self.base.spec, time.monotonic() - self.base.started)
        if self.base.helpers.start(SCAN_HELPER, work, self._scanned) is None:
            self._end("the scan could not be started")

    def _scanned(self, data: bytes | None) -> None:
        if self._is_over:
            return
        if data is None:
            self._end("the scan of the datasets failed")
            return
        scanned = Scanned.from_bytes(data)
        known = {problem.id for problem in self.base.problems}
        self.base.problems.extend(problem for problem in scanned.problems if problem.id not in known)
        if scanned.is_void:
            self._again_at = time.monotonic() + AGAIN_S
            log(f"{scanned.problems[-1].text}; again in {AGAIN_S:g} s")
        elif (told := self._directories_told) is not None:
            self._begin(told)
        else:
            self._begin(scanned.listings, is_own=scanning.own_counts(self.base.node_dir))

    def receive(self, directories: int) -> None:
        """Takes over the manifest and the order of another node, which lie in the node directory. The scan of this node
        is ended, unless it found the same and only has to copy the order."""
        if scanning.own_counts(self.base.node_dir):
            self._directories_told = directories
            return
        self._begin(directories)
        self.base.helpers.stop(SCAN_HELPER)

    def _begin(self, directories: int, *, is_own: bool = False) -> None:
        """Hands over to the staging."""
        if self._is_over:
            return
        try:
            manifest, order = scanning.load_scan(self.base.node_dir)
        except Exception:  # noqa: BLE001  a program may wait for the end of the staging
            traceback.print_exc()
            self._end("the manifest cannot be read")
            return
        self._is_over = True
        self._ready(Prepared(manifest, order, directories, is_own))

    def _end(self, why: str | None) -> None:
        if not self._is_over:
            self._is_over = True
            self._failed(why)

    def stop(self, reason: Reason) -> None:  # noqa: ARG002
        """See Service."""
        self._end(None)

    # ---- what comes meanwhile

    def handle(self, message: Message) -> Reply | None:
        """See Service."""
        if message.kind is Kind.REQUEST and time.monotonic() >= self._requests_until:
            return self.base.answers.reply(Reason.SCANNING)
        self.inbox.keep(message)
        return None if message.kind in UNANSWERED else Reply(Answer.DONE)

    def dropped(self, token: int) -> None:
        """See Service."""
        self.inbox.drop(token)

    def work(self, now: float) -> None:
        """See Service."""
        self._log.keep_up(now)
        if now >= self._again_at:
            self.scan()
        if now >= self._requests_until:
            for request in self.inbox.take_requests():
                self.base.answer(request.token, self.base.answers.reply(Reason.SCANNING))

    def wake_after(self, now: float) -> float | None:
        """See Service."""
        left_s = [at - now for at in (self._requests_until, self._again_at) if now < at < math.inf]
        log_s = self._log.wake_after(now)
        return min(left_s if log_s is None else [*left_s, log_s], default=None)
