"""Knows what keeps the daemon alive: wrappers, by their connections, and children of killed wrappers, by their pids."""

from __future__ import annotations

import contextlib
import os
import selectors
import time
from collections.abc import Callable

from hpcstage.daemon.process.proc import exists

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
