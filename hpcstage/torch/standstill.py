"""Measures how long training stands still in saves, and tells the daemon of `hpcstage run`, whose report says it.

Outside of `hpcstage run` nothing is told. What cannot be told costs nothing but the figure.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator

from hpcstage.protocol import saves

_NODE_DIR = "HPCSTAGE_NODE_DIR"


class Standstill:
    """The time in which the saves of this process held up its training."""

    def __init__(self) -> None:
        self._pid, self._name = 0, ""
        self._saves = 0
        self._ns = 0

    @contextlib.contextmanager
    def measured(self) -> Iterator[None]:
        """Adds the time of one save, however it ends, to what is told."""
        began_ns = time.monotonic_ns()
        try:
            yield
        finally:
            if self._pid != os.getpid():  # what a forked process did not wait for is not its own
                self._pid, self._saves, self._ns = os.getpid(), 0, 0
                self._name = f"{self._pid}-{os.urandom(4).hex()}"  # in containers two processes may have one number
            self._saves += 1
            self._ns += time.monotonic_ns() - began_ns
            with contextlib.suppress(OSError):
                self._tell()

    def _tell(self) -> None:
        if node_dir := os.environ.get(_NODE_DIR):
            directory = f"{node_dir}/{saves.DIRECTORY}"
            with contextlib.suppress(FileExistsError):
                os.mkdir(directory, 0o700)
            fd = os.open(f"{directory}/{self._name}", os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                os.pwrite(fd, saves.SAVES.pack(self._saves, self._ns), 0)
            finally:
                os.close(fd)


OF_PROCESS = Standstill()
"""The saves of all checkpointers of this process."""
