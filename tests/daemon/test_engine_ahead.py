"""How much is given to copiers beyond what they can ask the source for: it is past being put into another order."""

from __future__ import annotations

import os
from array import array

import pytest

from hpcstage.daemon.copying.engine import Engine
from hpcstage.daemon.queue.queue import Queue
from hpcstage.daemon.queue.rates import Estimates, Limits
from hpcstage.plan.dataset.datasets import resolve
from hpcstage.plan.dataset.scan import scan
from hpcstage.plan.types import Budget
from hpcstage.store.copier import CopierSettings
from hpcstage.store.directory import Store
from hpcstage.store.pool import CopierPool

TRANSFERS = 4
PLENTY = Budget(1 << 60, 1 << 40)


@pytest.fixture
def engine(local_dir, make_tree):
    manifest = scan(resolve([os.fspath(make_tree(files=60))], local_dir)).manifest
    pool = CopierPool(CopierSettings(local_dir, local_dir / "manifest.bin", TRANSFERS), 2)
    try:
        yield Engine(manifest, Queue(manifest.sizes, Limits(PLENTY)), pool, Store(local_dir))
    finally:
        pool.close()


def _pumped(engine: Engine) -> None:
    """The first files go one at a time for a moment, so that it is known what one reader alone gets."""
    engine.pump(29.0)
    assert engine.pool.assigned == 1
    engine.pump(30.0)


def _seen(estimates: Estimates, files_per_s: int, size_bytes: int = 10_000) -> None:
    for number in range(10 * files_per_s):
        estimates.finished(size_bytes, 0.1, number / files_per_s)


def test_a_fast_source_finds_work_ahead(engine):
    _seen(engine.queue.source.estimates, 5000)
    _pumped(engine)
    assert engine.pool.assigned == 2 * engine.pool.slots


def test_a_slow_source_leaves_the_rest_to_the_order(engine):
    _seen(engine.queue.source.estimates, 20)
    _pumped(engine)
    assert engine.pool.assigned == 2 * TRANSFERS + 2, "one ahead for each copier"
    engine.queue.sequences.push(array("I", [59, 58]))
    assert engine.queue.source.next(2, 31.0) == [59, 58]


def test_ahead_is_what_a_moment_brings():
    estimates = Estimates()
    assert estimates.ahead(100_000, 1, 1000) == 25, "a guess of 50 MB/s, before anything was seen"
    _seen(estimates, 1000)
    for mean_bytes in (0.0, 100.0, 1e9):
        assert 45 <= estimates.ahead(mean_bytes, 1, 1000) <= 55, "a twentieth of a second, large files later or not"
    assert estimates.ahead(100_000, 1, 20) == 20
    assert estimates.ahead(100_000, 60, 1000) == 60
