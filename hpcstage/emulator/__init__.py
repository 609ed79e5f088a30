"""Owns the slow-storage emulator: a directory seen as shared storage with limits, latencies and competing load.

The package starts, sets and ends one mount. It is a model (see slowfs.c), made so that contention comes from the
storage and not from the machine.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from hpcstage.emulator.build import EmulatorUnavailable, build, unavailable
from hpcstage.emulator.mounts import clean_stale, is_mounted, unmount
from hpcstage.emulator.state import NODES, Counters, Settings, StateFile

__all__ = [
    "NODES",
    "Counters",
    "EmulatorUnavailable",
    "Settings",
    "Slowfs",
    "StateFile",
    "clean_stale",
    "unavailable",
]

_START_TIMEOUT_S = 10.0
_STOP_TIMEOUT_S = 3.0
_POLL_S = 0.005


class Slowfs:
    """One mount. `with Slowfs(source, settings) as slow:` shows `source` at `slow.path` until the block ends.

    The mount also ends when this process dies, however it dies, and when the server does.
    """

    def __init__(
        self,
        source: Path,
        settings: Settings | None = None,
        *,
        mountpoint: Path | None = None,
        state: StateFile | None = None,
        node: int = 0,
        keep_cache: bool = False,
    ) -> None:
        """`state` is the storage that this mount is one node of; without it, the mount has a storage of its own with
        `settings`."""
        self.source = source.resolve()
        self._stack = contextlib.ExitStack()
        self._given_mountpoint = mountpoint
        self._given_state = state
        self._settings = settings
        self._node = node
        self._keep_cache = keep_cache
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Slowfs:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop()

    def start(self) -> None:
        """Builds the server if needed and mounts. Raises EmulatorUnavailable with the reason."""
        clean_stale()
        binary = build()
        try:
            self.state = self._given_state or self._own_state()
            if self._given_state and self._settings:
                self.state.set(self._settings)
            self.path = self._mountpoint()
            self._launch(binary)
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Unmounts, even with files open there, and ends the server. Bounded; may be called twice."""
        if self._process:
            unmount(self.path)
            _end(self._process)
            self._process = None
        self._stack.close()

    def change(self, **settings: float) -> None:
        """Changes single settings while mounted, for all mounts of this storage."""
        self.state.set(replace(self.state.settings, **settings))

    def counters(self) -> Counters:
        """Returns what this mount was asked for so far."""
        return self.state.counters(self._node)

    @property
    def server_pid(self) -> int:
        """Returns the id of the server's process; 0 if there is none."""
        return self._process.pid if self._process else 0

    def _own_state(self) -> StateFile:
        state = StateFile(self._settings)
        self._stack.callback(state.close)
        return state

    def _mountpoint(self) -> Path:
        if self._given_mountpoint:
            return self._given_mountpoint.resolve()
        path = Path(tempfile.mkdtemp(prefix="hpcstage-slowfs-")).resolve()
        self._stack.callback(_remove_empty, path)
        return path

    def _launch(self, binary: Path) -> None:
        options = f"node={self._node},keep={int(self._keep_cache)}"
        if _may_allow_other():
            options += ",allow_other,default_permissions"
        self.state.clear_server(self._node)
        log: IO[Any] = self._stack.enter_context(tempfile.TemporaryFile())  # noqa: SIM115  closed by the stack
        command = [*map(os.fspath, (binary, self.source, self.path, self.state.path)), "-o", options]
        with _sigterm_waits():  # nobody would end a server of which nothing is known yet
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        self._wait_until_mounted(log)

    def _wait_until_mounted(self, log: IO[Any]) -> None:
        assert self._process
        deadline = time.monotonic() + _START_TIMEOUT_S
        while not (self.state.server_pid(self._node) == self._process.pid and is_mounted(self.path)):
            if self._process.poll() is not None or time.monotonic() > deadline:
                log.seek(0)
                said = log.read().decode(errors="replace").strip()[-300:]
                raise EmulatorUnavailable(f"cannot mount {self.path}: {said or 'no answer'}", "is FUSE permitted here?")
            time.sleep(_POLL_S)


@contextlib.contextmanager
def _sigterm_waits() -> Iterator[None]:
    """Has a SIGTERM take effect at the end of the block; its handler may raise."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: came.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
        for number in came[:1]:
            signal.raise_signal(number)


def _end(process: subprocess.Popen[bytes]) -> None:
    for end in (process.terminate, process.kill):
        end()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_STOP_TIMEOUT_S)
            return


def _remove_empty(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.rmdir()


def _may_allow_other() -> bool:
    if os.geteuid() == 0:
        return True
    try:
        lines = Path("/etc/fuse.conf").read_text().splitlines()
    except OSError:
        return False
    return "user_allow_other" in (line.strip() for line in lines)
