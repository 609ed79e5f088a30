"""Drives the queue with the pool: hands ids to copiers, takes their results, and counts what the record needs.

Owns what a result means (published, try again, failed, disk full) and the time with transfers in flight. It answers no
want: it calls `on_final` when an id has reached its final state.
"""

from __future__ import annotations

import errno
import os
import stat
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from hpcstage.daemon.copying.alone import Alone
from hpcstage.daemon.queue.queue import Queue
from hpcstage.daemon.queue.states import FileState
from hpcstage.plan.dataset.manifest import Manifest
from hpcstage.protocol.shim import Progress, Reason
from hpcstage.store.attributes import Attributes
from hpcstage.store.copyfile import Status
from hpcstage.store.directory import Store
from hpcstage.store.holdings import Holdings
from hpcstage.store.messages import Result
from hpcstage.store.pool import CopierPool

if TYPE_CHECKING:
    from hpcstage.record.parts.part import ErrorPart

MOST_TRIES = 3
SMALL_BYTES = 256 << 10
"""Below this mean size copiers may get as many transfers ahead as they have threads."""
NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT})
BROKEN_DISK = frozenset(
    {errno.EROFS, errno.ENOENT, errno.EIO, errno.ENODEV, errno.ESTALE, errno.EACCES, errno.EPERM, errno.EXDEV}
)
MOST_ERRORS = 20


@dataclass
class Errors:
    """Failures by their text: the first path of each and a count."""

    started: float
    kinds: dict[str, ErrorPart] = field(default_factory=dict)

    def add(self, path: bytes, text: str, now: float) -> None:
        """Counts a failure."""
        from hpcstage.record.parts.part import ErrorPart

        known = self.kinds.get(text)
        if known is not None:
            self.kinds[text] = replace(known, count=known.count + 1)
        elif len(self.kinds) < MOST_ERRORS:
            name = os.fsencode(path).decode(errors="replace")
            self.kinds[text] = ErrorPart(path=name, error=text, at_s=round(now - self.started, 3))


@dataclass
class Busy:
    """Integrals over time: of the transfers in flight, and of the time in which something held them back."""

    at: float
    transfer_s: float = 0.0
    busy_s: float = 0.0
    limited_s: float = 0.0

    def advance(self, now: float, flying: int, most: int, *, capped: bool) -> None:
        """Adds the time since the last call, for which these values held; at most `most` transfers may be at the source
        at a time."""
        passed_s = max(0.0, now - self.at)
        self.at = now
        self.transfer_s += passed_s * min(flying, most)
        if flying:
            self.busy_s += passed_s
        if capped or flying < most:
            self.limited_s += passed_s


@dataclass
class DatasetFacts:
    """Counts of one dataset."""

    files: int = 0
    size_bytes: int = 0
    staged_files: int = 0
    staged_bytes: int = 0


class Tombstones:
    """Bars the names of files that are written to while they are in flight, so that their copies are not published."""

    def __init__(self, manifest: Manifest, store: Store, on_hold: Callable[[int], None]) -> None:
        """`on_hold` is called with the number of transfers that may be published all the same."""
        self._manifest = manifest
        self._store = store
        self._on_hold = on_hold
        self._barred: set[int] = set()
        self._unbarred: set[int] = set()
        """Ids in flight that were written to and have no tombstone: they may be published until their result comes."""

    def bar(self, id_: int) -> None:
        """Puts a tombstone in the place of a copy that is on its way."""
        if not self._store.bar(id_, self._manifest.store_path(id_)):
            self._unbarred.add(id_)
            self._on_hold(len(self._unbarred))
        self._barred.add(id_)

    def lift(self, id_: int) -> None:
        """Removes the tombstone of a transfer that has ended, if it has one."""
        if id_ in self._barred:
            self._barred.discard(id_)
            self._store.unbar(id_, self._manifest.store_path(id_))

    def settle(self, id_: int) -> None:
        """Notes that the result of a transfer was handled: no copy of it is visible that must not be."""
        if id_ in self._unbarred:
            self._unbarred.discard(id_)
            self._on_hold(len(self._unbarred))


