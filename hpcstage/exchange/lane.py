"""Does work that touches files: at once as long as the file system is quick, in a thread of its own when it is not.

So a slow disk does not hold up an exchange that only passes messages on, and where files are in memory no thread has to
be woken for a fraction of a millisecond's work.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

Then = Callable[[Any], None]
SLOW_S = 0.005
"""Work that took longer makes the lane slow; work that took less makes it quick again."""


class Wake:
    """A descriptor that becomes readable when a lane has finished something."""

    def __init__(self) -> None:
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def fileno(self) -> int:
        """Returns the descriptor, for select."""
        return self._fd

    def up(self) -> None:
        """Makes the descriptor readable; may be called from any thread."""
        os.eventfd_write(self._fd, 1)

    def clear(self) -> None:
        """Makes the descriptor unreadable again; to be called before looking at what is finished."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._fd)


class Lanes:
    """Owns the two lanes of an exchange: one reads files, one writes them."""

    def __init__(self) -> None:
        self.wake = Wake()
        self.reading, self.writing = Lane("reading", self.wake), Lane("writing", self.wake)

    def collect(self) -> bool:
        """Hands over what is finished on both, and returns whether there was anything."""
        return self.reading.collect() | self.writing.collect()


class Lane:
    """Does one piece of work after the other, and hands over the results when `collect` is called."""

    def __init__(self, name: str, wake: Wake, *, slow_s: float = SLOW_S) -> None:
        self._wake = wake
        self._slow_s = slow_s
        self._is_quick = slow_s > 0
        self._work: SimpleQueue[tuple[Callable[[], Any], Then]] = SimpleQueue()
        self._finished: deque[tuple[Then, Any, BaseException | None]] = deque()
        self.pending = 0
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def submit(self, work: Callable[[], Any], then: Then) -> None:
        """Does work or queues it; `then` gets its result."""
        in_thread = self.pending - len(self._finished)
        self.pending += 1
        if self._is_quick and not in_thread:
            self._do(work, then)
        else:
            self._work.put((work, then))

    def collect(self) -> bool:
        """Hands over what is finished, and returns whether there was anything. Raises what the work raised."""
        any_finished = False
        while self._finished:
            then, result, error = self._finished.popleft()
            self.pending -= 1
            any_finished = True
            if error is not None:
                raise error
            then(result)
        return any_finished

    def _do(self, work: Callable[[], Any], then: Then) -> None:
        start = time.monotonic()
        try:
            result, error = work(), None
        except BaseException as raised:  # noqa: BLE001  it is raised where the result is awaited
            result, error = None, raised
        self._is_quick = time.monotonic() - start < self._slow_s
        self._finished.append((then, result, error))

    def _run(self) -> None:
        while True:
            work, then = self._work.get()
            self._do(work, then)
            del work, then
            self._wake.up()
