"""Takes what samplers announce and makes one order of what all living loaders will read.

Owns EPOCH messages, the tables that came with them, and the helper that maps announcements to ids; short ones are
mapped at once. `ordering` hands the order to the queue.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from hpcstage.daemon.queue.queue import Queue
from hpcstage.daemon.reading import epochs
from hpcstage.daemon.reading.epochs import Announced, Mapped, MappingJob, MappingOutcome
from hpcstage.daemon.reading.openwatch import OpenWatch
from hpcstage.daemon.reading.scanning import SHORT_BYTES
from hpcstage.daemon.reading.streams import Stream, Streams, Table, Who
from hpcstage.daemon.resources import Resources
from hpcstage.plan.dataset.manifest import Manifest
from hpcstage.protocol import nodedir

HELPER = "samplers"
SHORT_EPOCH_BYTES = 32 << 10
SHORT_FILES = 100_000


class OnOrder(Protocol):
    """Takes the ids that all loaders read from here on; `known` says whether some belong to a new epoch."""

    def __call__(self, ids: Sequence[int], *, known: bool) -> None: ...


class Announcements:
    """Maps the announcements of all loaders. One job of mapping runs at a time, so that each knows what the last one
    found."""

    def __init__(
        self,
        base: Resources,
        watch: OpenWatch,
        manifest: Manifest,
        queue: Queue,
        on_order: OnOrder,
    ) -> None:
        self.epochs = 0
        """The number of epochs that were announced."""
        self._dir = base.node_dir / nodedir.ORDERS
        self._helpers = base.helpers
        self._watch = watch
        self._on_order = on_order
        self._manifest = manifest
        self._queue = queue
        self._streams = Streams()
        self._tables: dict[str, Table] = {}
        self._wrong: set[str] = set()
        self._pending: list[Announced] = []
        self._latest: dict[Who, Announced] = {}
        """By loader that is in an epoch: its last announcement."""
        self._stale = False
        """Whether the order of all loaders has to be made anew."""

    def take(self, one: Announced) -> None:
        """Takes the announcement of a loader that begins an epoch or is done with one."""
        self._replace_pending(one)
        self._latest.pop(one.who, None)
        if one.ended:
            self._stale |= self._streams.end(one.who) and self._queue.states.waiting > 0
        else:
            self.epochs += 1
            self._pending.append(one)
            self._latest[one.who] = one
        self.go_on()

    def forget(self, table: str) -> bool:
        """Drops the orders of the loaders whose table proved wrong. Returns whether there were any."""
        self._wrong.add(table)
        found = self._streams.forget(table)
        self._stale |= found
        return found

    def go_on(self) -> None:
        """Maps the announcements that wait, at once or in a helper, unless a helper is mapping some."""
        if HELPER in self._helpers.names():
            return
        if not (self._pending or self._stale):
            return
        job = self._job()
        self._pending, self._stale = [], False
        if self._is_short(job):
            self._done(job, epochs.work(job))
            return
        path = self._dir / ".mapped"
        started = self._helpers.start(
            HELPER, lambda: epochs.save(epochs.work(job), path), lambda data: self._mapped(job, path, data)
        )
        if started is None:
            self._done(job, MappingOutcome([None] * len(job.announced)))

    def _replace_pending(self, one: Announced) -> None:
        """Drops the waiting announcements of the same loader: an epoch that is over need not be mapped any more."""
        for other in [other for other in self._pending if other.who == one.who]:
            self._pending.remove(other)
            self._delete(other)

    # ---- mapping

    def _job(self) -> MappingJob:
        return MappingJob(
            self._manifest,
            self._dir,
            self._pending,
            self._streams.alive(),
            frozenset(self._wrong),
            self._queue.states.waits,
            dict(self._tables),
        )

    def _is_short(self, job: MappingJob) -> bool:
        if len(job.manifest) > SHORT_FILES:
            return False
        size = 4 * sum(len(stream.ids) for stream in job.streams)
        tables = 0
        for one in job.announced:
            with contextlib.suppress(OSError):
                size += (self._dir / one.name).stat().st_size
                if one.table and one.table not in job.tables:
                    tables += (self._dir / one.table).stat().st_size
        return size <= SHORT_EPOCH_BYTES and tables <= SHORT_BYTES

    def _mapped(self, job: MappingJob, path: Path, data: bytes | None) -> None:
        outcome = MappingOutcome([None] * len(job.announced))
        if data is not None:
            with contextlib.suppress(OSError, ValueError, KeyError):
                outcome = epochs.load(path)
        path.unlink(missing_ok=True)
        self._done(job, outcome)

    # ---- what was mapped

    def _done(self, job: MappingJob, outcome: MappingOutcome) -> None:
        self._tables.update(outcome.tables)
        known = False
        for one, mapped in zip(job.announced, outcome.mapped, strict=True):
            self._delete(one)
            if mapped is not None:
                known |= self._begin(one, mapped)
        if known or not job.announced:
            self._on_order(outcome.order, known=known)
        self.go_on()

    def _begin(self, one: Announced, mapped: Mapped) -> bool:
        """Takes in a mapped announcement. Returns whether anything is known of what the loader reads."""
        if self._latest.get(one.who) is not one or one.table in self._wrong:
            return False
        self._watch.mapped(one, mapped)
        self._streams.begin(Stream(one.who, mapped.ids, one.table))
        return len(mapped.ids) > 0

    def _delete(self, one: Announced) -> None:
        if one.name:
            with contextlib.suppress(OSError):
                (self._dir / one.name).unlink()
