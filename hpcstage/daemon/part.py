"""Puts the daemon's part of the record together; it is written beside the run's other parts."""

from __future__ import annotations

import os
import time
from collections import Counter

from hpcstage.daemon.copying.alone import Reopened
from hpcstage.daemon.copying.engine import Engine
from hpcstage.daemon.process.accounts import Accounts
from hpcstage.daemon.process.looks import Looks
from hpcstage.daemon.process.page import Page
from hpcstage.daemon.process.proc import Missed, pressure
from hpcstage.daemon.process.retired import Retired
from hpcstage.daemon.queue.queue import Place
from hpcstage.daemon.queue.unserved import Unserved
from hpcstage.daemon.staging import Staging
from hpcstage.daemon.telemetry import Sampler
from hpcstage.job.disks import available_bytes
from hpcstage.problem import Problem
from hpcstage.protocol.daemonspec import DaemonSpec
from hpcstage.protocol.shim import Reason
from hpcstage.record.notes.rule import more_room
from hpcstage.record.parts.part import DatasetPart, NodePart, ProcessPart
from hpcstage.units import format_size

ERRORS_ARE_IN = "the first errors are in nodes/{host}.json in the run directory, under errors"
DISK_FULL = "free space there, or name a larger disk with --local-dir; a larger --budget does not help"
PEER_COUNTS = ("peer_bytes", "peer_files", "sent_bytes", "sent_files")


