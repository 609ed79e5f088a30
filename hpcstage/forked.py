"""Forks children, such as the copiers of a daemon, and waits for the end of one; runs work that may take long or hang
in helpers, children that hand back bytes: a scan, writing to a shared file system, deleting.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import signal
import time
import traceback
from collections.abc import Callable, Collection
from dataclasses import dataclass

from hpcstage.reading import readable

_PR_SET_PDEATHSIG = 1
_KILLED_S = 1.0
_READ_BYTES = 1 << 16
_NICEST = 19
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


@dataclass
class _Helper:
    name: str
    pid: int
    on_end: Callable[[bytes | None], None]
    data: bytes = b""


class Helpers:
    """Owns the helpers of a loop that waits for nothing but its selector, by the descriptors of their pipes. None
    outlives this process."""

    def __init__(self, umask: int = 0o077) -> None:
        """`umask` is the user's: what helpers write belongs to the user and gets the user's permissions."""
        self._umask = umask
        self._by_fd: dict[int, _Helper] = {}

    def start(
        self,
        name: str,
        work: Callable[[], bytes],
        on_end: Callable[[bytes | None], None],
        open_fds: Collection[int] = (),
        gives_way: bool = False,
    ) -> int | None:
        """Runs `work` in a child; `on_end` gets what it returned, or None if it failed. The child keeps the descriptors
        in `open_fds` open. One that `gives_way` has the lowest priority: nothing waits for it.

        Returns the descriptor to watch; None if a helper of that name still runs or none can be started.
        """
        if name in self.names():
            return None
        try:
            out, into = os.pipe()
        except OSError:
            return None
        try:
            pid = fork(lambda: self._work(work, into, gives_way), {into, *open_fds})
        except OSError:
            os.close(out)
            os.close(into)
            return None
        os.close(into)
        self._by_fd[out] = _Helper(name, pid, on_end)
        return out

    def _work(self, work: Callable[[], bytes], into: int, gives_way: bool) -> None:
        """Does the work, in the child."""
        if gives_way:
            with contextlib.suppress(OSError):
                os.nice(_NICEST)
        os.umask(self._umask)
        data = b"+" + work()
        while data:
            data = data[os.write(into, data) :]

    def fds(self) -> list[int]:
        """Returns the descriptors to watch for reading."""
        return list(self._by_fd)

    def receive(self, fd: int) -> bool:
        """Reads from a helper's pipe. Returns True if the helper ended, after it has called `on_end`."""
        helper = self._by_fd[fd]
        with contextlib.suppress(OSError):
            data = os.read(fd, _READ_BYTES)
            if data:
                helper.data += data
                return False
        del self._by_fd[fd]
        os.close(fd)
        reap(helper.pid, 1.0)
        helper.on_end(helper.data[1:] if helper.data[:1] == b"+" else None)
        return True

    def names(self) -> list[str]:
        """Returns the names of the helpers that run."""
        return [helper.name for helper in self._by_fd.values()]

    def wait(self, name: str, timeout_s: float) -> bool:
        """Waits for a helper. Returns False if it did not end in time."""
        deadline = time.monotonic() + timeout_s
        while (fd := next((fd for fd, helper in self._by_fd.items() if helper.name == name), None)) is not None:
            left = deadline - time.monotonic()
            if left <= 0 or not readable([fd], left):
                return False
            self.receive(fd)
        return True

    def stop(self, name: str) -> None:
        """Kills a helper, if it still runs; its `on_end` comes once it has ended."""
        for helper in self._by_fd.values():
            if helper.name == name:
                with contextlib.suppress(OSError):
                    os.kill(helper.pid, signal.SIGKILL)

    def close(self) -> None:
        """Kills all helpers; their results are lost."""
        for fd, helper in self._by_fd.items():
            with contextlib.suppress(OSError):
                os.kill(helper.pid, signal.SIGKILL)
            os.close(fd)
            reap(helper.pid, 0.5)
        self._by_fd.clear()
