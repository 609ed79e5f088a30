"""Decides in which order files are copied: the planned one, one that the program gives, or what samplers announce.

Owns the provenance of the order, requests that come before the manifest, and the trace that the run leaves. `lists`
reads lists of paths, `announcements` handles what samplers announce, `watch` what the program then really opens.

An order that `hpcstage.order` gives is always followed. What samplers announce is followed unless the user asked for
another order by name; it is counted in any case.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hpcstage.daemon.process.helpers import Helpers
from hpcstage.daemon.queue.queue import FINAL, Queue
from hpcstage.daemon.reading import epochs, traces
from hpcstage.daemon.reading.announcements import Announcements
from hpcstage.daemon.reading.lists import Listed, Lists
from hpcstage.daemon.reading.streams import merge
from hpcstage.daemon.reading.watch import Watch
from hpcstage.plan.dataset.manifest import Manifest
from hpcstage.plan.order import orders
from hpcstage.plan.types import Order
from hpcstage.protocol import nodedir
from hpcstage.protocol.daemonspec import DaemonSpec
from hpcstage.protocol.shim import EARLY_ORDER, SAMPLER_ORDER

TRACE_HELPER = "trace"
SHIM_PREFIX, EARLY_PREFIX = SAMPLER_ORDER.decode(), EARLY_ORDER.decode()
"""Prefixes of names below orders/: of the beginning of an epoch, which the shim gives, and of its guess when a loader
is made."""
ANNOUNCED, HEAD, GUESSED = "announced", "head", "guessed"
"""Names of orders in the queue."""
MOST_PENDING = 1024
MOST_GUESSES = 64
"""The most guesses that are taken; more processes than that are not ranks that read side by side."""


class Ordering:
    """Sets the queue's order. `on_change` is called when the queue has another one."""

    def __init__(self, spec: DaemonSpec, helpers: Helpers, watch: Watch, on_change: Callable[[], None]) -> None:
        self.provenance = ""
        self.counts: Counter[str] = Counter()
        self.watch = watch
        self._planned = ""
        self._follows = orders.follows_samplers(spec.order)
        self._trace: str | None = None
        """Why no trace was left; empty if one was; None while it is not known."""
        self._spec = spec
        self._node_dir = Path(spec.node_dir)
        self._helpers = helpers
        self._on_change = on_change
        self._manifest: Manifest | None = None
        self._queue: Queue
        self._lists = Lists(self._node_dir, helpers, self._listed)
        self._announcements = Announcements(
            self._node_dir / nodedir.ORDERS, helpers, watch, self.counts, self._announced
        )
        watch.on_wrong = self._wrong
        self._held: list[Callable[[], None]] = []
        """Requests that came before the manifest."""
        self._guesses: list[Sequence[int]] = []

    def open(self, manifest: Manifest, queue: Queue, order: Order) -> None:
        """Sets manifest, queue and the order with which copying begins, and handles the requests that waited."""
        self._manifest, self._queue = manifest, queue
        self.provenance = self._planned = order.provenance
        self.counts["ordered"] = len(order.ids)
        self.watch.open(
            manifest,
            staged=lambda id_: queue.place(id_) in FINAL,
            staging=lambda: not queue.settled,
            known=traces.load_learnt(self._node_dir),
        )
        self._announcements.open(manifest, queue)
        held, self._held = self._held, []
        for request in held:
            request()

    # ---- requests

    def order(self, name: str) -> None:
        """Reads a list of paths below orders/, which becomes the order once it is read."""
        if not epochs.is_name(name):
            return
        manifest = self._manifest
        if manifest is None:
            self._hold(lambda: self.order(name))
        else:
            self._lists.read(name, len(manifest))

    def epoch(self, pid: int, payload: bytes) -> None:
        """Takes the request of a loader that begins an epoch or is done with one."""
        one = epochs.parse(pid, payload)
        if one is None:
            return
        self.watch.announced(one)
        if self._manifest is None:
            self._hold(lambda: self._announcements.take(one))
        else:
            self._announcements.take(one)

    def _hold(self, request: Callable[[], None]) -> None:
        if len(self._held) < MOST_PENDING:
            self._held.append(request)

    # ---- what comes of them

    def _listed(self, listed: Listed) -> None:
        if listed.name.startswith(EARLY_PREFIX):
            self._guessed(listed.ids)
        elif not listed.name.startswith(SHIM_PREFIX):
            self._reorder(listed.ids, orders.GIVEN, "")
            self.counts["ordered"] = listed.paths
        elif self._follows:
            self._reorder(listed.ids, orders.SAMPLER, HEAD)

    def _guessed(self, ids: Sequence[int]) -> None:
        """Adds a guess at what a loader reads first, made before it begins. The guesses of several processes make one
        order, which is followed only where nothing better is known."""
        if not self._follows or self.provenance != orders.MANIFEST or self.counts["announcements"]:
            return
        if len(self._guesses) >= MOST_GUESSES:
            return
        self._guesses.append(ids)
        assert self._manifest is not None
        both = merge(self._guesses, self._queue.waits, bytearray(len(self._manifest)))
        self._reorder(both, self.provenance, GUESSED)

    def _reorder(self, ids: Sequence[int], provenance: str, name: str) -> None:
        self._queue.reorder(ids, name)
        self.provenance = provenance
        self._on_change()

    def _announced(self, ids: Sequence[int], *, known: bool) -> bool:
        """Takes the order of all loaders; `known` says whether it contains ids of a new epoch. Returns whether it is
        followed."""
        if self._follows:
            self._reorder(ids, orders.SAMPLER if known else self.provenance, ANNOUNCED)
        return self._follows

    def _wrong(self, key: int) -> None:
        """Drops what was announced for a dataset whose table proved wrong."""
        if self._announcements.forget(key):
            self.provenance = self._planned
        self._announcements.go_on()

    # ---- the end

    def leave_trace(self) -> None:
        """Starts the helper that writes the trace."""
        manifest, learner = self._manifest, self.watch.learner
        if manifest is None or learner is None:
            return
        if not self._spec.learn:
            self._trace = traces.NOT_LEARNT
            return
        self._trace = traces.UNFINISHED
        known = traces.Known(learner.first, {}, self.provenance, self.watch.keeping.kept_share)
        self._helpers.start(
            TRACE_HELPER,
            lambda: traces.leave(self._spec, manifest, known._replace(tables=learner.tables())),
            self._trace_left,
        )

    def _trace_left(self, data: bytes | None) -> None:
        self._trace = traces.FAILED if data is None else json.loads(data)

    # ---- the record

    def to_json(self) -> dict[str, Any]:
        """Returns what the record says of the order and of what the program opened."""
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
