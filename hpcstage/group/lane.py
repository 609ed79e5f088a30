"""A thread that does what touches files, so that a slow disk holds up nobody who only passes messages on."""

from __future__ import annotations

import contextlib
import os
import threading
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

Then = Callable[[Any], None]


class Wake:
    """A descriptor that becomes readable when a lane has finished something."""

    def __init__(self) -> None:
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def fileno(self) -> int:
        """For select."""
        return self._fd

    def up(self) -> None:
        """From any thread."""
        os.eventfd_write(self._fd, 1)

    def clear(self) -> None:
        """Before looking at what is finished."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._fd)


class Lane:
    """Does one piece of work after the other; what comes out is handed over in the thread that calls `collect`."""

    def __init__(self, name: str, wake: Wake) -> None:
        self._wake = wake
        self._work: SimpleQueue[tuple[Callable[[], Any], Then]] = SimpleQueue()
        self._finished: deque[tuple[Then, Any, BaseException | None]] = deque()
        self.pending = 0
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def submit(self, work: Callable[[], Any], then: Then) -> None:
        """Queues work; `then` gets its result."""
        self.pending += 1
        self._work.put((work, then))

    def collect(self) -> bool:
        """Hands over what is finished. Raises what was raised in the thread. Whether there was anything."""
        any_finished = False
        while self._finished:
            then, result, error = self._finished.popleft()
            self.pending -= 1
            any_finished = True
            if error is not None:
                raise error
            then(result)
        return any_finished

    def _run(self) -> None:
        while True:
            work, then = self._work.get()
            try:
                self._finished.append((then, work(), None))
            except BaseException as error:  # noqa: BLE001  it is raised where the result is awaited
                self._finished.append((then, None, error))
            del work, then
            self._wake.up()
