"""Kills processes that write to a target, each before a step of its own that is counted, so that a moment that loses
something is found again; and tells how things stand after it."""

from __future__ import annotations

import mmap
import os
import signal
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from draining import tree

from hpcstage import forked
from hpcstage.outputs import links
from hpcstage.outputs.journal import Journal, facts, recall
from hpcstage.outputs.late import drain_late
from hpcstage.outputs.prepare import OutputPlace

LATE_S = 60.0
"""No late drain of a test takes so long, however slow the disk is."""
_CALLS = ("chmod", "link", "mkdir", "remove", "rename", "rmdir", "symlink", "truncate", "utime")
CHANGES = frozenset(f"os.{call}" for call in _CALLS)
"""Audit events that come just before a change of a file system."""
MOST_FACTS = 150


class Crash:
    """Owns the count of the steps until a process is killed, which its forks share. A step is a change of a file system
    or a line of the journal."""

    def __init__(self) -> None:
        self._left = mmap.mmap(-1, 8)
        self._is_armed = False

    def after(self, steps: int) -> None:
        """Kills the process that does this step from now on, before it does it; 0 kills none."""
        self._is_armed = steps > 0
        self._left[:] = struct.pack("q", steps)

    @property
    def has_happened(self) -> bool:
        return self._is_armed and not self._steps()

    def enter(self) -> None:
        """Counts the steps of this process: a fork, which ends without a return to the test."""
        sys.addaudithook(self._heard)
        links.exchange_names = self._counted(links.exchange_names)
        Journal._add = self._counted(Journal._add)  # type: ignore[method-assign]

    def of(self, work: Callable[[], object]) -> None:
        """Does work in a process of its own, which is killed before its step."""
        pid = os.fork()
        if not pid:
            try:
                self.enter()
                work()
            finally:
                os._exit(0)
        os.waitpid(pid, 0)

    def _heard(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event in CHANGES or (event == "open" and arguments[2] & (os.O_ACCMODE | os.O_CREAT)):
            self._step()

    def _counted(self, call: Callable[..., None]) -> Callable[..., None]:
        def counted(*arguments: object) -> None:
            self._step()
            call(*arguments)

        return counted

    def _steps(self) -> int:
        return int(struct.unpack("q", self._left)[0])

    def _step(self) -> None:
        left = self._steps()
        if left > 0:
            self._left[:] = struct.pack("q", left - 1)
            if left == 1:
                os.kill(os.getpid(), signal.SIGKILL)


def crash_of_uploaders(monkeypatch: pytest.MonkeyPatch) -> Crash:
    """Returns the crash of the uploaders that drains start from now on."""
    made, quiet = Crash(), forked.become_quiet

    def begin(kept: set[int]) -> None:
        quiet(kept)
        made.enter()

    monkeypatch.setattr(forked, "become_quiet", begin)
    return made


def drain_late_until(place: OutputPlace, crash: Crash, steps: int) -> None:
    """Drains late in a process that is killed before a step of its own."""
    crash.after(steps)
    crash.of(lambda: drain_late(place, LATE_S))


def account(place: OutputPlace, **roots: Path) -> str:
    """Tells how things stand: the trees, the journal, and what a ledger makes of it."""
    lines: list[str] = []
    for what, root in {**roots, "watched": Path(place.root), "scratch": Path(place.scratch)}.items():
        lines += [f"{what} ({root}):"]
        for name, (_, content, mode, _) in sorted(tree(root).items()):
            said = content if not isinstance(content, bytes) else content[:20] + b" of %d" % len(content)
            lines.append(f"  {name}  {mode:o}  inode {os.lstat(root / name).st_ino}  {said!r}")
    found = list(facts(place.journal))
    lines += [f"journal, the last of {len(found)} facts:", *(f"  {fact}" for fact in found[-MOST_FACTS:])]
    recalled = recall(place.journal)
    if recalled is not None:
        ledger = recalled.ledger
        lines += ["ledger:", f"  under way: {recalled.under_way}", f"  findings: {ledger.findings}"]
        lines += [f"  {rename}" for rename in ledger.renames]
        lines += [f"  removed: {name} {removal}" for name, removal in ledger.removed.items()]
        lines += [f"  {name}: {entry}" for name, entry in sorted(ledger.entries.items())]
    return "\n".join(lines)
