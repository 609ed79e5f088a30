"""In which order files are copied: what was planned, what is announced, and whose word counts.

Owns ORDER and EPOCH requests, the loaders that are alive, and the helper that maps what they announce. Short ones are
mapped at once. The queue is told the result; what the program then really opens is `watch`'s.

What `hpcstage.order` gives is always followed. What samplers announce is followed unless another order was asked for
by name, and counted in any case.
"""

from __future__ import annotations

import contextlib
import json
from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hpcstage.daemon import epochs, keepsake, scanning
from hpcstage.daemon.epochs import Announced, Job, Mapped, Outcome
from hpcstage.daemon.helpers import Helpers
from hpcstage.daemon.learn import Rows, Table
from hpcstage.daemon.queue import FINAL, Queue
from hpcstage.daemon.spec import DaemonSpec
from hpcstage.daemon.streams import Stream, Streams, Who
from hpcstage.daemon.watch import Watch
from hpcstage.plan import order as orders
from hpcstage.plan.manifest import Manifest
from hpcstage.plan.types import Order

ORDER_HELPER = "order "
TRACE_HELPER = "trace"
EPOCH_HELPER = "samplers"
SHORT_ORDER_BYTES = 256 << 10
"""A few thousand paths: looked up in milliseconds, less than a fork."""
SHORT_EPOCH_BYTES = 32 << 10
SHORT_FILES = 100_000
SHIM_PREFIX = "epoch-"
"""Of names below orders/ that the shim gives."""
ANNOUNCED, HEAD = "announced", "head"
"""Names of orders in the queue."""
MOST_PENDING = 1024


