"""Runs work that may take long or hang in forked helpers: the scan, writing to the run directory, deleting.

Owns their processes. The daemon stays a single thread that waits for nothing but its selector; a helper hands back
bytes through a pipe and never outlives the daemon.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass

from hpcstage.forked import fork, reap
from hpcstage.reading import readable

_READ_BYTES = 1 << 16
_NICEST = 19


@dataclass
class _Helper:
    name: str
    pid: int
    on_end: Callable[[bytes | None], None]
    data: bytes = b""


class Helpers:
    """Owns the running helpers, by the descriptor of their pipe."""

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
