"""Scans the datasets: finds the files that they hold and the stat fields of each, in parallel.

This module owns the walk; `listing` does its single tasks. The number of threads grows only where the file system is
slow, since short calls from many threads cost more than they hide. There is no global state, so a scan works in a
thread or a forked child.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from hpcstage.plan.dataset.columns import Columns
from hpcstage.plan.dataset.datasets import Datasets
from hpcstage.plan.dataset.listing import (
    BATCH,
    SKIPPED_LIMIT,
    WHOLE,
    Directory,
    FileNames,
    Pattern,
    ScanFindings,
    ScanTask,
    WalkBounds,
    above,
    list_directory,
    look,
)
from hpcstage.plan.dataset.manifest import Manifest
from hpcstage.plan.dataset.roots import Roots, join
from hpcstage.plan.types import DatasetKind

SLOW_BATCH = 8
FAST_OPERATION_S = 100e-6
MOST_THREADS = 64
GROW_AFTER_S = 0.01
"""The threads are doubled when this much time beyond that of fast operations has added up; fast ones reduce it."""


@dataclass
class ScanResult:
    """The manifest that a scan made, what it left out, and what it cost."""

    manifest: Manifest
    skipped: list[tuple[bytes, str]]
    """Pairs (absolute path, reason) of the first hundred names that were left out."""
    skipped_counts: dict[str, int]
    """Number of all names that were left out, by reason."""
    stats: int
    """Number of metadata operations at the source, without listings."""
    listings: int
    seconds: float
    threads: int
    """Number of threads at the end of the walk."""
    unanswered: str
    """The first name of which the file system did not tell, and why; empty: it told all."""


def scan(
    datasets: Datasets,
    *,
    exclude: Sequence[bytes] = (),
    on_found: Callable[[int, int], None] = lambda _files, _bytes: None,
) -> ScanResult:
    """Walks all datasets, except for the absolute directories of `exclude` (the run directory, the store). Calls
    `on_found` with the files and bytes that are found so far, a few times a second."""
    started = time.monotonic()
    walk = _Walk(datasets, frozenset(exclude))
    findings = walk.run(_first_tasks(datasets), on_found)
    manifest = Manifest.build(datasets.all, findings.columns)
    seconds = time.monotonic() - started
    return ScanResult(
        manifest,
        findings.skipped,
        dict(findings.counts),
        findings.stats,
        findings.listings,
        seconds,
        walk.workers_started,
        findings.unanswered,
    )


def _first_tasks(datasets: Datasets) -> Iterator[ScanTask]:
    for index, dataset in enumerate(datasets.all):
        if dataset.kind is DatasetKind.DIRECTORY:
            yield Directory(index, b"", above(dataset.root), WHOLE, WHOLE.start)
            continue
        named = datasets.named[index]
        for path in named.directories:
            yield Directory(index, path, above(join(dataset.root, path)), WHOLE, WHOLE.start)
        for path, text in named.globs:
            pattern = Pattern(text)
            yield Directory(index, path, above(join(dataset.root, path)), pattern, pattern.start)
        if named.files:
            yield FileNames(index, b"", list(named.files), None)
    yield from _tasks_of_lists(datasets)


def _tasks_of_lists(datasets: Datasets) -> Iterator[ScanTask]:
    roots = Roots(datasets.all)
    wanted = [dataset.kind is DatasetKind.FILES for dataset in datasets.all]
    if not any(wanted):
        return
    for item in datasets.lists:
        batches: dict[int, list[bytes]] = {}
        for path in item.paths:
            place = roots.locate(path)
            if place is None or not wanted[place[0]]:
                continue
            batch = batches.setdefault(place[0], [])
            batch.append(place[1])
            if len(batch) == BATCH:
                yield FileNames(place[0], b"", batches.pop(place[0]), None)
        for index, batch in batches.items():
            yield FileNames(index, b"", batch, None)


class _Walk:
    """A stack of tasks and the threads that work on it."""

    def __init__(self, datasets: Datasets, exclude: frozenset[bytes]) -> None:
        self._roots = [dataset.root for dataset in datasets.all]
        self._bounds = WalkBounds(exclude)
        self._tasks: deque[ScanTask] = deque()
        self._feed: Iterator[ScanTask] = iter(())
        self._busy = 0
        self._lost_s = 0.0
        self._most_threads = MOST_THREADS
        """Fewer, once the system has refused to start one."""
        self._changed = threading.Condition()
        self._findings: list[ScanFindings] = []
        self._threads: list[threading.Thread] = []
        self._failure: BaseException | None = None

    @property
    def workers_started(self) -> int:
        return len(self._threads)

    def run(self, tasks: Iterator[ScanTask], on_found: Callable[[int, int], None]) -> ScanFindings:
        """Works until no task is left; the threads are daemon threads, so a hung source cannot keep the process."""
        self._feed = tasks
        with self._changed:
            self._start_worker()
        for thread in self._threads:  # grows while it is iterated
            while thread.is_alive():
                thread.join(timeout=0.2)
                on_found(sum(len(one.columns) for one in self._findings), sum(one.size_bytes for one in self._findings))
        if self._failure is not None:
            raise self._failure
        return self._merged()

    def _merged(self) -> ScanFindings:
        total = ScanFindings()
        for findings in self._findings:
            total.columns.extend(findings.columns)
            total.skipped.extend(findings.skipped[: SKIPPED_LIMIT - len(total.skipped)])
            total.counts.update(findings.counts)
            total.stats += findings.stats
            total.listings += findings.listings
            total.unanswered = total.unanswered or findings.unanswered
            findings.columns = Columns()
        return total

    def _start_worker(self) -> None:
        findings = ScanFindings()
        thread = threading.Thread(target=self._work, args=(findings,), name="scan", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # a limit on processes or memory: those that work do all
            self._most_threads = len(self._threads)
            if not self._threads:
                raise
            return
        self._findings.append(findings)
        self._threads.append(thread)

    def _work(self, findings: ScanFindings) -> None:
        try:
            while (task := self._take()) is not None:
                self._do(task, findings)
                self._finished()
        except BaseException as error:  # noqa: BLE001  handed to the caller of scan
            with self._changed:
                self._failure = error
                self._changed.notify_all()

    def _take(self) -> ScanTask | None:
        with self._changed:
            while self._failure is None:
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
        """Takes the seconds of some operations; doubles the threads and returns True if slow time has added up.

        A single preempted moment is too short to add up to that.
        """
        with self._changed:
            self._lost_s = max(0.0, self._lost_s + seconds - operations * FAST_OPERATION_S)
            if self._lost_s < GROW_AFTER_S:
                return False
            self._lost_s = 0.0
            wanted = 2 * len(self._threads)
            while len(self._threads) < min(wanted, self._most_threads):
                self._start_worker()
            return True

    def _push(self, task: ScanTask) -> None:
        with self._changed:
            if isinstance(task, Directory):
                self._tasks.appendleft(task)
            else:
                self._tasks.append(task)
            self._changed.notify()

    def _do(self, task: ScanTask, findings: ScanFindings) -> None:
        root = self._roots[task.dataset]
        started = time.monotonic()
        if isinstance(task, Directory):
            entries = list_directory(task, root, findings, self._push, self._bounds)
            self._is_slow(2 + entries, time.monotonic() - started)
            return
        done = 0
        while done < len(task.names):
            typical_s = look(task, done, done + SLOW_BATCH, root, findings, self._push)
            done += SLOW_BATCH
            if self._is_slow(SLOW_BATCH, SLOW_BATCH * typical_s):
                break
        # The file system is slow: other threads take parts of the rest.
        for start in range(done, len(task.names), SLOW_BATCH):
            self._push(task.part(start, start + SLOW_BATCH))
