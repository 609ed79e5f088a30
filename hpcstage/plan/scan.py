"""The scan: which files the datasets hold, with the facts of each, found in parallel.

Owns the walk. Symlinks to files and directories are followed (as training programs do), cycles are cut; whatever is
not a regular file is left out with a reason. The number of threads grows only where the file system is slow, since
short calls from many threads cost more than they hide. No global state: works in a thread or a forked child.
"""

from __future__ import annotations

import errno
import os
import stat
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from hpcstage.plan.columns import Columns
from hpcstage.plan.datasets import Resolved
from hpcstage.plan.globs import WHOLE, Pattern, Positions
from hpcstage.plan.manifest import Manifest
from hpcstage.plan.roots import Roots, join
from hpcstage.plan.types import Kind

BATCH = 128
SLOW_BATCH = 8
FAST_OPERATION_S = 100e-6
GROW_AFTER_S = 0.01
"""Time beyond that of fast operations adds up, fast ones pay it back; at so much the threads are doubled."""
SKIPPED_LIMIT = 100


@dataclass
class ScanResult:
    """What was found."""

    manifest: Manifest
    skipped: list[tuple[bytes, str]]
    """(absolute path, reason) of what was left out; the first hundred."""
    skipped_counts: dict[str, int]
    """By reason, all of them."""
    stats: int
    """Metadata operations at the source, listings apart."""
    listings: int
    seconds: float
    threads: int
    """How many threads the walk ended with."""


class ScanCancelled(Exception):
    """`cancel` was set."""


@dataclass
class _Tally:
    """What one worker gathered; merged at the end, so no locks while walking."""

    columns: Columns = field(default_factory=Columns)
    skipped: list[tuple[bytes, str]] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    stats: int = 0
    listings: int = 0

    def skip(self, path: bytes, why: str) -> None:
        self.counts[why] += 1
        if len(self.skipped) < SKIPPED_LIMIT:
            self.skipped.append((path, why))


@dataclass(frozen=True)
class _Directory:
    dataset: int
    path: bytes
    """Below the root; empty for the root."""
    ancestors: tuple[tuple[int, int], ...]
    """(device, inode) of the directories above."""
    pattern: Pattern
    positions: Positions


@dataclass(frozen=True)
class _Names:
    """Files to be looked at: names in a directory, or paths of a list."""

    dataset: int
    parent: bytes
    names: list[bytes]
    directory: _Directory | None
    """Where the names were listed."""

    def part(self, start: int, stop: int) -> _Names:
        """Some of the names."""
        return replace(self, names=self.names[start:stop])


_Task = _Directory | _Names


def scan(
    resolved: Resolved,
    *,
    threads: int = 64,
    exclude: Sequence[bytes] = (),
    cancel: threading.Event | None = None,
) -> ScanResult:
    """Walks all datasets. `exclude`: absolute directories to leave out (the run directory, the store)."""
    started = time.monotonic()
    walk = _Walk(resolved, frozenset(exclude), threads, cancel or threading.Event())
    tally = walk.run(_first_tasks(resolved))
    if walk.cancelled:
        raise ScanCancelled
    manifest = Manifest.build(resolved.datasets, tally.columns)
    seconds = time.monotonic() - started
    return ScanResult(
        manifest, tally.skipped, dict(tally.counts), tally.stats, tally.listings, seconds, walk.workers_started
    )


def _first_tasks(resolved: Resolved) -> Iterator[_Task]:
    for index, dataset in enumerate(resolved.datasets):
        if dataset.kind is Kind.DIRECTORY:
            yield _Directory(index, b"", (), WHOLE, WHOLE.start)
            continue
        selection = resolved.selections[index]
        for path in selection.directories:
            yield _Directory(index, path, (), WHOLE, WHOLE.start)
        for path, text in selection.globs:
            pattern = Pattern(text)
            yield _Directory(index, path, (), pattern, pattern.start)
        if selection.files:
            yield _Names(index, b"", list(selection.files), None)
    yield from _tasks_of_lists(resolved)


