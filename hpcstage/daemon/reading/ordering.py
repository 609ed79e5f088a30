"""Decides in which order files are copied: the planned one, one that the program gives, or what samplers announce.

Owns the provenance of the order, the lists of paths that the program leaves below orders/, and the trace that the run
leaves. `announcements` handles what samplers announce, `watch` what the program then really opens.

Where the user asked for another order by name, the shim announces nothing; what `hpcstage.order` gives is always
followed.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from hpcstage.daemon.process.server import Reply
from hpcstage.daemon.queue.queue import Queue
from hpcstage.daemon.reading import epochs, scanning
from hpcstage.daemon.reading.announcements import Announcements
from hpcstage.daemon.reading.openwatch import OpenLog, OpenWatch
from hpcstage.daemon.reading.scanning import SHORT_BYTES, Prepared
from hpcstage.daemon.resources import Resources
from hpcstage.daemon.service import Message, Service
from hpcstage.plan.dataset.manifest import Manifest
from hpcstage.plan.order import orders, trace
from hpcstage.protocol import nodedir
from hpcstage.protocol.daemonspec import DaemonSpec
from hpcstage.protocol.shim import SAMPLER_ORDER, Answer, Kind
from hpcstage.stderr import log

if TYPE_CHECKING:
    from hpcstage.record.parts.part import NodePart

LIST_HELPER, TRACE_HELPER = "order ", "trace"
FULLER_FACTOR = 2
"""A trace with more than this many times the files is not replaced: a run that was broken off knows less."""
SHIM_PREFIX = SAMPLER_ORDER.decode()
"""The prefix of names below orders/ of the beginning of an epoch, which the shim gives."""
ANNOUNCED, HEAD = "announced", "head"
"""Names of orders in the queue."""


class Ordering(Service):
    """Sets the queue's order, and owns all that is known of what the program reads. It calls `on_change` when the queue
    has another order."""

    kinds = frozenset({Kind.ORDER, Kind.EPOCH})

    def __init__(
        self,
        base: Resources,
        log: OpenLog,
        prepared: Prepared,
        queue: Queue,
        on_change: Callable[[], None],
    ) -> None:
        manifest = prepared.manifest
        self._base = base
        self._prepared = prepared
        self._queue = queue
        self._on_change = on_change
        self._provenance = prepared.order.provenance
        self._log = log
        self.watch = OpenWatch(log, manifest, queue, self._wrong)
        self._announcements = Announcements(base, self.watch, manifest, queue, self._announced)

    # ---- messages

    def handle(self, message: Message) -> Reply:
        """Takes a list of paths below orders/, or what a loader says that begins an epoch or is done with one."""
        if message.kind is Kind.ORDER:
            self._read_list(os.fsdecode(message.payload))
        elif (one := epochs.parse(message.pid, message.payload)) is not None:
            self.watch.announced(one)
            self._announcements.take(one)
        return Reply(Answer.DONE)

    def work(self, now: float) -> None:
        """See Service."""
        self.watch.look(now)

    def wake_after(self, now: float) -> float | None:
        """See Service."""
        return self._log.wake_after(now)

    # ---- what comes of them

    def _read_list(self, name: str) -> None:
        """Reads the list of paths of this name as ids, a long one in a helper. A list that cannot be read is passed
        over."""
        if not epochs.is_name(name):
            return
        node_dir = self._base.node_dir
        with suppress(OSError):
            if (node_dir / nodedir.ORDERS / name).stat().st_size <= SHORT_BYTES:
                self._mapped(name, scanning.map_order(node_dir, name))
                return
        self._base.helpers.start(
            LIST_HELPER + name, lambda: scanning.map_order(node_dir, name), lambda data: self._mapped(name, data)
        )

    def _mapped(self, name: str, data: bytes | None) -> None:
        if data is None:
            return
        node_dir = self._base.node_dir
        ids = scanning.load_order(node_dir, name, len(self._prepared.manifest))
        for left in (name, name + ".ids"):
            (node_dir / nodedir.ORDERS / left).unlink(missing_ok=True)
        if name.startswith(SHIM_PREFIX):
            self._reorder(ids, orders.SAMPLER, HEAD)
        else:
            self._reorder(ids, orders.GIVEN, "")

    def _reorder(self, ids: Sequence[int], provenance: str, name: str) -> None:
        self._queue.sequences.push(ids, name)
        self._provenance = provenance
        self._on_change()

    def _announced(self, ids: Sequence[int], *, known: bool) -> None:
        """Takes the order of all loaders; `known` says whether it contains ids of a new epoch."""
        self._reorder(ids, orders.SAMPLER if known else self._provenance, ANNOUNCED)

    def _wrong(self, table: str) -> None:
        """Drops what was announced by a table that proved wrong."""
        if self._announcements.forget(table):
            self._provenance = self._prepared.order.provenance
        self._announcements.go_on()

    # ---- the end

    def drain(self) -> Collection[str]:
        """Reads what was logged, and starts the helper that writes the trace: one per command, not per node."""
        self.watch.stop()
        spec, manifest = self._base.spec, self._prepared.manifest
        if spec.node_index == 0:
            self._base.helpers.start(TRACE_HELPER, lambda: _leave_trace(spec, manifest, self.watch.first), _ignored)
        return [name for name in self._base.helpers.names() if name.startswith((LIST_HELPER, TRACE_HELPER))]

    # ---- the record

    def record(self, part: NodePart) -> NodePart:
        """Says what is known of the order and of what the program opened."""
        order = replace(
            part.order,
            provenance=self._provenance or None,
            announcements=self._announcements.epochs,
            lead=self.watch.lead(),
        )
        return replace(part, order=order)


def _ignored(answer: bytes | None) -> None:
    """Takes the end of the helper that writes the trace, which says in the log what went wrong."""


def _leave_trace(spec: DaemonSpec, manifest: Manifest, first: array[int]) -> bytes:
    """Writes the trace: the ids in the order of their first opens. Work for a helper, as a home directory may hang."""
    if not spec.state_dir or not first:
        return b""
    last, _ = trace.find(_directory(spec), _roots(spec), spec.command, manifest)
    if last is not None and len(last.order) > FULLER_FACTOR * len(first):
        log(f"the trace of run {last.header.run_id} stays, as this run opened {len(first):,} files only")
        return b""
    header = trace.TraceHeader(
        command=tuple(spec.command),
        roots=tuple(_roots(spec)),
        digest=manifest.paths_digest(),
        files=len(manifest),
        run_id=spec.run_id,
    )
    if why := trace.save(_directory(spec), trace.Trace(header, first)):
        log(f"no trace is left: {why}")
    return b""


def _directory(spec: DaemonSpec) -> Path:
    return Path(spec.state_dir) / trace.DIRECTORY


def _roots(spec: DaemonSpec) -> list[str]:
    return [os.fsdecode(dataset.root) for dataset in spec.datasets]
