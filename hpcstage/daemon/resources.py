"""Holds what the daemon has from its start to its end, whatever is staged: its services share it."""

from __future__ import annotations

import os
import selectors
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path

from hpcstage.daemon.process.daemonpage import Page
from hpcstage.daemon.process.server import Reply
from hpcstage.daemon.queue.answers import Answers
from hpcstage.forked import Helpers
from hpcstage.problem import Problem
from hpcstage.protocol.daemonspec import DaemonSpec


class Gate:
    """Knows why the store was closed: for good, as a stale copy may be visible and no program may open it. Programs
    and the exchange close it, too, where they cannot tell the daemon of writes."""

    def __init__(self, page: Page, host: str) -> None:
        self._page = page
        self._host = host
        self._why = ""
        self._told = False

    def close(self, store_path: bytes, why: str) -> None:
        """Closes the store, since a stale copy cannot be removed."""
        self._page.close()
        copy = os.fsdecode(store_path)
        self._why = self._why or f"the copy of a file that was written to cannot be removed ({why}): {copy}"

    def close_for(self, why: str) -> None:
        """Closes the store for another reason."""
        self._page.close()
        self._why = self._why or why

    def found_closed(self) -> Problem | None:
        """Returns the problem when the store is found closed for the first time."""
        if self._told or not self._page.is_closed:
            return None
        self._told = True
        log = f"the daemon's log is nodes/{self._host}.log in the run directory"
        why, remedy = self._why, f"check the local disk and its size; {log}"
        if not why:
            why = "a program, or this node's exchange, could not tell the staging daemon of writes below a dataset"
            remedy = f"the daemon was late or gone, or the program had no free descriptor; {log}"
        text = f"{why}; from then on the programs on {self._host} read the source"
        return Problem("store-closed", text, remedy)


@dataclass(frozen=True)
class Resources:
    """Everything here exists before the first message and until the last."""

    spec: DaemonSpec
    started: float
    """When the daemon started (monotonic, in seconds)."""
    selector: selectors.BaseSelector
    page: Page
    gate: Gate
    helpers: Helpers
    answers: Answers
    answer: Callable[[int, Reply], None]
    """Sends a reply to the connection of a token."""
    programs: Callable[[], Collection[int]]
    """Returns the pids of the processes that may read the datasets."""
    own_bytes: Callable[[], int]
    """Returns the bytes that attached processes have read, by the kernel's counters."""
    problems: list[Problem] = field(default_factory=list)
    """The problems of the run so far, for the record."""

    @property
    def node_dir(self) -> Path:
        """The node directory."""
        return Path(self.spec.node_dir)
