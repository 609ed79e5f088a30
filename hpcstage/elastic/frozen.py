"""Finds processes of an agent that are stopped, and kills them: a stopped process holds all others up, and neither an
error nor SIGTERM reaches it. `torchrun` then restarts its processes, as after any that ends.

The module looks at the kernel's own word for it, which no thread of the process can change. A process that a debugger
holds is not stopped in that sense. What is killed is below this process.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

from hpcstage import stderr
from hpcstage.elastic.membership.watching import AwakeClock
from hpcstage.units import format_duration

_LOOK_S = 0.25
_STOPPED = b"T"


class FrozenProcesses:
    """Watches the processes below this one."""

    def __init__(self, host: str, limit_s: float, now_s: float) -> None:
        """A process that is stopped for `limit_s` is killed."""
        self._host = host
        self._limit_s = limit_s
        self._clock = AwakeClock(now_s, 2 * _LOOK_S)
        self._looked_s = now_s - _LOOK_S
        self._since_s: dict[tuple[int, bytes], float] = {}

    def kill(self, now_s: float) -> list[int]:
        """Kills what has been stopped for too long, and returns the process ids. Looks four times a second at most."""
        if now_s - self._looked_s < _LOOK_S:
            return []
        self._looked_s = now_s
        shown_s = self._clock.show(now_s)
        stopped = dict(_stopped(os.getpid()))
        self._since_s = {key: self._since_s.get(key, shown_s) for key in stopped}
        killed = [key for key, since_s in self._since_s.items() if shown_s - since_s >= self._limit_s]
        return [pid for pid, started in killed if self._kill(pid, started, stopped[pid, started])]

    def _kill(self, pid: int, started: bytes, name: str) -> bool:
        """Kills one process, unless its id has become another's."""
        fd = _pidfd(pid)
        try:
            found = _stat(pid)
            if found is None or found[:2] != (_STOPPED, started):
                return False
            if fd is None:
                os.kill(pid, signal.SIGKILL)
            else:
                signal.pidfd_send_signal(fd, signal.SIGKILL)
        except OSError:
            return False
        finally:
            if fd is not None:
                os.close(fd)
        limit = format_duration(self._limit_s)
        stderr.say(f"elastic: {self._host}: process {pid} ({name}) was stopped for {limit} and is killed")
        return True


def _pidfd(pid: int) -> int | None:
    """Returns what names this process and no later one of its id; None where the kernel has no such thing."""
    try:
        return os.pidfd_open(pid)
    except (OSError, AttributeError):
        return None


def _stopped(pid: int) -> Iterator[tuple[tuple[int, bytes], str]]:
    """Yields the stopped processes below one: process id and time of start, and the name."""
    for child in _children(pid):
        found = _stat(child)
        if found is not None and found[0] == _STOPPED:
            yield (child, found[1]), found[2]
        yield from _stopped(child)


def _children(pid: int) -> list[int]:
    found: list[int] = []
    with contextlib.suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError):
                found += map(int, Path(f"/proc/{pid}/task/{task}/children").read_bytes().split())
    return found


def _stat(pid: int) -> tuple[bytes, bytes, str] | None:
    """Returns a process's state, when it started, and its name."""
    try:
        text = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    head, _, tail = text.rpartition(b")")
    fields = tail.split()
    return fields[0], fields[19], head.partition(b"(")[2].decode(errors="replace")
