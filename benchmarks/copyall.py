"""The engine without a daemon: copies files of a manifest and returns when all have come to their end."""

from __future__ import annotations

import select
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hpcstage.daemon.copying.engine import Engine
from hpcstage.daemon.queue.queue import Queue
from hpcstage.daemon.queue.rates import Limits
from hpcstage.daemon.queue.states import FileState
from hpcstage.plan.budget import BudgetFacts
from hpcstage.plan.dataset.manifest import Manifest
from hpcstage.plan.types import Budget
from hpcstage.record.parts.part import ErrorPart
from hpcstage.store.copier import CopierSettings
from hpcstage.store.counters import Totals
from hpcstage.store.pool import CopierPool
from hpcstage.store.storedir import Store, budget


@dataclass(frozen=True)
class EngineResult:
    """What `copy_all` did."""

    files: int
    size_bytes: int
    failed: int
    refused: int
    seconds: float
    """From the first assignment to the last result; forking the copiers is not in it."""
    totals: Totals
    errors: list[ErrorPart]


def copy_all(
    manifest: Manifest,
    ids: Sequence[int] | None,
    node_dir: Path,
    *,
    copiers: int = 1,
    transfers: int = 32,
    max_rate_bytes_per_s: float | None = None,
    limit: Budget | None = None,
    native: bool = True,
) -> EngineResult:
    """Copies files into `node_dir/store` in the order of `ids` (None: all), without a daemon, until all ended."""
    store = Store(node_dir)
    store.make()
    manifest.save(node_dir / "manifest.bin")
    settings = CopierSettings(node_dir, node_dir / "manifest.bin", transfers, max_rate_bytes_per_s, native)
    pool = CopierPool(settings, copiers)
    try:
        limit = limit or budget(node_dir, BudgetFacts())
        queue = Queue(manifest.sizes, Limits(limit, max_rate_bytes_per_s=max_rate_bytes_per_s), ids or ())
        if ids is not None:
            _leave_out(queue, len(manifest), ids)
        pool.open_manifest()
        engine = Engine(manifest, queue, pool, store)
        return run_to_end(engine)
    finally:
        pool.close()


def _leave_out(queue: Queue, files: int, ids: Sequence[int]) -> None:
    wanted = set(ids)
    queue.void(id_ for id_ in range(files) if id_ not in wanted)


def run_to_end(engine: Engine) -> EngineResult:
    """Until nothing is in flight and nothing waits."""
    started = time.monotonic()
    queue = engine.queue
    engine.pump(started)
    while not queue.settled:
        wait_s = queue.wake_after(time.monotonic())
        readable, _, _ = select.select(engine.pool.fds(), [], [], 1.0 if wait_s is None else min(wait_s, 1.0))
        now = time.monotonic()
        for fd in readable:
            engine.receive(fd, now)
        engine.pump(now)
    return EngineResult(
        files=engine.copies.files,
        size_bytes=engine.copies.size_bytes,
        failed=queue.states.count(FileState.FAILED),
        refused=queue.states.count(FileState.REFUSED),
        seconds=time.monotonic() - started,
        totals=engine.pool.stats.totals(),
        errors=list(engine.failures.kinds.values()),
    )
