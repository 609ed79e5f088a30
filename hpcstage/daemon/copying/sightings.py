"""Finds the files of the datasets that programs without the shim read at the source, by a look now and then.

There are two kinds of evidence. First, a living process that is not attached has a file mapped, or has it open and has
read a good deal since the last look. Second, the kernel reported opens of files (inotify) that no copier was given,
while processes of the command that are not attached read at least half as much as these files hold: this shows
processes that live for a moment only. The kernel does not say which process opened a file, so both are needed.

Owns the watches for opens, and what each process had read at the last look. A look reads the events, which otherwise
cost nothing; where the kernel lost some, that look gives no evidence of the second kind.
"""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from itertools import islice

from hpcstage.daemon.copying import changes
from hpcstage.daemon.copying.openfiles import are_mapped_below, in_turn, open_below
from hpcstage.forked import Helpers
from hpcstage.inotify import IS_DIR, ONLYDIR, OPEN, OVERFLOW, EventQueue, events
from hpcstage.plan.dataset.manifest import Manifest
from hpcstage.procio import read_bytes

HELPER = "sightings"
MOST_WATCHES = 4096
"""The most directories that are watched; if there are more, the first ones show enough."""
LEAST_BYTES = 256 << 10
"""Reading less than this is no evidence: a program may read as much to start."""
LEAST_SHARE = 0.5
MOST_TIME_SHARE = 0.01
"""Looks take at most this share of a processor, but for the one that follows a first sight. Their time on a processor
counts: where programs keep the daemon from one, looks that cost nothing would become rare."""
CONFIRM_S = 0.5
"""The time from a first sight to the next look, which shows whether copying is to pause."""


class Sightings:
    """Owns the watches and what the last look has shown."""

    def __init__(self, helpers: Helpers, manifest: Manifest, own_bytes: Callable[[], int]) -> None:
        """`own_bytes` returns the bytes that attached processes have read, by the kernel's counters."""
        self._manifest = manifest
        self._own_bytes = own_bytes
        self._directories: dict[int, bytes] = {}
        self._given: Counter[int] = Counter()
        """Ids that copiers were given and whose opens the kernel has not reported yet."""
        self._read: dict[int, int] = {}
        """By pid: the bytes that a process and its reaped children had read at the last look."""
        self._unattached: int | None = 0
        self._found = False
        """Whether the last look has shown files."""
        self._last = 0
        self._next = 0.0
        self._events: EventQueue | None = None
        with suppress(OSError):
            self._events = watched = EventQueue()
            helpers.start(
                HELPER,
                lambda: json.dumps(_watch(watched, manifest)).encode(),
                self._set,
                open_fds=(watched.fd,),
                gives_way=True,
            )

    def _set(self, data: bytes | None) -> None:
        if data is not None:
            self._directories = {number: os.fsencode(path) for number, path in json.loads(data)}

    def close(self) -> None:
        """Ends the watching."""
        if self._events is not None:
            self._events.close()
            self._events = None

    def given(self, id_: int) -> None:
        """Notes that a copier is going to open a file."""
        self._given[id_] += 1

    def pass_over(self, flying: Iterable[int]) -> None:
        """Forgets what happened until now."""
        self._taken()
        self._given = Counter(flying)
        self._read.clear()
        self._unattached = None
        self._found = False

    def look(
        self, programs: Callable[[], Collection[int]], attached: Collection[int], flying: Iterable[int], now: float
    ) -> set[int] | None:
        """Returns the files that were seen; None if it was too early for a look. `attached`: pids of processes with
        the shim."""
        if now < self._next:
            return None
        begin = time.thread_time()
        found = self._look(programs(), attached)
        self._given = Counter({id_: self._given[id_] for id_ in flying})
        is_first, self._found = bool(found) and not self._found, bool(found)
        self._next = now + (CONFIRM_S if is_first else (time.thread_time() - begin) / MOST_TIME_SHARE)
        return found

    def _look(self, programs: Collection[int], attached: Collection[int]) -> set[int]:
        before = self._read
        self._read = {pid: read for pid in programs if (read := read_bytes(f"/proc/{pid}/io")) is not None}
        others = self._read.keys() - set(attached)
        self._last, looked = in_turn(others, self._last)
        found = self._open_in([pid for pid in looked if self._read[pid] - before.get(pid, 0) >= LEAST_BYTES])
        found |= self._open_in([pid for pid in looked if are_mapped_below((pid,), self._roots())])
        unattached = sum(self._read.values()) - self._own_bytes()
        read = 0 if self._unattached is None else unattached - self._unattached
        self._unattached = unattached
        return found | self._opened(self._taken(), read)

    def _roots(self) -> list[bytes]:
        return [dataset.root for dataset in self._manifest.datasets]

    def _open_in(self, pids: Collection[int]) -> set[int]:
        found = map(self._manifest.find_source, open_below(pids, self._roots()))
        return {id_ for id_ in found if id_ is not None}

    def _taken(self) -> list[bytes]:
        """Returns all events since the last look, in pieces."""
        pieces: list[bytes] = []
        if self._events is not None:
            while piece := self._events.read():
                pieces.append(piece)
        return pieces

    def _opened(self, pieces: list[bytes], read: int) -> set[int]:
        opens: Counter[tuple[int, bytes]] = Counter()
        for piece in pieces:
            for number, mask, _, name in events(piece):
                if mask & OVERFLOW:
                    return set()
                if name and not mask & IS_DIR:
                    opens[number, name] += 1
        found = set()
        for (number, name), count in opens.items():
            directory = self._directories.get(number)
            id_ = None if directory is None else self._manifest.find_source(directory + b"/" + name)
            if id_ is not None:
                if count > self._given[id_]:
                    found.add(id_)
                self._given[id_] = max(0, self._given[id_] - count)
        sizes = sum(self._manifest.sizes[id_] for id_ in found)
        return found if read >= max(LEAST_BYTES, LEAST_SHARE * sizes) else set()


def _watch(watched: EventQueue, manifest: Manifest) -> list[tuple[int, str]]:
    """Watches the directories, in the helper; returns them with the numbers of their watches."""
    found = []
    for path in islice(changes.to_watch(manifest), min(MOST_WATCHES, changes.limit() // 2)):
        with suppress(OSError):
            found.append((watched.add(path, OPEN | ONLYDIR), os.fsdecode(path)))
    return found
