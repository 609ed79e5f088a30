"""How much is given to copiers beyond what they can ask the source for: it is past being put into another order."""

from __future__ import annotations

import os
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from hpcstage.daemon.copying.engine import Engine, Hooks
from hpcstage.daemon.queue.queue import Queue
from hpcstage.daemon.queue.rates import FIRST_TRANSFERS, AnswerKind, Estimates, Limits
from hpcstage.plan.dataset.datasets import resolve
from hpcstage.plan.dataset.scan import scan
from hpcstage.plan.types import Budget
from hpcstage.store.copier import CopierSettings
from hpcstage.store.pool import CopierPool
from hpcstage.store.storedir import Store

TRANSFERS = 4
PLENTY = Budget(1 << 60, 1 << 40)


@contextmanager
def _made(local_dir: Path, tree: Path, limits: Limits, hooks: Hooks) -> Iterator[Engine]:
    """An engine whose copiers never begin, since they are not told of a manifest."""
    manifest = scan(resolve([os.fspath(tree)], local_dir)).manifest
    pool = CopierPool(CopierSettings(local_dir, local_dir / "manifest.bin", TRANSFERS), 2)
    try:
        yield Engine(manifest, Queue(manifest.sizes, limits), pool, Store(local_dir), hooks)
    finally:
        pool.close()


@pytest.fixture
def engine(local_dir: Path, make_tree: Callable[..., Path]) -> Iterator[Engine]:
    with _made(local_dir, make_tree(files=60), Limits(PLENTY), Hooks()) as engine:
        yield engine


def _seen(estimates: Estimates, files_per_s: int, size_bytes: int = 10_000) -> None:
    for number in range(10 * files_per_s):
        estimates.finished(size_bytes, 0.1, number / files_per_s)


def test_a_fast_source_finds_work_ahead(engine):
    _seen(engine.queue.estimates, 5000)
    engine.pump(30.0)
    assert engine.pool.assigned == 2 * engine.pool.slots


def test_a_slow_source_leaves_the_rest_to_the_order(engine):
    _seen(engine.queue.estimates, 20)
    engine.pump(30.0)
    assert engine.pool.assigned == 2 * TRANSFERS + 2, "one ahead for each copier"
    engine.queue.sequences.push(array("I", [59, 58]))
    assert engine.queue.next(2, 31.0) == [59, 58]


def test_few_go_on_beside_those_that_programs_wait_for(local_dir: Path, make_tree: Callable[..., Path]) -> None:
    requested: set[int] = set()
    limits, hooks = Limits(PLENTY, programs_wait=True), Hooks(is_requested=requested.__contains__)
    with _made(local_dir, make_tree(files=60), limits, hooks) as engine:
        engine.pump(30.0)
        assert engine.pool.assigned == FIRST_TRANSFERS
        requested.update((0, 50, 51))
        for id_ in requested:
            assert engine.queue.request(id_, 30.0).kind is AnswerKind.WAIT
        engine.pump(30.0)
        assert {50, 51} < set(engine.pool.ids)
        assert engine.pool.assigned == FIRST_TRANSFERS + len(requested), (
            "one more, as a program waits for one of the first"
        )
        requested.clear()
        engine.pump(30.0)
        assert engine.pool.assigned == FIRST_TRANSFERS + 3


def test_copies_that_stand_aside_leave_small_files_their_turn(local_dir: Path, make_tree: Callable[..., Path]) -> None:
    tree = make_tree(files=60)
    for number in range(FIRST_TRANSFERS):
        with (tree / f"large{number}").open("wb") as file:
            file.truncate(20 << 20)
    with _made(local_dir, tree, Limits(PLENTY, programs_wait=True), Hooks()) as engine:
        queue = engine.queue
        queue.estimates.all_bytes_per_s = 1e6
        large = [id_ for id_ in range(len(engine.manifest)) if queue.large.is_large(id_)]
        for now, id_ in enumerate(large, 30):
            for one in large:
                queue.large.reads.here(one, now)
            engine.arriving.ask(id_, engine.manifest.inodes[id_], engine.manifest.size(id_))
            engine.arriving.set_faults(id_, engine.manifest.size(id_))
            queue.large.look(engine.arriving.reads, now)
            queue.large.aside = id_
            engine.pump(now)
        engine.pump(now)
        assert {*large} < set(engine.pool.ids)
        assert engine.pool.assigned == len(large) + FIRST_TRANSFERS


def test_ahead_is_what_a_moment_brings():
    estimates = Estimates()
    assert estimates.ahead(100_000, 1, 1000) == 25, "a guess of 50 MB/s, before anything was seen"
    _seen(estimates, 1000)
    for mean_bytes in (0.0, 100.0, 1e9):
        assert 45 <= estimates.ahead(mean_bytes, 1, 1000) <= 55, "a twentieth of a second, large files later or not"
    assert estimates.ahead(100_000, 1, 20) == 20
    assert estimates.ahead(100_000, 60, 1000) == 60
