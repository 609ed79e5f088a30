"""Emulated shared storage for one sample: a fresh mount (nothing of it is cached) and a competing load.

Owns: how the load is made: readers of another node, as the paper's IOR, read a file of the same storage through a mount
of their own, past the page cache. The storage is shared by node, by weight (see slowfs.c): the load takes bandwidth
away, not the processor.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from benchmarks.programs import flatout
from hpcstage.emulator import Counters, Settings, Slowfs, StateFile

_LOAD_NODE = 1
_LOAD_FILE_BYTES = 64 << 20
_LOAD_REQUEST_BYTES = 1 << 20
_END_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class Load:
    """The competing node."""

    weight: float
    """Against 1 for the node that is measured: 4 leaves it a fifth."""
    readers: int = 4


class Storage:
    """`with Storage(data, settings, scratch) as storage:` shows `data` at `storage.path`, always the same path."""

    def __init__(
        self, data: Path, settings: Settings, scratch: Path, load: Load | None = None, *, keep_cache: bool = False
    ) -> None:
        """`scratch`: a directory in memory for mount points and the file that the load reads.

        `keep_cache`: the page cache of a file outlives its opens, as with the clients of shared file systems.
        """
        self.path = scratch / "shared"
        self._data = data
        self._settings = settings
        self._scratch = scratch
        self._load = load
        self._keep_cache = keep_cache
        self._stack = contextlib.ExitStack()
        self._readers: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Storage:
        with contextlib.ExitStack() as stack:
            self._state = StateFile(self._settings)
            stack.callback(self._state.close)
            self.path.mkdir(exist_ok=True)
            mount = Slowfs(self._data, mountpoint=self.path, state=self._state, keep_cache=self._keep_cache)
            self.mount = stack.enter_context(mount)
            if self._load:
                self._load_mount = stack.enter_context(self._other_node(self._load))
            stack.callback(self.load_off)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._stack.close()

    def load_on(self) -> None:
        """The competing node begins."""
        if not self._load:
            return
        names = self._scratch / "load.list"
        names.write_bytes(os.fsencode(self._load_mount.path / "load.bin") + b"\0")
        command = [
            str(flatout()),
            "-l",
            "-d",
            "-t",
            str(self._load.readers),
            "-r",
            str(_LOAD_REQUEST_BYTES),
            str(names),
        ]
        self._readers = subprocess.Popen(command, stdout=subprocess.DEVNULL)

    def load_off(self) -> None:
        """It ends; requests that wait are still served."""
        if self._readers:
            self._readers.kill()
            self._readers.wait(_END_TIMEOUT_S)
            self._readers = None

    def counters(self) -> Counters:
        """What the measured node asked of the storage."""
        return self.mount.counters()

    def _other_node(self, load: Load) -> Slowfs:
        data, mountpoint = self._scratch / "load-data", self._scratch / "other-node"
        for path in (data, mountpoint):
            path.mkdir(exist_ok=True)
        file = data / "load.bin"
        if not file.exists():
            file.write_bytes(os.urandom(_LOAD_FILE_BYTES))
        self._state.set_weight(_LOAD_NODE, load.weight)
        return Slowfs(data, mountpoint=mountpoint, state=self._state, node=_LOAD_NODE)
