"""How a daemon goes: its directory is out of sight before the first of it is deleted."""
# ruff: noqa: F811  fixtures are imported

from __future__ import annotations

import ctypes
import os
import struct
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from daemon_process import start_daemon, wait_until  # noqa: F401

from hpcstage.daemon.main import POOL_END_S
from hpcstage.job.localdir import LocalDir
from hpcstage.node import directory as nodedir

MOVED_FROM, MOVED_TO, DELETED, QUEUE_OVERFLOW = 0x40, 0x80, 0x200, 0x4000
HEAD = struct.Struct("iIII")


class Watched:
    """What the kernel says of moves and deletions in some directories, in order."""

    def __init__(self, directories: list[Path]) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        self._fd = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        if self._fd < 0:
            pytest.skip(f"no inotify: {os.strerror(ctypes.get_errno())}")
        self._names = {}
        for directory in directories:
            watch = libc.inotify_add_watch(self._fd, os.fsencode(directory), MOVED_FROM | MOVED_TO | DELETED)
            assert watch >= 0, os.strerror(ctypes.get_errno())
            self._names[watch] = directory

    def events(self) -> Iterator[tuple[int, Path]]:
        """(what, path) of all until now; paths as they were when this began."""
        data = b""
        while True:
            try:
                data += os.read(self._fd, 1 << 20)
            except BlockingIOError:
                break
        while data:
            watch, mask, _, size = HEAD.unpack_from(data)
            assert not mask & QUEUE_OVERFLOW
            name = data[HEAD.size : HEAD.size + size].rstrip(b"\0")
            data = data[HEAD.size + size :]
            if mask & (MOVED_FROM | MOVED_TO | DELETED):
                yield mask & (MOVED_FROM | MOVED_TO | DELETED), self._names[watch] / os.fsdecode(name)

    def close(self) -> None:
        os.close(self._fd)


def test_the_node_directory_is_put_aside_before_it_is_deleted(start_daemon, make_tree, local_dir):
    claim = nodedir.claim(LocalDir(local_dir, "test", (), False, 0, None, 0), "run")
    assert claim.lock_fd is not None
    daemon = start_daemon(make_tree(files=30), node_dir=claim.path, lock_fd=claim.lock_fd).attach()
    os.close(claim.lock_fd)
    daemon.staged()
    store = [claim.path / "store", *(path for path in (claim.path / "store").rglob("*") if path.is_dir())]
    assert sum(path.is_file() for path in store[0].rglob("*")) == 30
    watched = Watched([claim.path.parent, claim.path, *store])
    try:
        daemon.end()
        events = list(watched.events())
    finally:
        watched.close()
    moved = events.index((MOVED_FROM, claim.path))
    gone = [number for number, (what, path) in enumerate(events) if what == DELETED and path.is_relative_to(store[0])]
    assert len(gone) >= 30
    assert moved < min(gone)
    what, aside = events[moved + 1]
    assert (what, aside.parent) == (MOVED_TO, claim.path.parent)
    assert events[-1] == (DELETED, aside), "and nothing of it stays"
    assert sorted(path.name for path in claim.path.parent.iterdir()) == [".lock"]


def test_a_copier_that_does_not_answer_holds_up_nothing(start_daemon, make_tree):
    daemon = start_daemon(make_tree(files=30)).attach()
    daemon.staged()
    wait_until(lambda: all(copier.status() == "sleeping" for copier in daemon.children()))
    for copier in daemon.children():
        copier.suspend()
    begin_s = time.monotonic()
    daemon.end()
    assert time.monotonic() - begin_s < POOL_END_S
