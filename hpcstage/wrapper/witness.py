"""Owns the witness, a process beside the command that does nothing: a signal that it got, the command got as well.

The module answers one question: did the sender of a signal reach the wrapper alone, or the command as well? PBS signals
every process of the job's session, Grid Engine the process group, a terminal its foreground group; Slurm, with cgroups,
signals the wrapper only. Nothing in a signal tells these apart, so the wrapper looks whether a third process in the
command's session and process group got it.

The witness is `cat`, reading a pipe that only the wrapper holds: it ends with the wrapper, however the wrapper ends.
All signals are blocked in it, so each that comes stays pending, and /proc shows it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

MOMENT_S = 0.2
"""A sender that signals one process after the other has reached the witness within so many seconds."""
_POLL_S = 0.005
_PENDING = ("SigPnd:", "ShdPnd:")


class Witness:
    """Keeps a witness beside a process for as long as the context lasts. Owns the witness's process and its pipe."""

    def __init__(self, pid: int) -> None:
        self._of = pid
        self._place: int | None = None
        self._pid: int | None = None
        self._seen: set[int] = set()
        """Signals that an earlier witness got and that `got` has not been asked about."""
        self._stdin, self._held = os.pipe()

    def __enter__(self) -> Witness:
        self.follow()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._dismiss(self._pid)
        os.close(self._stdin)
        os.close(self._held)

    @property
    def is_there(self) -> bool:
        """Whether the witness can tell: it is in the process group in which the process is now."""
        return self._pid is not None and self._place == self._group()

    def follow(self) -> None:
        """Moves the witness to the process's group: `timeout` and shells with job control make a process group of their
        own."""
        group = self._group()
        if group != self._place:
            self._place = group
            self._renew()

    def got(self, number: int, pause: Callable[[float], object]) -> bool:
        """Returns whether the signal came to the witness as well; waits a moment for it by calling `pause`."""
        deadline = time.monotonic() + MOMENT_S
        while self.is_there:
            pending = _pending(self._pid)
            if number in pending | self._seen:
                if number in pending:
                    self._renew()
                self._seen.discard(number)
                return True
            if time.monotonic() > deadline:
                break
            pause(_POLL_S)
        return False

    def _group(self) -> int | None:
        """Returns the process group beside which a witness can stand; None if the process is in another session: a
        sender that signals a session or a group does not reach both."""
        with contextlib.suppress(OSError):
            if os.getsid(self._of) == os.getsid(0):
                return os.getpgid(self._of)
        return None

    def _renew(self) -> None:
        """Replaces the witness, since a pending signal can be seen only once. The new witness starts before the old one
        is looked at and ended, so that no signal is missed."""
        old, self._pid = self._pid, None
        if self._place is not None:
            with contextlib.suppress(OSError):
                self._pid = self._spawn(self._place)
        self._seen |= _pending(old)
        self._dismiss(old)

    def _spawn(self, group: int) -> int:
        quiet = [(os.POSIX_SPAWN_OPEN, fd, os.devnull, os.O_WRONLY, 0) for fd in (1, 2)]
        env = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
        return os.posix_spawnp(
            "cat",
            ["cat"],
            env,
            file_actions=[(os.POSIX_SPAWN_DUP2, self._stdin, 0), *quiet],
            setpgroup=group,
            setsigmask=signal.valid_signals(),
        )

    @staticmethod
    def _dismiss(pid: int | None) -> None:
        if pid is not None:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)


def _pending(pid: int | None) -> set[int]:
    """Returns the numbers of the signals that are pending for a process."""
    if pid is None:
        return set()
    try:
        lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return set()
    mask = 0
    for line in lines:
        if line.startswith(_PENDING):
            mask |= int(line.split()[1], 16)
    return {number for number in range(1, 65) if mask >> (number - 1) & 1}
