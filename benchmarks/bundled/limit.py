"""A memory limit for a process and what it reads: a cgroup of version 1 or 2, whichever has the memory controller.

Owns: finding it, one group at a time, its removal, also of groups that dead runs left. Page cache counts for the group
whose process read it first, so the group's limit is the size of that process's page cache.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

import psutil

_PREFIX = "hpcstage-bench-"
_LIMITS = {1: "memory.limit_in_bytes", 2: "memory.max"}
_CACHED = {1: "cache", 2: "file"}


class LimitUnavailable(RuntimeError):
    """No memory can be limited here; the message says why."""


class MemoryLimit:
    """`with MemoryLimit(size_bytes) as limit:` is a group that processes join by writing their id to `limit.join`."""

    def __init__(self, size_bytes: int) -> None:
        self._size_bytes = size_bytes
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> MemoryLimit:
        with contextlib.ExitStack() as stack:
            root, self._version = _root()
            if self._version == 2:
                stack.enter_context(_passed_on(root))
            _remove_stale(root)
            self._path = root / f"{_PREFIX}{os.getpid()}"
            try:
                self._path.mkdir()
                stack.callback(self._path.rmdir)
                (self._path / _LIMITS[self._version]).write_text(str(self._size_bytes))
            except OSError as error:
                raise LimitUnavailable(f"{root} cannot be used: {error}") from error
            self._stack = stack.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._stack.close()

    @property
    def join(self) -> Path:
        """The file to write a process id to."""
        return self._path / "cgroup.procs"

    def cached_bytes(self) -> int:
        """The page cache that the group's processes have filled."""
        lines = (self._path / "memory.stat").read_text().splitlines()
        return int(dict(line.split() for line in lines)[_CACHED[self._version]])


def unavailable() -> str | None:
    """Why memory cannot be limited here; None if it can."""
    try:
        with MemoryLimit(64 << 20):
            return None
    except LimitUnavailable as error:
        return str(error)


def _root() -> tuple[Path, int]:
    """Where groups are made, and the version."""
    if os.geteuid() != 0:
        raise LimitUnavailable("a memory limit needs root")
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, path, kind, options = line.split()[:4]
        if kind == "cgroup" and "memory" in options.split(","):
            return Path(path), 1
        if kind == "cgroup2" and "memory" in (Path(path) / "cgroup.controllers").read_text().split():
            return Path(path), 2
    raise LimitUnavailable("no cgroup file system with the memory controller is mounted")


@contextlib.contextmanager
def _passed_on(root: Path) -> Iterator[None]:
    """With version 2, a group has only those controllers that the one above passes on."""
    control = root / "cgroup.subtree_control"
    if "memory" in control.read_text().split():
        yield
        return
    try:
        control.write_text("+memory")
    except OSError as error:
        raise LimitUnavailable(f"{control} cannot be changed: {error}") from error
    try:
        yield
    finally:
        control.write_text("-memory")


def _remove_stale(root: Path) -> None:
    for path in root.glob(_PREFIX + "*"):
        pid = path.name.removeprefix(_PREFIX)
        if pid.isdigit() and not psutil.pid_exists(int(pid)):
            with contextlib.suppress(OSError):
                path.rmdir()
