"""Says what was staged on this node, and what went wrong with it, in the node's part of the record."""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import replace
from typing import TYPE_CHECKING

from hpcstage.daemon.copying.engine import Engine
from hpcstage.daemon.queue.states import FileState
from hpcstage.daemon.queue.useful import Unserved
from hpcstage.daemon.resources import Resources
from hpcstage.daemon.service import Service
from hpcstage.plan.budget import more_space
from hpcstage.plan.types import Budget
from hpcstage.problem import Problem
from hpcstage.protocol.shim import Reason
from hpcstage.units import format_number, format_size

if TYPE_CHECKING:
    from hpcstage.record.parts.part import NodePart, NodeTotals

ERRORS_ARE_IN = "the first errors are in nodes/{host}.json in the run directory, under errors"
DISK_FULL = "free space there, or name a larger disk with --local-dir; a larger --budget does not help"


class Findings(Service):
    """Owns what is known of the staging beside its parts' own counts. Its budget is `limit`; `unserved` knows of
    programs that it did not serve."""

    def __init__(self, base: Resources, engine: Engine, limit: Budget, unserved: Unserved) -> None:
        self._base = base
        self._engine = engine
        self._limit = limit
        self._unserved = unserved
        self._staged_at: float | None = None
        """The time at which all was staged that comes without a request."""

    def staged(self) -> None:
        """Notes that nothing is left to be staged; nothing is complete where files were left out."""
        states = self._engine.queue.states
        if not states.closed and not states.count(FileState.REFUSED):
            self._staged_at = self._staged_at or self._engine.copies.last_stored or time.monotonic()

    def record(self, part: NodePart) -> NodePart:
        """Says what was found and copied on this node, and what went wrong."""
        engine = self._engine
        hist_open, hist_read = engine.pool.stats.histograms()
        return replace(
            part,
            datasets=[
                replace(one, **vars(facts)) for one, facts in zip(part.datasets, engine.copies.by_dataset, strict=True)
            ],
            staged_s=None if self._staged_at is None else round(self._staged_at - self._base.started, 6),
            totals=_copied(part.totals, engine),
            budget_bytes=self._limit.size_bytes,
            used_bytes=engine.queue.budget.used_bytes,
            errors=tuple(engine.failures.kinds.values()),
            hist_open=hist_open,
            hist_read=hist_read,
            problems=[*part.problems, *self._problems(part.host)],
        )

    def _problems(self, host: str) -> list[Problem]:
        found = problems(self._engine, self._limit, self._unserved, host)
        # Where the store was closed, its own problem tells why nothing more was staged.
        return [one for one in found if one.id != "local-failed"] if self._base.page.is_closed else found


def _copied(totals: NodeTotals, engine: Engine) -> NodeTotals:
    copied = engine.pool.stats.totals()
    return replace(
        totals,
        copied_bytes=copied.bytes,
        copied_files=copied.files,
        copy_opens=copied.opens,
        void=engine.queue.states.count(FileState.VOID),
        refused=engine.queue.states.count(FileState.REFUSED),
        copy_busy_s=round(engine.busy.busy_s, 6),
    )


def problems(engine: Engine, limit: Budget, unserved: Unserved, host: str) -> list[Problem]:
    """Returns what went wrong with the staging; `unserved` knows of programs that it did not serve."""
    problems = []
    refused = engine.queue.states.count(FileState.REFUSED)
    if engine.queue.states.closed is Reason.FAILED:
        text = "the local disk or all copiers failed: nothing more is staged, the program reads the source"
        problems.append(Problem("local-failed", text, ERRORS_ARE_IN.format(host=host)))
    elif engine.queue.is_disk_full:
        text = f"the local disk is full: it has no room for {_left(engine, refused)}: the program reads the source"
        problems.append(Problem("disk-full", text, DISK_FULL))
    elif unplaced := _unplaced(engine):
        text = f"{format_number(unplaced, 'file')} found no room on any node: the program reads the source"
        problems.append(Problem("store-full", text, more_space(limit.why)))
    elif refused and engine.queue.states.closed in (Reason.NONE, Reason.FULL):
        text = f"the budget has no room for {_left(engine, refused)}: the program reads the source"
        problems.append(Problem("store-full", text, more_space(limit.why)))
    files = unserved.files
    if files:
        problems.append(_not_reached(unserved))
    left = engine.queue.large.uncopied - files
    here = set(filter(engine.queue.large.reads.was_here, left))
    if here:
        problems.append(_deferred(engine, here, "deferred-to-program", "a program"))
    if left - here:
        problems.append(_deferred(engine, left - here, "deferred-to-others", "a program of another node"))
    if (kinds := engine.failures.kinds) and not engine.queue.is_disk_full:
        count, first = sum(one.count for one in kinds.values()), next(iter(kinds.values()))
        text = f"{format_number(count, 'file')} could not be copied: {first.error}: {first.path}"
        problems.append(Problem("copy-failed", text, ERRORS_ARE_IN.format(host=host)))
    return problems


def _deferred(engine: Engine, ids: Collection[int], name: str, who: str) -> Problem:
    """Returns the problem of this name: what was left to whom."""
    size = format_size(sum(map(engine.queue.states.size, ids)))
    one, them = f"a large file ({size}) was", f"{len(ids)} large files ({size}) were"
    what, it = (one, "it") if len(ids) == 1 else (them, "them")
    remedy = "--mode upfront copies such files before the program starts, which pays if Python reads them again"
    return Problem(name, f"{what} not copied, as {who} read {it} at the source", remedy)


def _unplaced(engine: Engine) -> int:
    """Returns how many files no node keeps where each keeps only a share; 0 where this node keeps all."""
    return engine.queue.states.unplaced if engine.queue.budget.temporary.limit.size_bytes else 0


def _left(engine: Engine, refused: int) -> str:
    left = format_size(engine.manifest.total_bytes - engine.copies.size_bytes)
    return f"{format_number(refused, 'file')} (about {left})"


def _not_reached(unserved: Unserved) -> Problem:
    count = len(unserved.files)
    files = f"{count:,} {'file' if count == 1 else 'files'}"
    text = (
        f"copying paused for {unserved.paused_s(time.monotonic()):.0f} s in all, as programs that hpcstage does not "
        f"reach opened {files} or more at the source, and no other program used the datasets"
    )
    remedy = "programs that are not Python, and python -I, -E or -S, gain nothing: run them without hpcstage"
    return Problem("not-reached", text, remedy)