class Engine:
    """Moves files between queue, pool and store, and owns the counts and errors of the record."""

    def __init__(
        self,
        manifest: Manifest,
        queue: Queue,
        pool: CopierPool,
        store: Store,
        *,
        on_final: Callable[[int], None] = lambda _: None,
        on_result: Callable[[Result], None] = lambda _: None,
        is_wanted: Callable[[int], bool] = lambda _: False,
        on_hold: Callable[[int], None] = lambda _: None,
        on_given: Callable[[int], None] = lambda _: None,
        run_started: float | None = None,
    ) -> None:
        self.manifest = manifest
        self.queue = queue
        self.pool = pool
        self.store = store
        self.holdings = Holdings(store.node_dir, len(manifest))
        self._attributes = Attributes(store.node_dir, manifest)
        self._keeps_access_times = not os.statvfs(store.node_dir).f_flag & os.ST_NOATIME
        self.stored_bytes = 0
        self.stored_files = 0
        self.last_stored = 0.0
        now = time.monotonic()
        started = now if run_started is None else run_started
        self.errors = Errors(started)
        self.busy = Busy(now, limited_s=now - started)
        self.by_dataset = [_facts(manifest, index) for index in range(len(manifest.datasets))]
        self.alone = Alone()
        self._on_final = on_final
        self._on_result = on_result
        self._is_wanted = is_wanted
        self._tombstones = Tombstones(manifest, store, on_hold)
        self._on_given = on_given
        self.is_paused = False
        """Whether no copy is begun for now."""
        self._taken_back: set[int] = set()
        """The ids of transfers that were cancelled, though not because the program reads the files."""
        self._tries: dict[int, int] = {}
        self._mean_bytes = manifest.total_bytes / max(len(manifest), 1)

    @property
    def unplaced(self) -> int:
        """The number of files that no node keeps where each keeps only a share; 0 where this node keeps all."""
        return self.queue.states.unplaced if self.queue.budget.transit.limit.size_bytes else 0

    @property
    def progress(self) -> Progress:
        """How much this node has of what it is to keep; files that it does not keep are taken to have the mean size."""
        files, size_bytes = len(self.manifest), self.manifest.total_bytes
        states = self.queue.states
        refused = (FileState.REFUSED,) if states.closed in (Reason.NONE, Reason.FULL) else ()
        kept = files - sum(map(states.count, (FileState.FAILED, FileState.VOID, FileState.AWAY, *refused)))
        kept_bytes = size_bytes * kept // max(files, 1)
        return Progress(min(self.stored_files, kept), min(self.stored_bytes, kept_bytes), kept, kept_bytes)

    # ---- handing out

    def pump(self, now: float) -> None:
        """Fills the copiers."""
        assigned = self.pool.assigned
        free = self.alone.room(self.pool.transfers + self._ahead() - assigned, assigned, now)
        if free > 0 and not self.queue.states.closed and not self.is_paused:
            for id_ in self.queue.source.next(free, now):
                self._on_given(id_)
                self.pool.assign(id_, urgent=self._is_wanted(id_))
            self.pool.flush()
        self.sweep()
        self.advance(now)

    def _ahead(self) -> int:
        """Returns how many transfers copiers get beyond those at the source, so that they do not wait for more."""
        pool = self.pool
        beyond = pool.slots if self._mean_bytes < SMALL_BYTES else len(pool.members)
        most = pool.slots + beyond - pool.transfers
        return self.queue.source.estimates.ahead(self._mean_bytes, len(pool.members), most)

    def advance(self, now: float) -> None:
        """Brings the integrals up to now."""
        capped = self.queue.source.wake_after(now) is not None
        self.busy.advance(now, self.pool.assigned, self.pool.transfers, capped=capped)

    # ---- results

    def receive(self, fd: int, now: float) -> None:
        """Takes the results of a copier."""
        self.advance(now)
        for result in self.pool.receive(fd):
            self.alone.took(result, now)
            self._take(result, now)
        if not self.pool.slots:
            self.queue.states.close(Reason.FAILED)

    def _take(self, result: Result, now: float) -> None:
        self._tombstones.lift(result.id)
        self._conclude(result, now)
        self._taken_back.discard(result.id)
        self._tombstones.settle(result.id)

    def _conclude(self, result: Result, now: float) -> None:
        if result.status is Status.CANCELLED and self._put_off(result.id, now):
            return
        if result.status is Status.OK or (result.status is Status.EXISTS and self._is_complete(result.id)):
            self._stored(result, now)
        elif self.queue.states.of(result.id) is FileState.VOID:
            self.queue.failed(result.id)
        elif result.status in {Status.CHANGED, Status.LOST} and self._again(result.id):
            self.queue.source.requeue(result.id)
            return
        else:
            self._failed(result, now)
        self._on_result(result)
        self._on_final(result.id)

    def _put_off(self, id_: int, now: float) -> bool:
        """Returns whether a cancelled transfer will be begun again. A want for a small file goes on waiting."""
        queue, large = self.queue, self.queue.large
        if id_ in self._taken_back and queue.states.of(id_) is FileState.FLYING and not large.reads.has(id_, now):
            queue.source.take_back(id_)
            if large.is_large(id_):
                self._on_final(id_)
            return True
        if queue.source.put_off(id_):
            self._on_final(id_)
            return True
        return False

    def _stored(self, result: Result, now: float) -> bool:
        if self.queue.done(result.id, result.size_bytes, now):
            self.last_stored = now
            self._count(result.id, 1, result.size_bytes)
            return True
        self.store.drop(result.id, self.manifest.store_path(result.id))
        return False

    def _count(self, id_: int, files: int, size_bytes: int) -> None:
        self.stored_files += files
        self.stored_bytes += size_bytes
        facts = self.by_dataset[self.manifest.dataset_of(id_)]
        facts.staged_files += files
        facts.staged_bytes += size_bytes
        if files > 0:
            self._attributes.note(id_, self.store.path(self.manifest.store_path(id_)))
        if files > 0 and self.queue.states.keeps(id_):
            self.holdings.keep(id_)
        else:
            self.holdings.drop((id_,))

    def _is_complete(self, id_: int) -> bool:
        """Returns whether the copy is in the store although its transfer says EXISTS: a copier published it and died
        before it reported that."""
        try:
            return stat.S_ISREG(os.lstat(self.store.path(self.manifest.store_path(id_))).st_mode)
        except OSError:
            return False

    def _again(self, id_: int) -> bool:
        tries = self._tries[id_] = self._tries.get(id_, 1) + 1
        return tries <= MOST_TRIES and self.pool.slots > 0 and not self.queue.states.closed

    def _failed(self, result: Result, now: float) -> None:
        local = result.status is Status.LOCAL_ERROR
        self.queue.failed(result.id, no_room=local and result.errno in NO_ROOM)
        if local and result.errno in BROKEN_DISK:
            self.queue.states.close(Reason.FAILED)
        self.errors.add(self.manifest.source_path(result.id), describe(result), now)

    # ---- transfers that are given up

    def yield_to_program(self, now: float) -> None:
        """Gives up transfers of files that the program reads at the source, except those that a want waits for."""
        for id_ in self.queue.large.read_meanwhile(now):
            if not self._is_wanted(id_):
                self.pool.cancel(id_)
        self._take_back(self.queue.large.slowing(now))

    def pause(self) -> None:
        """Begins no more transfers for now and gives up those under way, except those that a program waits for."""
        self.is_paused = True
        self._take_back(self.queue.flights.needed())

    def _take_back(self, ids: Iterable[int]) -> None:
        for id_ in ids:
            if not self._is_wanted(id_):
                self._taken_back.add(id_)
                self.pool.cancel(id_)

    # ---- copies from other nodes

    def received(self, result: Result, now: float) -> bool:
        """Takes in a copy that came from another node. Returns False if it is not needed."""
        self._tombstones.lift(result.id)
        taken = self._stored(result, now) if result.id in self.queue.flights.requests else self._late(result)
        self._tombstones.settle(result.id)
        self._on_final(result.id)
        return taken

    def _late(self, result: Result) -> bool:
        """Takes in a copy whose request was given up. A transfer that is in flight finds it. Returns False if it is not
        needed."""
        if self.queue.states.of(result.id) in (FileState.STORED, FileState.FLYING):
            return False
        if self.queue.peers.came_late(result.id, result.size_bytes):
            self._count(result.id, 1, result.size_bytes)
            return True
        self.store.drop(result.id, self.manifest.store_path(result.id))
        return False

    def not_received(self, id_: int) -> None:
        """Notes that a copy will not come from another node."""
        self._tombstones.lift(id_)
        self._tombstones.settle(id_)

    def postponed(self, id_: int, now: float) -> None:
        """Puts off a large file that no other node sends as long as a program reads it at the source."""
        self.not_received(id_)
        self.queue.peers.postponed(id_, now)
        self._on_final(id_)

    def was_read(self, id_: int) -> bool:
        """Returns whether a copy was read, or is gone. It counts as read once its time of last access is later than its
        time of modification, and from the beginning where the local disk keeps no times of access."""
        if not self._keeps_access_times:
            return True
        try:
            status = os.lstat(self.store.path(self.manifest.store_path(id_)))
        except OSError:
            return True
        return status.st_atime_ns > status.st_mtime_ns

    def sweep(self) -> None:
        """Deletes the transit copies that had to make way for others."""
        dropped = self.queue.budget.transit.dropped
        for id_ in dropped:
            self.store.drop(id_, self.manifest.store_path(id_))
            self._count(id_, -1, -self.queue.states.size(id_))
        dropped.clear()

    # ---- writes below a dataset

    def void(self, ids: Iterable[int]) -> None:
        """Voids files that are written to: when this returns, no copy of them is visible or ever will be."""
        ids = [id_ for id_ in ids if self.queue.states.of(id_) is not FileState.VOID]
        stored = [id_ for id_ in ids if self.queue.states.of(id_) is FileState.STORED]
        self._void_flying(self.queue.void(ids))
        for id_ in stored:
            self.store.drop(id_, self.manifest.store_path(id_))
        self.holdings.drop(ids)

    def void_range(self, ids: range) -> bytes:
        """Voids many files whose copies have been put out of sight. Returns the state that each of them had."""
        places, flying = self.queue.void_range(ids)
        self._void_flying(flying)
        self.holdings.drop(ids)
        return places

    def _void_flying(self, flying: Iterable[int]) -> None:
        for id_ in flying:
            self._tombstones.bar(id_)
            self.pool.cancel(id_)


def _facts(manifest: Manifest, dataset: int) -> DatasetFacts:
    ids = manifest.ids_of(dataset)
    return DatasetFacts(len(ids), sum(manifest.sizes[ids.start : ids.stop]))


def describe(result: Result) -> str:
    """Returns what went wrong, for people."""
    if result.status is Status.SOURCE_ERROR:
        return f"cannot read the source: {os.strerror(result.errno)}"
    if result.status is Status.LOCAL_ERROR:
        return f"cannot write the copy: {os.strerror(result.errno)}"
    return {
        Status.CHANGED: "the source changed while it was copied",
        Status.NOT_REGULAR: "not a regular file any more",
        Status.LOST: "its copier died",
    }.get(result.status, f"not copied ({result.status.name.lower()})")
