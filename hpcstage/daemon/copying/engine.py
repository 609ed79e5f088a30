"""Drives the queue with the pool: hands ids to copiers, takes their results, and counts what the record needs.

Owns what a result means (published, try again, failed, disk full) and the time with transfers in flight. It answers no
request: it calls a hook when an id has reached its final state.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from hpcstage.daemon.copying.copies import StoredCopies, Tombstones
from hpcstage.daemon.queue.large import MOST_TRIES
from hpcstage.daemon.queue.queue import Queue
from hpcstage.daemon.queue.rates import Width
from hpcstage.daemon.queue.states import FINAL, FileState
from hpcstage.plan.dataset.manifest import Manifest
from hpcstage.protocol.shim import Reason, WorkProgress
from hpcstage.store.arrivingrows import StripeShare
from hpcstage.store.copierpipe import Result
from hpcstage.store.copyfile import Status
from hpcstage.store.grantedrows import GrantedRows
from hpcstage.store.pool import CopierPool
from hpcstage.store.storedir import Store

if TYPE_CHECKING:
    from hpcstage.record.parts.part import ErrorPart

SMALL_BYTES = 256 << 10
"""Below this mean size copiers may get as many transfers ahead as they have threads."""
NO_SPACE_ERRNOS = frozenset({errno.ENOSPC, errno.EDQUOT})
BROKEN_DISK_ERRNOS = frozenset(
    {errno.EROFS, errno.ENOENT, errno.EIO, errno.ENODEV, errno.ESTALE, errno.EACCES, errno.EPERM, errno.EXDEV}
)
MOST_ERRORS = 20


@dataclass
class Failures:
    """Counts failures by their text, with the first path of each, and the tries of a file."""

    kinds: dict[str, ErrorPart] = field(default_factory=dict)
    _tries: dict[int, int] = field(default_factory=dict)

    def add(self, path: bytes, text: str) -> None:
        """Counts a failure."""
        from hpcstage.record.parts.part import ErrorPart

        known = self.kinds.get(text)
        if known is not None:
            self.kinds[text] = replace(known, count=known.count + 1)
        elif len(self.kinds) < MOST_ERRORS:
            name = os.fsencode(path).decode(errors="replace")
            self.kinds[text] = ErrorPart(path=name, error=text)

    def try_again(self, id_: int) -> bool:
        """Counts a try of a file that failed. Returns whether there may be another one."""
        tries = self._tries[id_] = self._tries.get(id_, 1) + 1
        return tries <= MOST_TRIES


@dataclass
class Busy:
    """Integrals over time: of the transfers in flight, and of the time in which something held them back."""

    at: float
    transfer_s: float = 0.0
    busy_s: float = 0.0
    limited_s: float = 0.0

    def advance(self, now: float, flying: int, most: int, *, capped: bool) -> None:
        """Adds the time since the last call, for which these values held: `flying` transfers were at the source, where
        at least `most` may be."""
        passed_s = max(0.0, now - self.at)
        self.at = now
        self.transfer_s += passed_s * flying
        if flying:
            self.busy_s += passed_s
        if capped or flying < most:
            self.limited_s += passed_s


def _nothing(_: object) -> None:
    """Does nothing."""


@dataclass(frozen=True)
class Hooks:
    """The functions that the engine calls."""

    final: Callable[[int], None] = _nothing
    """Takes an id that has reached its final state, or whose requests are to be answered all the same."""
    given: Callable[[int], None] = _nothing
    """Takes an id that a copier is about to get."""
    hold: Callable[[int], None] = _nothing
    """Takes the number of transfers that may be published although their files were written to."""
    is_requested: Callable[[int], bool] = lambda _: False
    """Returns whether a request waits for an id."""
    published: Callable[[], None] = lambda: None
    """Is called when a copy is there, with its attributes."""
    voided: Callable[[], None] = lambda: None
    """Is called when copies were voided and none of them is visible any more."""


class Engine:
    """Moves files between queue, pool and store, and owns the failures and the time with transfers in flight."""

    def __init__(
        self,
        manifest: Manifest,
        queue: Queue,
        pool: CopierPool,
        store: Store,
        hooks: Hooks = Hooks(),
        run_started: float | None = None,
    ) -> None:
        now = time.monotonic()
        started = now if run_started is None else run_started
        self.manifest = manifest
        self.queue = queue
        self.pool = pool
        self.hooks = hooks
        self.copies = StoredCopies(manifest, store)
        self.arriving = GrantedRows(store.node_dir)
        self.tombstones = Tombstones(manifest, store, hooks.hold)
        self.is_paused = False
        """Whether no copy is begun for now."""
        self.failures = Failures()
        self.busy = Busy(now, limited_s=now - started)
        queue.large.most_beside = max(1, pool.transfers // 2)
        self._mean_bytes = manifest.total_bytes / max(len(manifest), 1)
        self.width = Width.begin(pool.transfers, self._mean_bytes, programs_wait=queue.limits.programs_wait)

    @property
    def progress(self) -> WorkProgress:
        """How much this node has of what it is to keep; files that it does not keep are taken to have the mean size."""
        files, size_bytes = len(self.manifest), self.manifest.total_bytes
        states = self.queue.states
        refused = (FileState.REFUSED,) if states.closed in (Reason.NONE, Reason.FULL) else ()
        kept = files - sum(map(states.count, (FileState.FAILED, FileState.VOID, FileState.REMOTE, *refused)))
        kept_bytes = size_bytes * kept // max(files, 1)
        return WorkProgress(min(self.copies.files, kept), min(self.copies.size_bytes, kept_bytes), kept, kept_bytes)

    # ---- handing out

    def pump(self, now: float) -> None:
        """Fills the copiers."""
        hooks, free = self.hooks, self._may_begin()
        if free > 0 and not self.queue.states.closed and not self.is_paused:
            for id_ in self.queue.next(free, now):
                hooks.given(id_)
                self._show(id_, now)
                self.pool.assign(id_, urgent=hooks.is_requested(id_))
            self.pool.flush()
        if not self.width.is_whole:
            self.width.filled(self._unrequested())
        self.sweep()
        self.advance(now)

    def _show(self, id_: int, now: float) -> None:
        """Lets programs see what arrives of a file that several threads copy."""
        size_bytes, large = self.manifest.size(id_), self.queue.large
        nodes = large.joint.nodes(id_)
        share = StripeShare(large.joint.own, nodes) if nodes else None
        inode, priority = self.manifest.inodes[id_], large.priority(id_, now)
        if size_bytes > self.pool.settings.limit_bytes and self.arriving.grant(id_, inode, size_bytes, priority, share):
            large.shown.add(id_)
            self.arriving.tell(id_, priority, large.ahead.get(id_, 0))

    def follow(self, now: float) -> None:
        """Has the queue decide, by what programs read at the source, which large files are copied, and tells the
        copiers what of them."""
        large = self.queue.large
        for id_ in large.reads.ids(now):
            if large.reads.is_here(id_, now) and self.queue.states.of(id_) not in FINAL:
                self.arriving.ask(id_, self.manifest.inodes[id_], self.manifest.size(id_))
        large.look(self.arriving.reads, now)
        self._give_up(large.given_up(self.arriving.reads, now))
        for id_ in large.shown:
            self.arriving.tell(id_, large.priority(id_, now), large.ahead.get(id_, 0))

    def pause(self) -> None:
        """Begins no more transfers for now, and gives up those under way."""
        self.is_paused = True
        self._give_up(self.queue.flights.needed())

    def _give_up(self, ids: Iterable[int]) -> None:
        """Has copiers give up transfers, which begin again later; never one that a request waits for."""
        for id_ in ids:
            if not self.hooks.is_requested(id_):
                self.pool.cancel(id_)

    def _may_begin(self) -> int:
        """Returns how many transfers may begin: those that programs wait for, and no more besides than pay."""
        queue, beside = self.queue, self.width
        most = self.pool.transfers + self._ahead() - self.pool.assigned
        if beside.is_whole:
            return most
        requested = min(len(queue.promoted.ids), queue.states.count(FileState.PROMOTED))
        return min(most, requested + max(0, beside.transfers - self._unrequested()))

    def _unrequested(self) -> int:
        """Returns how many transfers go on for which no program waits, and that do not stand aside for programs."""
        waited_for = sum(map(self.hooks.is_requested, self.pool.ids))
        return max(0, self.pool.assigned - self.queue.large.beside - waited_for)

    def _ahead(self) -> int:
        """Returns how many transfers copiers get beyond those at the source, so that they do not wait for more."""
        pool = self.pool
        beyond = pool.slots if self._mean_bytes < SMALL_BYTES else len(pool.members)
        most = pool.slots + beyond - pool.transfers
        return self.queue.estimates.ahead(self._mean_bytes, len(pool.members), most)

    def advance(self, now: float) -> None:
        """Brings the integrals up to now."""
        capped = self.queue.wake_after(now) is not None or self.width.is_searching
        flying = min(self.pool.assigned, self.pool.transfers)
        self.busy.advance(now, flying, min(self.width.transfers, self.pool.transfers), capped=capped)

    # ---- results

    def receive(self, fd: int, now: float) -> None:
        """Takes the results of a copier."""
        self.advance(now)
        for result in self.pool.receive(fd):
            if result.status is Status.OK:
                self.width.took(result.size_bytes, now)
            self._take(result, now)
        if not self.pool.slots:
            self.queue.states.close(Reason.FAILED)

    def _take(self, result: Result, now: float) -> None:
        self.tombstones.lift(result.id)
        self.queue.large.hidden(result.id)
        self.arriving.ended(result.id, is_stored=result.status is Status.OK)
        self._conclude(result, now)
        self.tombstones.settle(result.id)

    def _conclude(self, result: Result, now: float) -> None:
        if result.status is Status.CANCELLED and self.queue.given_up(result.id, now):
            if self.queue.large.is_large(result.id):  # a request for a small file goes on waiting
                self.hooks.final(result.id)
            return
        # EXISTS and in the store: a copier had published it and died before it reported that
        exists = result.status is Status.EXISTS and self.copies.status(result.id) is not None
        if result.status is Status.OK or exists:
            self.stored(result, now)
        elif self.queue.states.of(result.id) is FileState.VOID:
            self.queue.failed(result.id)
        elif result.status in {Status.CHANGED, Status.LOST} and self._again(result.id):
            self.queue.requeue(result.id)
            return
        else:
            self._failed(result)
        self.hooks.final(result.id)

    def stored(self, result: Result, now: float) -> bool:
        """Takes in a copy that was published. Returns False if it was not to be, and deletes it."""
        if self.queue.done(result.id, result.size_bytes, now):
            self.copies.last_stored = now
            self.copies.add(result.id, result.size_bytes, stays=self.queue.states.keeps(result.id))
            self.hooks.published()
            return True
        self.copies.delete(result.id)
        return False

    def _again(self, id_: int) -> bool:
        return self.failures.try_again(id_) and self.pool.slots > 0 and not self.queue.states.closed

    def _failed(self, result: Result) -> None:
        local = result.status is Status.LOCAL_ERROR
        self.queue.failed(result.id, no_space=local and result.errno in NO_SPACE_ERRNOS)
        if local and result.errno in BROKEN_DISK_ERRNOS:
            self.queue.states.close(Reason.FAILED)
        self.failures.add(self.manifest.source_path(result.id), describe(result))

    def sweep(self) -> None:
        """Deletes the temporary copies that had to make way for others."""
        dropped = self.queue.budget.temporary.dropped
        self.arriving.withdraw(dropped)
        for id_ in dropped:
            self.copies.remove(id_, self.queue.states.size(id_))
        dropped.clear()

    # ---- writes below a dataset

    def void(self, ids: Iterable[int]) -> None:
        """Voids files that are written to: when this returns, no copy of them is visible or ever will be."""
        ids = [id_ for id_ in ids if self.queue.states.of(id_) is not FileState.VOID]
        stored = [id_ for id_ in ids if self.queue.states.of(id_) is FileState.STORED]
        self.arriving.withdraw(ids)
        self._void_flying(self.queue.void(ids))
        for id_ in stored:
            self.copies.delete(id_)
        self.copies.holdings.drop(ids)
        if ids:
            self.hooks.voided()

    def void_range(self, ids: range) -> bytes:
        """Voids many files whose copies have been put out of sight. Returns the state that each of them had."""
        self.arriving.withdraw([id_ for id_ in self.arriving.ids if id_ in ids])
        places, flying = self.queue.void_range(ids)
        self._void_flying(flying)
        self.copies.holdings.drop(ids)
        self.hooks.voided()
        return places

    def _void_flying(self, flying: Iterable[int]) -> None:
        for id_ in flying:
            self.tombstones.bar(id_)
            self.pool.cancel(id_)


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
