"""Follows the processes of the command: those with the shim, those without, and the wrappers that started them.

Owns what the record says of processes, and the end of the run: it calls `on_end` when no wrapper and no child is left,
with the token of the wrapper that waits for the daemon's end, if one does. What processes read is summed from the
kernel's counters, which do not contain what is read from mapped files.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from hpcstage.daemon.process.daemonpage import Page
from hpcstage.daemon.process.looks import Looks
from hpcstage.daemon.process.proc import Unattached, exists
from hpcstage.daemon.process.server import Reply
from hpcstage.daemon.process.slots import LetGo, Retired, SlotReuse
from hpcstage.daemon.service import Message, Service
from hpcstage.procio import descendants, read_bytes
from hpcstage.protocol.shim import Answer, Kind, Layer
from hpcstage.record.parts.rows import ProcessPart

if TYPE_CHECKING:
    from hpcstage.record.parts.part import NodePart

FIRST_ATTACH_S = 30.0
_POLL_S = 0.5


class Wrappers:
    """Owns the list of attached wrappers and of orphaned children. It calls `on_none` when none is left."""

    def __init__(self, selector: selectors.BaseSelector, on_none: Callable[[], None]) -> None:
        self._selector = selector
        self._on_none = on_none
        self._children: dict[int, int] = {}
        self._orphans: dict[int, int] = {}
        """By pid of a child whose wrapper is gone: its pidfd, or -1 where the kernel has none."""
        self._started = time.monotonic()
        self._ever = False
        self.seen_children: set[int] = set()

    def attach(self, token: int, child_pid: int) -> None:
        """Takes an ATTACH: a wrapper connected, or tells its child's pid."""
        self._ever = True
        self._children[token] = child_pid
        if child_pid:
            self.seen_children.add(child_pid)

    def end(self, token: int) -> bool:
        """Takes an END: a wrapper's child ended. Returns True if the wrapper was the last."""
        self._children.pop(token, None)
        return not self._children and not self._orphans

    def dropped(self, token: int) -> None:
        """Takes the end of a connection without END: the daemon serves the child as long as it lives."""
        child_pid = self._children.pop(token, None)
        if child_pid is None:
            return
        if child_pid:
            self._adopt(child_pid)
        self._check()

    def poll(self, now: float) -> None:
        """Checks, once a second, children without a pidfd and whether a first wrapper never came."""
        for pid in [pid for pid, fd in self._orphans.items() if fd < 0 and not exists(pid)]:
            self._orphan_ended(pid)
        if not self._ever and now - self._started > FIRST_ATTACH_S:
            self._on_none()

    def _adopt(self, pid: int) -> None:
        try:
            fd = os.pidfd_open(pid)
        except ProcessLookupError:
            return
        except (OSError, AttributeError):
            self._orphans[pid] = -1
            return
        self._orphans[pid] = fd
        self._selector.register(fd, selectors.EVENT_READ, lambda: self._orphan_ended(pid))

    def _orphan_ended(self, pid: int) -> None:
        fd = self._orphans.pop(pid, -1)
        if fd >= 0:
            with contextlib.suppress(KeyError, ValueError):
                self._selector.unregister(fd)
            os.close(fd)
        self._check()

    def _check(self) -> None:
        if self._ever and not self._children and not self._orphans:
            self._on_none()


MOST_THREADS = 128
"""The most threads in one look, of all processes together: a look takes a millisecond or two."""


class Accounts:
    """Owns what each process has read itself."""

    def __init__(self) -> None:
        self._own: dict[int, int] = {}
        self._next = 0

    @property
    def own_bytes(self) -> int:
        """Returns the bytes that attached processes have read themselves, as far as is known."""
        return sum(self._own.values())

    def look(self, pids: Iterable[int]) -> None:
        """Reads what attached processes have read themselves so far; if they are many, some now and others at the next
        look."""
        found = sorted(pids)
        threads_left = MOST_THREADS
        for _ in range(len(found)):
            if threads_left <= 0:
                break
            pid = found[self._next % len(found)]
            self._next += 1
            threads_left -= self._one(pid, threads_left)

    def _one(self, pid: int, most: int) -> int:
        """Looks at the living threads of a process only, since its process-wide counter also holds what its reaped
        children read. Returns the number of threads."""
        try:
            threads = os.listdir(f"/proc/{pid}/task")[:most]
        except OSError:
            return 1
        self._note(pid, sum(read_bytes(f"/proc/{pid}/task/{thread}/io") or 0 for thread in threads))
        return len(threads)

    def told(self, processes: Iterable[ProcessPart]) -> None:
        """Takes what processes told at their ends; they may have read more since the last look."""
        for process in processes:
            if process.pid and (read := process.counters.get("own_read_bytes", 0)):
                self._note(process.pid, read)

    def _note(self, pid: int, read: int) -> None:
        self._own[pid] = max(self._own.get(pid, 0), read)


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
        return self._page.attached.pids().union(children, *(descendants(child, os.getpid()) for child in children))

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