def _tasks_of_lists(resolved: Resolved) -> Iterator[_Task]:
    roots = Roots(resolved.datasets)
    wanted = [dataset.kind is Kind.FILES for dataset in resolved.datasets]
    if not any(wanted):
        return
    for item in resolved.lists:
        batches: dict[int, list[bytes]] = {}
        for path in item.paths:
            place = roots.locate(path)
            if place is None or not wanted[place[0]]:
                continue
            batch = batches.setdefault(place[0], [])
            batch.append(place[1])
            if len(batch) == BATCH:
                yield _Names(place[0], b"", batches.pop(place[0]), None)
        for index, batch in batches.items():
            yield _Names(index, b"", batch, None)


class _Walk:
    """A stack of tasks and the threads that work on it."""

    def __init__(self, resolved: Resolved, exclude: frozenset[bytes], threads: int, cancel: threading.Event) -> None:
        self._roots = [dataset.root for dataset in resolved.datasets]
        self._exclude = exclude
        self._limit = max(1, threads)
        self._cancel = cancel
        self._tasks: deque[_Task] = deque()
        self._feed: Iterator[_Task] = iter(())
        self._busy = 0
        self._lost_s = 0.0
        self._changed = threading.Condition()
        self._tallies: list[_Tally] = []
        self._threads: list[threading.Thread] = []
        self._failure: BaseException | None = None

    @property
    def cancelled(self) -> bool:
        return self._cancel.is_set()

    @property
    def workers_started(self) -> int:
        return len(self._threads)

    def run(self, tasks: Iterator[_Task]) -> _Tally:
        """Works until nothing is left; the threads are daemons, so a hung source cannot keep the process."""
        self._feed = tasks
        with self._changed:
            self._start_worker()
        for thread in self._threads:  # grows while it is iterated
            while thread.is_alive() and not self.cancelled:
                thread.join(timeout=0.2)
        if self._failure is not None:
            raise self._failure
        return self._merged()

    def _merged(self) -> _Tally:
        total = _Tally()
        for tally in self._tallies:
            total.columns.extend(tally.columns)
            total.skipped.extend(tally.skipped[: SKIPPED_LIMIT - len(total.skipped)])
            total.counts.update(tally.counts)
            total.stats += tally.stats
            total.listings += tally.listings
            tally.columns = Columns()
        return total

    def _start_worker(self) -> None:
        tally = _Tally()
        thread = threading.Thread(target=self._work, args=(tally,), name="scan", daemon=True)
        self._tallies.append(tally)
        self._threads.append(thread)
        thread.start()

    def _work(self, tally: _Tally) -> None:
        try:
            while (task := self._take()) is not None:
                self._do(task, tally)
                self._finished()
        except BaseException as error:  # noqa: BLE001  handed to the caller of scan
            with self._changed:
                self._failure = error
                self._changed.notify_all()

    def _take(self) -> _Task | None:
        with self._changed:
            while not self.cancelled and self._failure is None:
                task = self._tasks.pop() if self._tasks else next(self._feed, None)
                if task is not None:
                    self._busy += 1
                    return task
                if self._busy == 0:
                    break
                self._changed.wait(timeout=1.0)
            self._changed.notify_all()
            return None

    def _finished(self) -> None:
        with self._changed:
            self._busy -= 1
            if self._busy == 0:
                self._changed.notify_all()

    def _is_slow(self, operations: int, seconds: float) -> bool:
        """Told what some operations took: doubles the threads where that was long, and not just a preempted moment."""
        with self._changed:
            self._lost_s = max(0.0, self._lost_s + seconds - operations * FAST_OPERATION_S)
            if self._lost_s < GROW_AFTER_S or self._limit == 1:
                return False
            self._lost_s = 0.0
            for _ in range(min(len(self._threads), self._limit - len(self._threads))):
                self._start_worker()
            return True

    def _push(self, task: _Task) -> None:
        with self._changed:
            if isinstance(task, _Directory):
                self._tasks.appendleft(task)
            else:
                self._tasks.append(task)
            self._changed.notify()

    def _do(self, task: _Task, tally: _Tally) -> None:
        root = self._roots[task.dataset]
        started = time.monotonic()
        if isinstance(task, _Directory):
            entries = _list(task, root, tally, self._push, self._exclude)
            self._is_slow(2 + entries, time.monotonic() - started)
            return
        done = 0
        while done < len(task.names):
            typical_s = _look(task, done, done + SLOW_BATCH, root, tally, self._push)
            done += SLOW_BATCH
            if self._is_slow(SLOW_BATCH, SLOW_BATCH * typical_s):
                break
        # Others take part in what is slow.
        for start in range(done, len(task.names), SLOW_BATCH):
            self._push(task.part(start, start + SLOW_BATCH))


