"""Forks children, such as the copiers and helpers of a daemon, and waits for the end of one."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import signal
import time
import traceback
from collections.abc import Callable, Collection

from hpcstage.reading import readable

_PR_SET_PDEATHSIG = 1
_KILLED_S = 1.0
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def fork(
    work: Callable[[], object], kept: Collection[int], *, says_why: bool = True, ends_with_parent: bool = True
) -> int:
    """Starts a child that does some work and ends, and returns its pid. Raises OSError.

    The child ends when this process does, unless `ends_with_parent` is false, ignores the signals that end a daemon,
    and has no descriptors but the standard ones and those in `kept`. `says_why`: it writes to standard error why it
    failed.
    """
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        gc.freeze()
        if ends_with_parent:
            die_with_parent(parent)
        become_quiet({*kept})
        work()
        code = 0
    except BaseException:  # noqa: BLE001  nothing may return into the parent's frames
        if says_why:
            traceback.print_exc()
    finally:
        os._exit(code)


def die_with_parent(parent: int, number: int = signal.SIGKILL) -> None:
    """Has the kernel send this process a signal when its parent ends."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(0)


def become_quiet(kept: set[int]) -> None:
    """Makes a fork ignore all signals that end the daemon, and closes the parent's descriptors except the standard ones
    and those in `kept`."""
    signal.set_wakeup_fd(-1)
    for number in _ENDING:
        signal.signal(number, signal.SIG_IGN)
    for fd in map(int, os.listdir("/proc/self/fd")):
        if fd > 2 and fd not in kept:
            with contextlib.suppress(OSError):
                os.close(fd)


def reap(pid: int, timeout_s: float) -> None:
    """Waits for a child and kills it if it has not ended in time. One that hangs in the kernel is left to it."""
    with contextlib.suppress(OSError):
        pidfd = os.pidfd_open(pid)
        try:
            readable([pidfd], timeout_s)
        finally:
            os.close(pidfd)
    with contextlib.suppress(OSError):
        if os.waitpid(pid, os.WNOHANG)[0] == 0:
            os.kill(pid, signal.SIGKILL)
            _await_killed(pid)


def _await_killed(pid: int) -> None:
    deadline = time.monotonic() + _KILLED_S
    while os.waitpid(pid, os.WNOHANG)[0] == 0 and time.monotonic() < deadline:
        time.sleep(0.002)
