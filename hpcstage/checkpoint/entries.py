"""Finds the checkpoints that a program completed in a directory: the entries directly below it, files or directories.

Owns one watch (inotify) of the directory's names, and looks at the entries now and then. An entry is complete when
nobody has any of its files open for writing, and it was renamed to its name and not changed since, or has been as it is
for some time; a symbolic link is when the entry to which it leads is. The kernel says whether a file is open for
writing, by descriptor or mapping, when it is asked for a lease; where it grants none to anybody (other owners, some
file systems), time alone tells. Names that begin with a dot are those of entries that are being made; who looks when
nobody makes any more has them, too.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
import stat
import time
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from hpcstage import inotify
from hpcstage.inotify import EventQueue
from hpcstage.leases import is_written

QUIET_S = 2.0
"""The time after which an entry that was not renamed and does not change counts as complete."""
LOOK_S = 0.5
"""The least time between two looks at entries in which no name changed."""
_MOST_LOOKING = 0.02
"""The largest share of the time that goes into looking."""
_MASK = (
    *(inotify.CREATE, inotify.CLOSE_WRITE, inotify.DELETE, inotify.MOVED_FROM, inotify.MOVED_TO),
    *(inotify.SELF, inotify.ONLYDIR, inotify.DONT_FOLLOW),
)
_ENDS = inotify.SELF | inotify.UNMOUNT | inotify.IGNORED
_Print = tuple[tuple[str, int, int, int, int], ...]
"""For each name of an entry the values that change when it does."""


@dataclass
class _Entry:
    """One entry, as it was at the last look."""

    found: _Print
    since: float
    """When it was first seen as it is, or last seen open for writing: a killed program closes what it had half
    written."""
    was_renamed: bool
    """Whether it was renamed to its name and is what it was then."""
    leads_to: str | None
    """The entry to which a symbolic link leads, which is made in one step; empty: elsewhere. None: it is no link."""
    is_complete: bool = False

    @cached_property
    def mark(self) -> str:
        """Returns a mark that differs when the entry does."""
        return _mark(self.found)


class CompleteEntries:
    """Which entries of a directory are complete. Its caller gives the time, and calls `look` when it should."""

    def __init__(
        self, directory: Path, now: float, quiet_s: float = QUIET_S, *, known: Collection[str] = (), skipped: str = "."
    ) -> None:
        """`known` are the entries that are complete as they are; names that begin with `skipped` are left out. Raises
        OSError if the directory cannot be watched."""
        self._directory = os.fspath(directory)
        self._skipped = skipped
        self._quiet_s = quiet_s
        self._entries: dict[str, _Entry] = {}
        self._renamed = set(known)
        self.by_rename: dict[str, bool] = {}
        """By kind of entry: whether such entries got their names by renames alone."""
        self._next_look = self._soonest_look = now
        self.is_gone = False
        """Whether the directory was removed, moved or unmounted: nothing is complete from then on."""
        self.revision = 0
        """Grows whenever a complete entry appears, changes or goes."""
        self._queue = EventQueue()
        try:
            self._queue.add(os.fsencode(directory), sum(_MASK))
        except OSError:
            self._queue.close()
            raise

    @property
    def fd(self) -> int:
        """The descriptor that is ready when a name changed."""
        return self._queue.fd

    def close(self) -> None:
        """Ends the watch."""
        self._queue.close()

    def names(self) -> tuple[str, ...]:
        """Returns the entries that were complete at the last look: those of a generation."""
        return tuple(sorted(name for name, entry in self._entries.items() if entry.is_complete))

    def states(self) -> dict[str, tuple[str, bool]]:
        """Returns all entries as they were at the last look: what differs when one does, and whether it is complete."""
        return {name: (entry.mark, entry.is_complete) for name, entry in self._entries.items()}

    def wake_after(self, now: float) -> float | None:
        """Returns the seconds until `look` has something to do without an event; None for never."""
        return None if self.is_gone else max(0.0, self._next_look - now)

    def look(self, now: float) -> None:
        """Takes in what happened, and looks at the entries if it is time."""
        if self._events():
            self._next_look = min(self._next_look, max(now, self._soonest_look))
        if self.is_gone:
            self._change(bool(self.names()))
            self._entries.clear()
        elif now >= self._next_look:
            began_s = time.monotonic()
            self._look(self._renamed, now)
            self._renamed = set()
            self._soonest_look = now + (time.monotonic() - began_s) / _MOST_LOOKING
            self._next_look = max(now + LOOK_S, self._soonest_look)

    def look_at_end(self, now: float) -> None:
        """Takes in what happened until the program ended, and looks at the entries now. What it did not rename, and was
        not complete before, does not become complete by its end, which closes all files."""
        self._next_look, self._quiet_s = now, math.inf
        self.look(now)

    def _events(self) -> bool:
        """Notes the names to which entries were renamed; tells whether anything happened."""
        happened = False
        while data := self._queue.read():
            happened = True
            for _, mask, _, name in inotify.events(data):
                if mask & _ENDS and not name:
                    self.is_gone = True
                elif mask & inotify.MOVED_TO:
                    self._renamed.add(os.fsdecode(name))
                    self.by_rename.setdefault(kind_of(os.fsdecode(name)), True)
                elif mask & inotify.CREATE:
                    self._renamed.discard(os.fsdecode(name))
                    self.by_rename[kind_of(os.fsdecode(name))] = False
        return happened

    def _look(self, renamed: set[str], now: float) -> None:
        try:
            names = [name for name in os.listdir(self._directory) if not name.startswith(self._skipped)]
        except OSError:  # a directory that cannot be listed now is not gone
            return
        found = {name: print_ for name in names if (print_ := _printed(self._directory, name))}
        for name in self._entries.keys() - found.keys():
            self._change(self._entries.pop(name).is_complete)
        for name, print_ in found.items():
            entry = self._entries.get(name)
            if entry is None or entry.found != print_ or name in renamed:
                self._change(entry is not None and entry.is_complete)
                entry = self._entries[name] = _Entry(print_, now, name in renamed, leads_to(self._directory, name))
        for name in sorted(found, key=lambda one: self._entries[one].leads_to is not None):  # links come last
            entry = self._entries[name]
            if not entry.is_complete and self._may_be_complete(entry, now):
                entry.is_complete = not any(_is_written(f"{self._directory}/{one[0]}") for one in entry.found)
                entry.since = entry.since if entry.is_complete else now
                self._change(entry.is_complete)

    def _may_be_complete(self, entry: _Entry, now: float) -> bool:
        if entry.leads_to is not None:
            goal = self._entries.get(entry.leads_to)
            return goal is None or goal is entry or goal.is_complete
        return entry.was_renamed or now - entry.since >= self._quiet_s

    def _change(self, is_change: bool) -> None:
        self.revision += is_change


def mark_of(directory: Path, name: str) -> str:
    """Returns what differs when an entry does, as `CompleteEntries.states` has it; empty if it is gone."""
    found = _printed(os.fspath(directory), name)
    return _mark(found) if found else ""


def kind_of(name: str) -> str:
    """Returns the kind of an entry, its name without numbers: a program makes all of a kind in one way."""
    return re.sub(r"[0-9]+", "#", name)


def _mark(found: _Print) -> str:
    return hashlib.blake2b(repr(found).encode("utf-8", "surrogateescape"), digest_size=8).hexdigest()


def leads_to(directory: str, name: str) -> str | None:
    """Returns the entry of a directory to which a link leads; empty if it leads elsewhere, None if it is no link."""
    try:
        target = os.readlink(f"{directory}/{name}")
    except OSError:
        return None
    path = os.path.normpath(os.path.join(directory, target))
    for top in (directory, os.path.realpath(directory)):
        if path.startswith(f"{top}/"):
            return path[len(top) + 1 :].partition("/")[0]
    return ""


def _printed(directory: str, name: str) -> _Print:
    """Returns an entry as it is; nothing if it is gone. Sockets, pipes and devices are no entries."""
    with suppress(OSError):
        return tuple(_prints(directory, name))
    return ()


def _prints(directory: str, name: str) -> Iterator[tuple[str, int, int, int, int]]:
    status = os.lstat(f"{directory}/{name}")
    if stat.S_IFMT(status.st_mode) in (stat.S_IFREG, stat.S_IFLNK, stat.S_IFDIR):
        yield name, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
    if stat.S_ISDIR(status.st_mode):
        for below in sorted(os.listdir(f"{directory}/{name}")):
            yield from _prints(directory, f"{name}/{below}")


def _is_written(path: str) -> bool:
    """Tells whether somebody has a file open for writing, as far as the kernel says."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        return stat.S_ISREG(os.fstat(fd).st_mode) and is_written(fd)
    except OSError:
        return False
    finally:
        os.close(fd)