class Reporter:
    """Builds the part from the objects of the daemon that hold its values."""

    def __init__(
        self,
        spec: DaemonSpec,
        staging: Staging,
        page: Page,
        sampler: Sampler,
        looks: Looks,
        reopened: Reopened,
        started: float,
    ) -> None:
        self._spec = spec
        self._staging = staging
        self._page = page
        self._sampler = sampler
        self._looks = looks
        self._reopened = reopened
        self._started = started
        self._started_unix_s = time.time() - (time.monotonic() - started)
        self._pressure = pressure()
        self.missed = Missed()
        self.accounts = Accounts()
        self._retired = Retired()

    def part(self, now: float, *, complete: bool) -> NodePart:
        """Returns the part with everything up to now; `complete` says that the run has ended."""
        staging, outlook = self._staging, self._staging.outlook
        processes = self._processes()
        part = NodePart(
            host=self._spec.host,
            mode=outlook.mode if outlook.mode != "auto" else "runtime",
            mode_asked=self._spec.mode,
            mode_why=outlook.mode_why,
            started_unix_s=self._started_unix_s,
            ended_s=round(now - self._started, 6) if complete else None,
            complete=complete,
            datasets=self._datasets(),
            scan_s=outlook.scanned.seconds if outlook.scanned else None,
            staged_s=None if outlook.staged_at is None else round(outlook.staged_at - self._started, 6),
            totals=self._totals(),
            budget=self._budget(),
            order=self._order(),
            forecast=outlook.scanned.forecast if outlook.scanned else None,
            samples=self._sampler.samples,
            processes=processes,
            accounts=self.accounts.to_json(processes),
            missed_processes=self.missed.listed(),
            missed_count=len(self.missed),
            pressure=self._pressure_since(),
            problems=[*outlook.problems, *self._problems()],
            node_index=self._spec.node_index,
            node_count=self._spec.node_count,
        )
        if staging.group is not None:
            part.placement, part.placement_why = staging.group.placement
            part.group = staging.group.to_json()
        if staging.engine is not None:
            part.alone = {**staging.engine.alone.measured, **self._reopened.measured}
            part.memory_bytes = available_bytes()
            part.errors = list(staging.engine.errors.kinds.values())
            part.hist_open, part.hist_read = staging.engine.pool.stats.histograms()
        return part

    def _processes(self) -> list[ProcessPart]:
        found = self._page.processes(self._started)
        for process in found:
            process.counters |= self._looks.of(process.pid)
        return found + self._retired.rows()

    def retired(self, process: ProcessPart) -> None:
        """A process has ended, and its slot is used again."""
        process.counters |= self._looks.of(process.pid)
        self._looks.forget(process.pid)
        self.missed.attached(process.pid)
        if not self._retired.tells_apart(process):
            self.accounts.retired(process)
        self._retired.add(process)

    def _datasets(self) -> list[DatasetPart]:
        engine = self._staging.engine
        parts = []
        for index, dataset in enumerate(self._spec.datasets):
            part = DatasetPart(
                dataset.name, os.fsencode(dataset.root).decode(errors="replace"), list(dataset.arguments)
            )
            if engine is not None:
                facts = engine.by_dataset[index]
                part.files, part.size_bytes = facts.files, facts.size_bytes
                part.staged_files, part.staged_bytes = facts.staged_files, facts.staged_bytes
            parts.append(part)
        return parts

    def _totals(self) -> dict[str, float]:
        staging = self._staging
        totals: dict[str, float] = {
            "want_ready": staging.answers.counts["want_ready"],
            "want_direct": staging.answers.counts["want_direct"],
        }
        if staging.outlook.scanned is not None:
            totals["source_stats"] = staging.outlook.scanned.stats
            totals["source_listings"] = staging.outlook.scanned.listings
        if staging.group is not None:
            counts = Counter[str]() if staging.group.peers is None else staging.group.peers.counts
            totals |= {name: counts[name] for name in PEER_COUNTS}
        if staging.engine is None:
            return totals
        totals |= _copied(staging.engine)
        totals["measuring_opens"] = self._reopened.measured.get("reopened", 0)
        return totals

    def _budget(self) -> dict[str, object]:
        limit, engine = self._staging.outlook.budget, self._staging.engine
        if limit is None or engine is None:
            return {}
        return {
            "size_bytes": limit.size_bytes,
            "inodes": limit.inodes,
            "why": limit.why,
            "used_bytes": engine.queue.room.used_bytes,
            "used_inodes": engine.queue.room.used_inodes,
        }

    def _order(self) -> dict[str, object]:
        scanned = self._staging.outlook.scanned
        found = self._staging.ordering.to_json()
        if scanned is not None:
            found |= {"trace_used": scanned.trace or None, "trace_unused_why": scanned.trace_why or None}
        return found

    def _pressure_since(self) -> dict[str, float]:
        now = pressure()
        return {name: round(now[name] - since, 6) for name, since in self._pressure.items() if name in now}

    def _problems(self) -> list[Problem]:
        engine = self._staging.engine
        if engine is None:
            return []
        problems = []
        refused = engine.queue.count(Place.REFUSED)
        if engine.queue.closed is Reason.FAILED:
            text = "the local disk or all copiers failed: nothing more is staged, the program reads the source"
            problems.append(Problem("local-failed", text, ERRORS_ARE_IN.format(host=self._spec.host)))
        elif engine.queue.disk_full:
            text = f"the local disk is full: {self._left(refused)} were not staged and are read from the source"
            problems.append(Problem("disk-full", text, DISK_FULL))
        elif engine.unplaced:
            text = f"the budgets of all nodes have no room for {engine.unplaced:,} files: they are read from the source"
            problems.append(Problem("store-full", text, self._more_room()))
        elif refused and engine.queue.closed in (Reason.NONE, Reason.FULL):
            text = f"the budget has no room for {self._left(refused)}: they are read from the source"
            problems.append(Problem("store-full", text, self._more_room()))
        unserved = self._staging.unserved
        if unserved.files:
            problems.append(_unserved(unserved))
        if held := engine.queue.large.held_back - unserved.files:
            size = format_size(sum(map(engine.queue.size, held)))
            one, them = f"a large file ({size}) was", f"{len(held)} large files ({size}) were"
            what, it = (one, "it") if len(held) == 1 else (them, "them")
            text = f"{what} not copied, as the program read {it} at the source"
            remedy = "--mode upfront copies such files before the program starts, which pays if it reads them again"
            problems.append(Problem("left-to-program", text, remedy))
        failed = engine.queue.count(Place.FAILED)
        if failed:
            text = f"{failed:,} files could not be copied and are read from the source"
            problems.append(Problem("copy-failed", text, ERRORS_ARE_IN.format(host=self._spec.host)))
        return problems

    def _left(self, refused: int) -> str:
        engine = self._staging.engine
        assert engine is not None
        left = format_size(engine.manifest.total_bytes - engine.stored_bytes)
        return f"{refused:,} {'file' if refused == 1 else 'files'} (about {left})"

    def _more_room(self) -> str:
        """Returns the remedy for a full budget: one that the user asked for can be raised, one that follows from the
        free space mostly cannot."""
        limit = self._staging.outlook.budget
        return more_room(limit.why if limit is not None else "")


def _unserved(unserved: Unserved) -> Problem:
    count = len(unserved.files)
    files = f"{count:,} {'file' if count == 1 else 'files'}"
    text = (
        f"copying paused for {unserved.paused_s(time.monotonic()):.0f} s in all, as programs that hpcstage does not "
        f"reach opened {files} or more at the source, and no other program used the datasets"
    )
    remedy = "programs that are not Python, and python -I, -E or -S, gain nothing: run them without hpcstage"
    return Problem("not-reached", text, remedy)


def _copied(engine: Engine) -> dict[str, float]:
    totals = engine.pool.stats.totals()
    queue = engine.queue
    return {
        "source_bytes": totals.bytes,
        "source_files": totals.files,
        "source_opens": totals.opens,
        "source_reads": totals.reads,
        "failed": queue.count(Place.FAILED),
        "void": queue.count(Place.VOID),
        "refused": queue.count(Place.REFUSED),
        "copy_busy_s": round(engine.busy.busy_s, 6),
    }