class Ordering:
    """See the module. `on_change` is called when the queue has another order."""

    def __init__(self, spec: DaemonSpec, helpers: Helpers, watch: Watch, on_change: Callable[[], None]) -> None:
        self.provenance = ""
        self.counts: Counter[str] = Counter()
        self.watch = watch
        self._planned = ""
        watch.on_wrong = self._wrong
        self._follows = orders.follows_samplers(spec.order)
        self._trace: str | None = None
        """Why none was left; empty: one was."""
        self._spec = spec
        self._dir = Path(spec.node_dir) / "orders"
        self._helpers = helpers
        self._on_change = on_change
        self._manifest: Manifest | None = None
        self._queue: Queue
        self._streams = Streams()
        self._tables: dict[str, Table] = {}
        self._held: list[Callable[[], None]] = []
        """Requests that came before the manifest."""
        self._pending: list[Announced] = []
        self._latest: dict[Who, Announced] = {}
        """Of loaders in an epoch."""
        self._with_later = False
        self._stale = False
        """The order of all loaders has to be made anew."""

    def open(self, manifest: Manifest, queue: Queue, order: Order) -> None:
        """The files are known, and with which order copying begins."""
        self._manifest, self._queue = manifest, queue
        self.provenance = self._planned = order.provenance
        self.counts["ordered"] = len(order.ids)
        self.watch.open(
            manifest,
            staged=lambda id_: queue.place(id_) in FINAL,
            staging=lambda: not queue.settled,
            known=keepsake.load_learnt(self._dir.parent),
        )
        held, self._held = self._held, []
        for request in held:
            request()

    # ---- lists of paths

    def order(self, name: str) -> None:
        """A list of paths below orders/ is the order from here on."""
        if not epochs.is_name(name):
            return
        if self._manifest is None:
            self._hold(lambda: self.order(name))
            return
        with contextlib.suppress(OSError):
            if (self._dir / name).stat().st_size <= SHORT_ORDER_BYTES:
                self._order_mapped(name, scanning.map_order(self._dir.parent, name))
                return
        self._helpers.start(
            ORDER_HELPER + name,
            lambda: scanning.map_order(self._dir.parent, name),
            lambda data: self._order_mapped(name, data),
        )

    def _order_mapped(self, name: str, data: bytes | None) -> None:
        if data is None or self._manifest is None:
            return
        ids: array[int] = scanning.load_order(self._dir.parent, name, len(self._manifest))
        for left in (name, name + ".ids"):
            (self._dir / left).unlink(missing_ok=True)
        if not name.startswith(SHIM_PREFIX):
            self._reorder(ids, orders.GIVEN, "")
            self.counts["ordered"] = int(json.loads(data)["ids"])
        elif self._follows:
            self._reorder(ids, orders.SAMPLER, HEAD)

    def _reorder(self, ids: Sequence[int], provenance: str, name: str) -> None:
        self._queue.reorder(ids, name)
        self.provenance = provenance
        self._on_change()

    def _hold(self, request: Callable[[], None]) -> None:
        if len(self._held) < MOST_PENDING:
            self._held.append(request)

    # ---- what samplers announce

    def epoch(self, pid: int, payload: bytes) -> None:
        """A loader begins an epoch, or is done with it."""
        one = epochs.parse(pid, payload)
        if one is None:
            return
        self.watch.announced(one)
        if self._manifest is None:
            self._hold(lambda: self._epoch(one))
        else:
            self._epoch(one)

    def _epoch(self, one: Announced) -> None:
        self._replace_pending(one)
        self._latest.pop(one.who, None)
        if one.ended:
            self._stale |= self._streams.end(one.who, goes_on=bool(one.formula)) and self._queue.waiting > 0
        else:
            self.counts["announcements"] += 1
            self._pending.append(one)
            self._latest[one.who] = one
        self._go_on()

    def _replace_pending(self, one: Announced) -> None:
        """An epoch that is over, or over before it was mapped, need not be mapped any more."""
        for other in [other for other in self._pending if other.who == one.who]:
            self._pending.remove(other)
            self.watch.mapped(other, None)
            self._delete(other)

    def _wrong(self, key: int) -> None:
        """The table of a dataset proved wrong."""
        if self._streams.forget(key):
            self._stale = True
            self.provenance = self._planned
        self._go_on()

    def _go_on(self) -> None:
        """Does what there is to do, at once or in a helper; one after the other, so that each knows of the last."""
        if self._manifest is None or EPOCH_HELPER in self._helpers.names():
            return
        if not (self._pending or self._stale or self._with_later):
            return
        job = self._job(self._manifest)
        self._pending, self._stale, self._with_later = [], False, False
        if self._is_short(job):
            self._done(job, epochs.work(job))
            return
        path = self._dir / ".mapped"
        started = self._helpers.start(
            EPOCH_HELPER, lambda: epochs.save(epochs.work(job), path), lambda data: self._mapped(job, path, data)
        )
        if started is None:
            self._done(job, Outcome([None] * len(job.announced)))

    def _job(self, manifest: Manifest) -> Job:
        datasets = [(one, self.watch.dataset(one.key)) for one in self._pending]
        return Job(
            manifest,
            self._dir,
            self._pending,
            self._streams.alive(),
            {one: None if one.columns and not dataset.wrong else dataset.rows for one, dataset in datasets},
            self._queue.waits,
            dict(self._tables),
            with_later=self._with_later,
        )

    def _is_short(self, job: Job) -> bool:
        if job.with_later or len(job.manifest) > SHORT_FILES:
            return False
        size = 4 * sum(len(stream.ids) for stream in job.streams)
        tables = 0
        for one in job.announced:
            with contextlib.suppress(OSError):
                size += (self._dir / one.name).stat().st_size
                if one.table and one.table not in job.tables:
                    tables += (self._dir / one.table).stat().st_size
        return size <= SHORT_EPOCH_BYTES and tables <= SHORT_ORDER_BYTES

    def _mapped(self, job: Job, path: Path, data: bytes | None) -> None:
        outcome = Outcome([None] * len(job.announced))
        if data is not None:
            with contextlib.suppress(OSError, ValueError, KeyError):
                outcome = epochs.load(path)
        path.unlink(missing_ok=True)
        self._done(job, outcome)

    def _done(self, job: Job, outcome: Outcome) -> None:
        self._tables.update(outcome.tables)
        followed = False
        for one, mapped in zip(job.announced, outcome.mapped, strict=True):
            self.watch.mapped(one, mapped)
            self._delete(one)
            if mapped is not None:
                followed |= self._begin(one, mapped)
        if self._follows and (followed or not job.announced):
            self._queue.reorder(outcome.order, ANNOUNCED)
            if followed:
                self.provenance = orders.SAMPLER
            left = self._queue.waiting > len(outcome.order)
            self._with_later |= followed and left and any(stream.formula for stream in self._streams.alive())
            self._on_change()
        self._go_on()

    def _begin(self, one: Announced, mapped: Mapped) -> bool:
        """Whether anything is known of what the loader reads."""
        rows = self._rows(one)
        dataset = self.watch.dataset(one.key)
        dataset.distinct = max(dataset.distinct, mapped.distinct)
        if isinstance(rows, Table):
            dataset.tell(rows)
        self.counts["announced_samples"] += mapped.samples
        self.counts["announced_files"] += len(mapped.ids)
        self.counts["unknown_samples"] += mapped.unknown
        if self._latest.get(one.who) is not one:
            return False
        self._streams.begin(Stream(one.who, one.epoch, mapped.ids, one.key, one.formula, rows))
        return len(mapped.ids) > 0

    def _rows(self, one: Announced) -> Rows:
        dataset = self.watch.dataset(one.key)
        known = self._tables.get(one.table) if one.columns and not dataset.wrong else None
        return known or dataset.rows

    def _delete(self, one: Announced) -> None:
        if one.name:
            with contextlib.suppress(OSError):
                (self._dir / one.name).unlink()

    # ---- the end

    def leave_trace(self) -> None:
        """Begins to write the trace."""
        manifest, learner = self._manifest, self.watch.learner
        if manifest is None or learner is None:
            return
        if not self._spec.learn:
            self._trace = keepsake.NOT_LEARNT
            return
        self._trace = keepsake.UNFINISHED
        known = keepsake.Known(learner.first, {}, self.provenance, self.watch.keeping.kept_share)
        self._helpers.start(
            TRACE_HELPER,
            lambda: keepsake.leave(self._spec, manifest, known._replace(tables=learner.tables())),
            self._trace_left,
        )

    def _trace_left(self, data: bytes | None) -> None:
        self._trace = keepsake.FAILED if data is None else json.loads(data)

    # ---- the record

    def to_json(self) -> dict[str, Any]:
        """What was announced, and what became of it."""
        counts = self.counts
        return {
            "provenance": self.provenance or None,
            "ids": counts["ordered"] or None,
            "planned": self._planned or None,
            "announcements": counts["announcements"],
            "announced_files": counts["announced_files"],
            "unknown_samples": counts["unknown_samples"],
            "followed": self._follows,
            "trace_written": self._trace == "",
            "trace_why": self._trace or None,
            **self.watch.to_json(),
        }
