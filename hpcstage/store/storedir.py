"""Manages the store in the node directory: its names, its budget, and the removal of copies and of whole directories.

Owns names below the node directory and tombstones. The copiers publish copies.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import chain, islice
from pathlib import Path

from hpcstage.plan.budget import BudgetFacts, decide
from hpcstage.plan.types import Budget
from hpcstage.protocol import nodedir

_REMOVERS = 8
_BATCH = 256
_FEW_BATCHES = 4
"""The number of batches that one thread removes faster than several threads are started."""


def budget(path: Path, facts: BudgetFacts) -> Budget:
    """Returns the budget by what is free now: leftovers of dead jobs may have gone since the facts were taken.

    Virtual nodes divide what was free before any of them staged.
    """
    if facts.nodes > 1:
        return decide(facts)
    now = os.statvfs(path)
    free_inodes = now.f_favail if now.f_files else None
    return decide(replace(facts, free_bytes=now.f_bavail * now.f_frsize, free_inodes=free_inodes))


class Store:
    """Owns the names of copies and tombstones in a node directory. It calls `on_stuck` with a copy that cannot be
    removed, and why."""

    def __init__(self, node_dir: Path, on_stuck: Callable[[bytes, str], None] = lambda *_: None) -> None:
        self._on_stuck = on_stuck
        self.node_dir = node_dir
        self.root = os.fsencode(node_dir / nodedir.STORE)
        self._asides = 0

    def make(self) -> None:
        """Makes the directories that copiers need, and removes what an earlier daemon left in `incoming`."""
        shutil.rmtree(self.node_dir / nodedir.INCOMING, ignore_errors=True)
        for name in (nodedir.STORE, nodedir.INCOMING, nodedir.LINKS, nodedir.ORDERS):
            (self.node_dir / name).mkdir(mode=0o700, parents=True, exist_ok=True)

    def path(self, store_path: bytes) -> bytes:
        """Returns the path of a copy."""
        return self.root + b"/" + store_path

    def drop(self, id_: int, store_path: bytes) -> None:
        """Removes a copy that is not in flight."""
        try:
            os.unlink(self.path(store_path))
        except (FileNotFoundError, NotADirectoryError):
            pass
        except OSError as error:
            self._on_stuck(store_path, os.strerror(error.errno or 0))
        self.drop_link(id_)

    def drop_link(self, id_: int) -> None:
        """Removes the second name of a copy, if it has one."""
        with contextlib.suppress(OSError):
            os.unlink(self._link(b"", id_))

    def put_aside(self, directory: bytes) -> bytes | None:
        """Renames a directory of the store out of sight, in one step, to a name that no other Store of this process
        gives. Returns the name; None if there was no such directory."""
        aside = os.fsencode(self.node_dir / nodedir.GONE)
        with contextlib.suppress(FileExistsError):
            os.mkdir(aside, 0o700)
        self._asides += 1
        name = aside + b"/%x-%d" % (id(self), self._asides)
        try:
            os.rename(self.path(directory), name)
        except FileNotFoundError:
            return None
        return name

    def bar(self, id_: int, store_path: bytes) -> bool:
        """Puts a tombstone in the place of a copy that is in flight: from now on it cannot be published.

        A tombstone is a dangling symbolic link with two names: opening it fails, so readers go to the source, and
        lstat shows the second name, as it does for copies of the source's own symbolic links. Returns False if the disk
        does not take it.
        """
        path, second = self.path(store_path), self._link(b"void-", id_)
        try:
            self._tombstone(second)
            os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
            while True:
                try:
                    os.link(second, path, follow_symlinks=False)
                    return True
                except FileExistsError:
                    if os.path.islink(path):
                        return True
                    os.unlink(path)
        except OSError:
            return False

    def unbar(self, id_: int, store_path: bytes) -> None:
        """Removes the tombstone of a transfer that has ended."""
        path = self.path(store_path)
        with contextlib.suppress(OSError):
            if os.path.islink(path):
                os.unlink(path)
        for prefix in (b"void-", b""):
            with contextlib.suppress(OSError):
                os.unlink(self._link(prefix, id_))

    def _tombstone(self, path: bytes) -> None:
        with contextlib.suppress(FileExistsError):
            os.symlink(b"/nonexistent/hpcstage-void", path)

    def _link(self, prefix: bytes, id_: int) -> bytes:
        return os.fsencode(self.node_dir / nodedir.LINKS) + b"/" + prefix + b"%d" % id_


def remove_tree(path: Path | str, *, last: tuple[str, ...] = ()) -> None:
    """Removes a directory, a large one with several threads; entries named in `last` go last. Passes over errors."""
    directories: list[bytes] = []
    batches = _batches(os.fsencode(path), {os.fsencode(name) for name in last}, directories)
    for batch in islice(batches, _FEW_BATCHES):
        _unlink_all(batch)
    for first in batches:
        from concurrent.futures import ThreadPoolExecutor

        with ThreadPoolExecutor(_REMOVERS) as pool:
            for _ in pool.map(_unlink_all, chain([first], batches)):
                pass
    for directory in reversed(directories):
        with contextlib.suppress(OSError):
            os.rmdir(directory)
    shutil.rmtree(path, ignore_errors=True)


def _batches(path: bytes, kept: set[bytes], directories: list[bytes]) -> Iterator[list[bytes]]:
    """Yields the files below a directory in batches, without recursion; appends the directories below it to
    `directories`."""
    stack, files = [path], []
    while stack:
        directory = stack.pop()
        with contextlib.suppress(OSError), os.scandir(directory) as entries:
            for entry in entries:
                if directory == path and entry.name in kept:
                    continue
                if entry.is_dir(follow_symlinks=False):
                    stack.append(entry.path)
                    directories.append(entry.path)
                    continue
                files.append(entry.path)
                if len(files) == _BATCH:
                    yield files
                    files = []
    yield files


def _unlink_all(paths: list[bytes]) -> None:
    for path in paths:
        with contextlib.suppress(OSError):
            os.unlink(path)
