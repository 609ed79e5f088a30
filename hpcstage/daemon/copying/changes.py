"""Notices changes that programs without the shim make on this node: the kernel reports them by directory (inotify).

Owns the watches. A helper sets them once there is a manifest, on the directories of the datasets, and on files that are
symbolic links or have further names; reading causes no event. Where the kernel lost events, everything counts as
changed. The record says what is not watched. The kernel does not report changes that other nodes make.

Directories and links above the roots are watched for being renamed and replaced. Whether the datasets' names still lead
where they did is looked at then, and now and then, since other machines replace them, too.
"""

from __future__ import annotations

import errno
import json
import os
import selectors
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path

from hpcstage.daemon.queue.queue import Queue
from hpcstage.daemon.queue.states import FileState
from hpcstage.forked import Helpers
from hpcstage.inotify import (
    ATTRIB,
    CLOSE_WRITE,
    CREATE,
    DONT_FOLLOW,
    MODIFY,
    MOVES,
    OVERFLOW,
    SELF,
    EventQueue,
    events,
)
from hpcstage.plan.dataset.manifest import Manifest
from hpcstage.plan.dataset.roots import is_below
from hpcstage.problem import Problem

HELPER = "changes"
LEADS_HELPER = "leads"
LEADS_EVERY_S = 10.0
MOST_WATCHES = 65_536
LIMIT_FILE = Path("/proc/sys/fs/inotify/max_user_watches")
NO_WATCH_LEFT = "the limit of this user's watches: fs.inotify.max_user_watches"
NO_QUEUE_LEFT = "the limit of this user's queues: fs.inotify.max_user_instances"
MASK = MODIFY | ATTRIB | CLOSE_WRITE | CREATE | MOVES
_MASK_ABOVE = ATTRIB | SELF | DONT_FOLLOW
_GONE = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP})


def unnoticed(host: str, where: str) -> Problem:
    """Returns what to tell of directories that are not watched."""
    text = f"on {host}, changes by programs without hpcstage are not noticed in {where}"
    return Problem("changes-unseen", text, "if such programs write to the datasets during the job, use --mode direct")


class Changes:
    """Owns the watches. It calls `void` with a path that was changed, `moved` with a dataset's root that leads
    elsewhere, `unseen` with what is not watched and why."""

    def __init__(
        self,
        helpers: Helpers,
        selector: selectors.BaseSelector,
        manifest: Manifest,
        queue: Queue,
        void: Callable[[bytes], object],
        moved: Callable[[bytes], object],
        unseen: Callable[[str], None],
    ) -> None:
        self._helpers = helpers
        self._selector = selector
        self._manifest = manifest
        self._queue = queue
        self._void = void
        self._moved = moved
        self._unseen = unseen
        self._leads: dict[bytes, list[int]] = {}
        """By name of a dataset's root: what it was first, as device and inode; empty where there was nothing."""
        self._replaced: set[bytes] = set()
        """The roots that lead elsewhere, of which nothing is served any more."""
        self._look_at = 0.0
        self._names: dict[int, list[bytes]] = {}
        """By the number of a watch: the absolute paths that it watches."""
        try:
            self._events = watched = EventQueue()
        except OSError as error:
            self._unseen(f"no directory of the datasets ({error.strerror})")
            return
        work = lambda: json.dumps([_leads(manifest), *_watch_all(watched, manifest)]).encode()  # noqa: E731
        if helpers.start(HELPER, work, self._set, open_fds=(watched.fd,), gives_way=True) is None:
            self._set(None)

    def _set(self, data: bytes | None) -> None:
        if data is None:
            self._unseen("no directory of the datasets (the watches could not be set)")
            return
        leads, names, missing, why = json.loads(data)
        self._compare(leads)
        for number, name in names:
            self._names.setdefault(number, []).append(os.fsencode(name))
        if missing:
            self._unseen(f"{missing} of {len(names) + missing} directories and linked files ({why})")
        self._selector.register(self._events.fd, selectors.EVENT_READ, self.read)

    def read(self) -> None:
        """Reads the kernel's events and voids what was changed."""
        came = {(number, mask, name) for number, mask, _, name in events(self._events.read())}
        if any(mask & OVERFLOW for _, mask, _ in came):
            for dataset in self._manifest.datasets:
                self._void(dataset.root)
            return
        for number, mask, name in sorted(came):
            for directory in self._names.get(number, ()):
                self._changed(directory + b"/" + name if name else directory, mask)

    def look(self, now: float) -> None:
        """Looks, if it is time, whether the names of the datasets lead where they did."""
        if now >= self._look_at and LEADS_HELPER not in self._helpers.names():
            self._look_at = now + LEADS_EVERY_S
            work = lambda: json.dumps(_leads(self._manifest)).encode()  # noqa: E731
            done = lambda data: self._compare(json.loads(data or b"[]"))  # noqa: E731
            self._helpers.start(LEADS_HELPER, work, done, gives_way=True)

    def _compare(self, leads: list[list[int] | None]) -> None:
        for (name, root), found in zip(_names(self._manifest), leads, strict=False):
            if found is None or self._leads.setdefault(name, found) == found or root in self._replaced:
                continue
            self._replaced.add(root)
            self._moved(root)

    def _changed(self, path: bytes, mask: int) -> None:
        id_, states = self._manifest.find_source(path), self._queue.states
        if id_ is not None:
            if states.of(id_) is not FileState.VOID:
                self._void(path)
        elif mask & MOVES and any(states.of(i) is not FileState.VOID for i in self._manifest.ids_below(path)):
            self._void(path)
        if any(is_below(name, path) for name, _ in _names(self._manifest)):
            self._look_at = 0.0