def _list(
    task: _Directory, root: bytes, tally: _Tally, push: Callable[[_Task], None], exclude: frozenset[bytes]
) -> int:
    """Lists a directory; returns how many entries it has."""
    path = join(root, task.path)
    if path in exclude:
        return 0
    tally.listings += 1
    tally.stats += 1
    try:
        itself = os.stat(path)
        key = (itself.st_dev, itself.st_ino)
        if key in task.ancestors:
            tally.skip(path, "a symbolic link to a directory above it")
            return 0
        here = _Directory(task.dataset, task.path, (*task.ancestors, key), task.pattern, task.positions)
        with os.scandir(path) as entries:
            return _sort_entries(entries, here, push)
    except OSError as error:
        tally.skip(path, f"directory: {error.strerror}")
        return 0


def _sort_entries(entries: Iterator[os.DirEntry[bytes]], here: _Directory, push: Callable[[_Task], None]) -> int:
    # Types are not asked for here: where the file system does not list them, asking is one operation each, in a row.
    names: list[bytes] = []
    count = 0
    for count, entry in enumerate(entries, 1):  # noqa: B007  the last one is the number of entries
        name = entry.name
        if here.pattern.takes_file(here.positions, name) or here.pattern.into(here.positions, name):
            names.append(name)
            if len(names) == BATCH:
                push(_Names(here.dataset, here.path, names, here))
                names = []
    if names:
        push(_Names(here.dataset, here.path, names, here))
    return count


def _descend(here: _Directory, name: bytes, push: Callable[[_Task], None]) -> None:
    positions = here.pattern.into(here.positions, name)
    if positions:
        below = here.path + b"/" + name if here.path else name
        push(_Directory(here.dataset, below, here.ancestors, here.pattern, positions))


def _look(task: _Names, start: int, stop: int, root: bytes, tally: _Tally, push: Callable[[_Task], None]) -> float:
    """Looks at some of the names; returns the median time of a look, which a preempted moment does not change."""
    prefix = join(root, task.parent)
    prefix = prefix if prefix.endswith(b"/") else prefix + b"/"
    below = task.parent + b"/" if task.parent else b""
    times = [time.monotonic()]
    for name in task.names[start:stop]:
        is_link = False
        try:
            tally.stats += 1
            found = os.lstat(prefix + name)
            if is_link := stat.S_ISLNK(found.st_mode):
                tally.stats += 1
                found = os.stat(prefix + name)
        except OSError as error:
            if task.directory is None or _takes(task.directory, name):
                tally.skip(prefix + name, _why(error, is_link=is_link))
            continue
        finally:
            times.append(time.monotonic())
        if stat.S_ISDIR(found.st_mode):
            _follow(task, name, push)
        elif task.directory is not None and not _takes(task.directory, name):
            continue
        elif stat.S_ISREG(found.st_mode):
            tally.columns.add(task.dataset, below + name, found, is_link=is_link)
        else:
            tally.skip(prefix + name, "not a regular file")
    return sorted(after - before for before, after in pairwise(times))[(len(times) - 1) // 2]


def _why(error: OSError, *, is_link: bool) -> str:
    if is_link and error.errno == errno.ENOENT:
        return "a dangling symbolic link"
    return error.strerror or "unreadable"


def _takes(directory: _Directory, name: bytes) -> bool:
    return directory.pattern.takes_file(directory.positions, name)


def _follow(task: _Names, name: bytes, push: Callable[[_Task], None]) -> None:
    if task.directory is not None:
        _descend(task.directory, name, push)
    else:
        push(_Directory(task.dataset, name, (), WHOLE, WHOLE.start))
