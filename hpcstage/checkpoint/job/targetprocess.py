"""Brings what a node has to the target, in a process of its own: a shared file system that hangs holds up nobody else.

Owns that process, one at a time; what is given up is killed, and what comes next begins when it is gone.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from hpcstage.checkpoint.job.ledger import Outcome
from hpcstage.forked import fork, reap
from hpcstage.reading import readable

_ENDS_S = 1.0

Work = Callable[[Callable[[], bool]], tuple[Outcome, Any]]
"""What is done in the process: it is told how to ask whether to hurry, and returns the outcome and what is to be known
the next time, as plain data."""
Take = Callable[[Outcome, Any], object]


class TargetProcess:
    """The process that works on the target, and what it does next."""

    def __init__(self) -> None:
        self._next: tuple[Work, Take, Callable[[], object]] | None = None
        self._now: tuple[Take, Callable[[], object]] | None = None
        self._pid = 0
        self._from = self._hurry = -1

    @property
    def fds(self) -> list[int]:
        """Returns what to wait for."""
        return [self._from] if self._pid else []

    def begin(self, work: Work, take: Take, died: Callable[[], object]) -> None:
        """Does some work as soon as nothing else goes on; then `take` is called, or `died` if the process died."""
        self._next = work, take, died
        self._start()

    def turn(self) -> bool:
        """Takes in what has ended; tells whether anything has."""
        if not self._pid or not readable([self._from], 0):
            return False
        with os.fdopen(self._from, "rb") as file:
            data = file.read()
        os.close(self._hurry)
        reap(self._pid, _ENDS_S)
        self._pid = 0
        if self._now is not None:
            take, died = self._now
            try:
                said, known = json.loads(data)
            except ValueError:  # none of it, or not all
                died()
            else:
                take(Outcome.from_json(said), known)
        self._start()
        return True

    def hurry(self) -> None:
        """Tells the process that nobody is slowed down by it any more."""
        if self._pid:
            with suppress(OSError):
                os.write(self._hurry, b"\n")

    def give_up(self) -> None:
        """Kills what goes on; nobody hears of it any more."""
        self._next = self._now = None
        if self._pid:
            with suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)

    def close(self) -> None:
        """Gives up, and ends."""
        self.give_up()
        if self._pid:
            os.close(self._from)
            os.close(self._hurry)
            reap(self._pid, 0.0)
            self._pid = 0

    def _start(self) -> None:
        if self._pid or self._next is None:
            return
        (work, take, died), self._next = self._next, None
        hurried, self._hurry = os.pipe()
        self._from, into = os.pipe()
        self._now = take, died
        try:
            self._pid = fork(lambda: _do(work, hurried, into), {hurried, into})
        except OSError:
            os.close(self._hurry)
            os.close(self._from)
            died()
        finally:
            os.close(hurried)
            os.close(into)


def _do(work: Work, hurried: int, into: int) -> None:
    outcome, known = work(lambda: bool(readable([hurried], 0)))
    with os.fdopen(into, "wb") as file:
        file.write(json.dumps([asdict(outcome), known]).encode())