def _names(manifest: Manifest) -> list[tuple[bytes, bytes]]:
    """Returns all names of the roots, each with the root."""
    return [(name, dataset.root) for dataset in manifest.datasets for name in (dataset.root, *dataset.aliases)]


def _leads(manifest: Manifest) -> list[list[int] | None]:
    """Returns for each of these names device and inode of what has it; empty if there is nothing, None if that cannot
    be known now. Runs in a helper, since the source may hang."""
    found: list[list[int] | None] = []
    for name, _ in _names(manifest):
        try:
            info = os.stat(name)
            found.append([info.st_dev, info.st_ino])
        except OSError as error:
            found.append([] if error.errno in _GONE else None)
    return found


def _watch_all(watched: EventQueue, manifest: Manifest) -> tuple[list[tuple[int, str]], int, str]:
    """Sets the watches, in the helper. Returns (number, path) of each, how many could not be set, and why."""
    most = limit()
    names: list[tuple[int, str]] = []
    missing, why = 0, ""
    above = ((path, _MASK_ABOVE) for path in to_watch_above(manifest))
    for path, mask in chain(above, ((path, MASK) for path in to_watch(manifest))):
        if why and len(names) >= most:
            missing += 1
            continue
        try:
            if len(names) >= most:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            names.append((watched.add(path, mask), os.fsdecode(path)))
        except OSError as error:
            missing += 1
            if error.errno == errno.ENOSPC:
                most = len(names)
                why = NO_WATCH_LEFT
            else:
                why = why or str(error.strerror)
    return names, missing, why


def limit() -> int:
    """Returns half of the watches that the user may have: other programs of the user need some, too."""
    try:
        return min(MOST_WATCHES, int(LIMIT_FILE.read_text()) // 2)
    except (OSError, ValueError):
        return MOST_WATCHES


def to_watch_above(manifest: Manifest) -> list[bytes]:
    """Returns the directories and links above the roots, by all their names, and the names that are links."""
    found = set()
    for name, root in _names(manifest):
        above = name if name != root else os.path.dirname(name)
        while above not in found and above != b"/":
            found.add(above)
            above = os.path.dirname(above)
    return sorted(found)


def to_watch(manifest: Manifest) -> Iterator[bytes]:
    """Yields the directories of the files and those above them up to the roots, then files with names elsewhere."""
    for dataset in range(len(manifest.datasets)):
        root = manifest.datasets[dataset].root
        yield root
        seen = {b""}
        for id_ in manifest.ids_of(dataset):
            below = manifest.path(id_).rpartition(b"/")[0]
            while below not in seen:
                seen.add(below)
                yield root + b"/" + below
                below = below.rpartition(b"/")[0]
    for id_ in manifest.named_elsewhere():
        yield manifest.source_path(id_)
