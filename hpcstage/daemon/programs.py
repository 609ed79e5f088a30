"""Follows the processes of the command: those with the shim, those without, and the wrappers that started them.

Owns what the record says of processes, and the end of the run: it calls `on_end` when no wrapper and no child is left,
with the token of the wrapper that waits for the daemon's end, if one does.
"""

from __future__ import annotations

import selectors
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from hpcstage.daemon.process.accounts import Accounts
from hpcstage.daemon.process.daemonpage import Page
from hpcstage.daemon.process.looks import Looks
from hpcstage.daemon.process.proc import Unattached, descendants
from hpcstage.daemon.process.retired import Retired
from hpcstage.daemon.process.server import Reply
from hpcstage.daemon.process.slots import LetGo, SlotReuse
from hpcstage.daemon.process.wrappers import Wrappers
from hpcstage.daemon.service import Message, Service
from hpcstage.protocol.shim import Answer, Kind, Layer
from hpcstage.record.parts.rows import ProcessPart

if TYPE_CHECKING:
    from hpcstage.record.parts.part import NodePart

TICK_S = 1.0
MISSED_EVERY_S = 2.0


class Programs(Service):
    """Owns what is known of processes. `let_go` says which slots of ended processes may be used again."""

    kinds = frozenset({Kind.HELLO, Kind.ATTACH, Kind.END})

    def __init__(
        self,
        page: Page,
        selector: selectors.BaseSelector,
        let_go: LetGo,
        on_end: Callable[[int | None], None],
        started: float,
    ) -> None:
        self.accounts = Accounts()
        self._page = page
        self._on_end = on_end
        self._wrappers = Wrappers(selector, lambda: on_end(None))
        self._unattached = Unattached()
        self._retired = Retired()
        self._looks = Looks(page.attached.several, started)
        self._slots = SlotReuse(page, let_go, self._retire, started)
        self._next_tick = started + TICK_S
        self._next_missed = started + MISSED_EVERY_S

    def pids(self) -> set[int]:
        """Returns the pids of the processes that may read the datasets."""
        children = self._wrappers.seen_children
        return self._page.attached.pids().union(children, *map(descendants, children))

    def handle(self, message: Message) -> Reply | None:
        """See Service."""
        token, kind, _, payload = message
        if kind is Kind.HELLO:
            python = payload[:1] == bytes([Layer.PYTHON])
            return Reply(Answer.DONE, value=self._page.slots.allot_python() if python else 0)
        if kind is Kind.ATTACH:
            self._wrappers.attach(token, int.from_bytes(payload[:4], "little"))
            return Reply(Answer.DONE, keep=True)
        if not self._wrappers.end(token):
            return Reply(Answer.OTHERS)
        self._on_end(token)
        return None

    def dropped(self, token: int) -> None:
        """See Service."""
        self._wrappers.dropped(token)

    def work(self, now: float) -> None:
        """See Service."""
        self._slots.look(now)
        self._looks.look(now)
        if now >= self._next_tick:
            self._next_tick = max(self._next_tick + TICK_S, now)
            self._wrappers.poll(now)
            self.accounts.look(self._page.attached.pids())
        if now >= self._next_missed:
            self._next_missed = now + MISSED_EVERY_S
            self._unattached.look(self._wrappers.seen_children, self._page.attached.pids())

    def wake_after(self, now: float) -> float:
        """See Service."""
        return min(self._next_tick - now, self._looks.wake_after(now), self._slots.wake_after(now))

    def _retire(self, process: ProcessPart) -> None:
        """Adds up a process that has ended and whose slot is used again."""
        process.counters |= self._looks.of(process.pid)
        self._looks.forget(process.pid)
        self._unattached.attached(process.pid)
        self.accounts.told([process])
        self._retired.add(process)

    def record(self, part: NodePart) -> NodePart:
        """See Service."""
        processes = self._page.attached.processes()
        for process in processes:
            process.counters |= self._looks.of(process.pid)
        self.accounts.told(processes)
        processes += self._retired.rows()
        return replace(
            part,
            processes=processes,
            missed_processes=self._unattached.listed(),
            missed_count=len(self._unattached),
        )
