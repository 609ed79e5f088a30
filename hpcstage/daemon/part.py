"""Says what was staged on this node, and what went wrong with it, in the node's part of the record."""

from __future__ import annotations

import time
from dataclasses import asdict, replace

from hpcstage.daemon.copying.engine import Engine
from hpcstage.daemon.queue.states import FileState
from hpcstage.daemon.queue.useful import Unserved
from hpcstage.daemon.reading.scanning import Prepared
from hpcstage.job.disks import available_bytes
from hpcstage.plan.budget import more_room
from hpcstage.plan.types import Budget
from hpcstage.problem import Problem
from hpcstage.protocol.shim import Reason
from hpcstage.record.parts.draft import NodeDraft
from hpcstage.units import format_size

ERRORS_ARE_IN = "the first errors are in nodes/{host}.json in the run directory, under errors"
DISK_FULL = "free space there, or name a larger disk with --local-dir; a larger --budget does not help"


def describe(part: NodeDraft, prepared: Prepared, engine: Engine, limit: Budget) -> None:
    """Adds what was found and copied on this node."""
    part.mode, part.mode_why = prepared.mode, prepared.mode_why
    part.datasets = [
        replace(dataset, **vars(facts)) for dataset, facts in zip(part.datasets, engine.by_dataset, strict=True)
    ]
    if (scanned := prepared.scanned) is not None:
        part.scan_s = scanned.seconds
        part.forecast = None if scanned.forecast is None else asdict(scanned.forecast)
        part.totals |= {"source_stats": scanned.stats, "source_listings": scanned.listings}
        part.order |= {"trace_used": scanned.trace or None, "trace_unused_why": scanned.trace_why or None}
    part.totals |= _copied(engine)
    part.budget = {
        "size_bytes": limit.size_bytes,
        "inodes": limit.inodes,
        "why": limit.why,
        "used_bytes": engine.queue.budget.used_bytes,
        "used_inodes": engine.queue.budget.used_inodes,
    }
    part.memory_bytes = available_bytes()
    part.errors = list(engine.errors.kinds.values())
    part.hist_open, part.hist_read = engine.pool.stats.histograms()


def problems(engine: Engine, limit: Budget, unserved: Unserved | None, host: str) -> list[Problem]:
    """Returns what went wrong with the staging; `unserved` knows of programs that it did not serve, on one node."""
    problems = []
    refused = engine.queue.states.count(FileState.REFUSED)
    if engine.queue.states.closed is Reason.FAILED:
        text = "the local disk or all copiers failed: nothing more is staged, the program reads the source"
        problems.append(Problem("local-failed", text, ERRORS_ARE_IN.format(host=host)))
    elif engine.queue.is_disk_full:
        text = f"the local disk is full: {_left(engine, refused)} were not staged and are read from the source"
        problems.append(Problem("disk-full", text, DISK_FULL))
    elif engine.unplaced:
        text = f"the budgets of all nodes have no room for {engine.unplaced:,} files: they are read from the source"
        problems.append(Problem("store-full", text, more_room(limit.why)))
    elif refused and engine.queue.states.closed in (Reason.NONE, Reason.FULL):
        text = f"the budget has no room for {_left(engine, refused)}: they are read from the source"
        problems.append(Problem("store-full", text, more_room(limit.why)))
    files = set() if unserved is None else unserved.files
    if unserved is not None and files:
        problems.append(_not_reached(unserved))
    if held := engine.queue.large.held_back - files:
        size = format_size(sum(map(engine.queue.states.size, held)))
        one, them = f"a large file ({size}) was", f"{len(held)} large files ({size}) were"
        what, it = (one, "it") if len(held) == 1 else (them, "them")
        text = f"{what} not copied, as the program read {it} at the source"
        remedy = "--mode upfront copies such files before the program starts, which pays if it reads them again"
        problems.append(Problem("left-to-program", text, remedy))
    failed = engine.queue.states.count(FileState.FAILED)
    if failed:
        text = f"{failed:,} files could not be copied and are read from the source"
        problems.append(Problem("copy-failed", text, ERRORS_ARE_IN.format(host=host)))
    return problems


def _left(engine: Engine, refused: int) -> str:
    left = format_size(engine.manifest.total_bytes - engine.stored_bytes)
    return f"{refused:,} {'file' if refused == 1 else 'files'} (about {left})"


def _not_reached(unserved: Unserved) -> Problem:
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
        "failed": queue.states.count(FileState.FAILED),
        "void": queue.states.count(FileState.VOID),
        "refused": queue.states.count(FileState.REFUSED),
        "copy_busy_s": round(engine.busy.busy_s, 6),
    }
