"""Finds processes of an agent that are stopped, and kills them: a stopped process holds all others up, and neither an
error nor SIGTERM reaches it. `torchrun` then restarts its processes, as after any that ends.

The module looks at the kernel's own word for it, which no thread of the process can change. A process that a debugger
holds is not stopped in that sense. What is killed is below this process.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import psutil

from hpcstage import procio, stderr
from hpcstage.elastic.waiting import AwakeClock
from hpcstage.units import format_duration

_LOOK_S = 0.25


class FrozenProcesses:
    """Watches the processes below this one."""

    def __init__(self, host: str, limit_s: float, now_s: float) -> None:
        """A process that is stopped for `limit_s` is killed."""
        self._host = host
        self._limit_s = limit_s
        self._clock = AwakeClock(now_s, 2 * _LOOK_S)
        self._looked_s = now_s - _LOOK_S
        self._since_s: dict[psutil.Process, float] = {}

    def kill(self, now_s: float) -> list[int]:
        """Kills what has been stopped for too long, and returns the process ids. Looks four times a second at most."""
        if now_s - self._looked_s < _LOOK_S:
            return []
        self._looked_s = now_s
        shown_s = self._clock.show(now_s)
        self._since_s = {process: self._since_s.get(process, shown_s) for process in _stopped()}
        late = [process for process, since_s in self._since_s.items() if shown_s - since_s >= self._limit_s]
        return [process.pid for process in late if self._kill(process)]

    def _kill(self, process: psutil.Process) -> bool:
        try:
            name = process.name()
            process.kill()  # unless its id has become another's
        except psutil.Error:
            return False
        limit = format_duration(self._limit_s)
        stderr.say(f"elastic: {self._host}: process {process.pid} ({name}) was stopped for {limit} and is killed")
        return True


def _stopped() -> Iterator[psutil.Process]:
    for pid in procio.descendants(os.getpid()):
        with contextlib.suppress(psutil.Error):
            if (process := psutil.Process(pid)).status() == psutil.STATUS_STOPPED:
                yield process
