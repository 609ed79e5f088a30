"""Removes the directories of runs that ended long ago, and their lines in the index.

A directory is removed if it is this user's, its run is over, and it holds nothing but what hpcstage writes into a run
directory. No link is followed. What tells that it is a run directory goes last, so that whoever is killed half-way is
followed by one who goes on; the line in the index goes after the directory.
"""

from __future__ import annotations

import contextlib
import os
import stat
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from hpcstage.errors import NoResult
from hpcstage.protocol.rundir import GROUP, NODES, PART, RECORD
from hpcstage.record import files, index, runs
from hpcstage.record.parts import alive
from hpcstage.record.runs import ListedRun

LAST = (PART, RECORD)
OF_NODES = (".json", ".events", ".log")
"""How the names of files end that hpcstage writes into the directory of the nodes' parts."""
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


@dataclass(frozen=True)
class Pruned:
    """A run of which nothing was heard for so long, and what became of it."""

    run: ListedRun
    freed_bytes: int = 0
    left: str = ""
    """Why its directory stays; empty: it is removed, or would be."""


def prune(env: Mapping[str, str], cwd: Path, older_s: float, *, removes: bool) -> Iterator[Pruned]:
    """Yields the runs of which nothing was heard for longer than `older_s`, and removes those that may go."""
    seen, gone = set[str](), set[str]()
    try:
        for run in map(runs.now, runs.known(env, cwd)):
            if run.line.run_dir in seen:
                continue  # an earlier run in the directory of a later one
            seen.add(run.line.run_dir)
            path = Path(run.line.run_dir)
            if time.time() - max(alive.last_sign_s(path), run.line.started_unix_s) < older_s:
                continue
            if not run.is_there:
                # Where its parent is not there either, the file system may not be mounted on this host.
                gone |= {run.line.run_dir} if path.parent.is_dir() else set()
                continue
            done = _pruned(run, path, removes=removes)
            gone |= set() if done.left else {run.line.run_dir}
            yield done
    finally:
        if removes:
            index.forget(gone, env)


def _pruned(run: ListedRun, path: Path, *, removes: bool) -> Pruned:
    if not run.is_over:
        return Pruned(run, left="it may still run")
    if left := _unsaved(path):
        return Pruned(run, left=left)
    try:
        fd = os.open(path, _DIRECTORY)
    except OSError as error:
        return Pruned(run, left=f"it cannot be opened, or is a link: {error.strerror}")
    try:
        if os.fstat(fd).st_uid != os.geteuid():
            return Pruned(run, left="it is another user's")
        if foreign := next(_foreign(run, fd), None):
            return Pruned(run, left=f"it holds what hpcstage did not write: {foreign}")
        names = sorted(os.listdir(fd), key=lambda name: LAST.index(name) if name in LAST else -1)
        freed = sum(_remove(name, fd, removes=removes) for name in names)
        if removes:
            path.rmdir()
        return Pruned(run, freed)
    except OSError as error:
        return Pruned(run, left=f"it cannot be removed: {error.strerror}: {error.filename}")
    finally:
        os.close(fd)


def _unsaved(path: Path) -> str:
    """Says that output files or checkpoints of the run may be on its nodes yet; empty: all are where they belong."""
    with contextlib.suppress(NoResult):
        record = files.load_run(path)
        if any(drain.undrained for drain in record.drains.values()):
            return "files of it were not copied to their directory, and its report says where they are"
        asked = {record.config.get(key) for key in ("out", "checkpoint")} - {None, "none"}
        if asked and record.run.state == "lost":
            return "it was killed, and files of its --out or --checkpoint may be on its nodes: hpcstage clean --drain"
    return ""


def _foreign(run: ListedRun, fd: int) -> Iterator[str]:
    """Yields what is in a run directory although hpcstage does not write it there."""
    ours = {RECORD, PART, NODES, f"elastic-{run.line.run_id}", *([GROUP] if run.line.nodes > 1 else [])}
    for name in os.listdir(fd):
        if name not in ours and not name.startswith(tuple(f".{ours}." for ours in LAST)):
            yield name
        elif name == NODES and stat.S_ISDIR(os.stat(name, dir_fd=fd, follow_symlinks=False).st_mode):
            nodes = os.open(name, _DIRECTORY, dir_fd=fd)
            try:
                yield from (f"{NODES}/{one}" for one in os.listdir(nodes) if not _is_of_node(one))
            finally:
                os.close(nodes)


def _is_of_node(name: str) -> bool:
    """Returns whether a file of this name is a node's, or a temporary one that a killed daemon left."""
    return name.endswith(OF_NODES) or (name.startswith(".") and name.rpartition(".")[0].endswith(OF_NODES))


def _remove(name: str, parent: int, *, removes: bool) -> int:
    """Removes a name below a directory, and what is below it; returns the bytes that this frees. A link is removed
    itself."""
    try:
        found = os.stat(name, dir_fd=parent, follow_symlinks=False)
    except FileNotFoundError:
        return 0  # another process removes the same
    if not stat.S_ISDIR(found.st_mode):
        if removes:
            os.unlink(name, dir_fd=parent)
        return found.st_size if found.st_nlink == 1 else 0
    fd = os.open(name, _DIRECTORY, dir_fd=parent)
    try:
        freed = sum(_remove(child, fd, removes=removes) for child in os.listdir(fd))
    finally:
        os.close(fd)
    if removes:
        os.rmdir(name, dir_fd=parent)
    return freed
