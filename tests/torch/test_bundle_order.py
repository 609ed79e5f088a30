"""Bundles: each sample as often as PyTorch reads it, in the order that the page cache likes."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from typing import Any

import pytest
from conftest import REPO
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("torch")
from hpcstage.torch.samplers.bundles import Bundles

RATIOS = st.one_of(st.sampled_from([1.0, 0.5, 0.3, 0.1, 0.05, 0.01, 1e-6]), st.floats(1e-3, 1.0))
SHAPES = st.builds(
    Bundles,
    samples=st.integers(0, 400),
    ratio=RATIOS,
    seed=st.integers(-(1 << 63), (1 << 63) - 1),
    replicas=st.integers(1, 17),
    drop_last=st.booleans(),
)
EPOCHS = st.integers(0, 6)
bounded = settings(deadline=None, max_examples=150)


def members(bundles: Bundles) -> list[set[int]]:
    """Which samples are a bundle, read off a forward epoch of one that leaves nothing out and reads nothing twice."""
    order, found, first = bundles.order(0)[: bundles.samples].tolist(), [], 0
    for size in bundles.sizes().tolist():
        found.append(set(order[first : first + size]))
        first += size
    return found


@bounded
@given(bundles=SHAPES, epoch=EPOCHS)
def test_bundles_are_equal_and_hold_all(bundles: Bundles, epoch: int) -> None:
    sizes = bundles.sizes().tolist()
    assert sum(sizes) == bundles.samples
    assert len(sizes) == bundles.count
    assert all(size % bundles.replicas == 0 for size in sizes[:-1])
    assert max(sizes) - min(sizes) < 2 * bundles.replicas
    assert max(sizes) <= bundles.ratio * bundles.samples + 2 * bundles.replicas


@bounded
@given(bundles=SHAPES, epoch=EPOCHS)
def test_every_rank_has_its_part_of_every_bundle(bundles: Bundles, epoch: int) -> None:
    bundle_by_sample = {sample: at for at, found in enumerate(members(_whole(bundles))) for sample in found}
    parts = [bundles.part(epoch, rank).tolist() for rank in range(bundles.replicas)]
    assert {len(part) for part in parts} == {bundles.per_rank}
    rows = bundles.samples // bundles.replicas
    seen = [[bundle_by_sample[sample] for sample in part[:rows]] for part in parts]
    assert all(found == seen[0] for found in seen), "all ranks are in the same bundle at each step"
    assert seen[0] == sorted(seen[0], reverse=bundles.backward(epoch)), "one bundle after the other"


def _whole(bundles: Bundles) -> Bundles:
    return Bundles(bundles.samples, bundles.ratio, bundles.seed, bundles.replicas)


@bounded
@given(bundles=SHAPES, epoch=EPOCHS)
def test_left_out_or_read_twice_is_only_what_does_not_divide(bundles: Bundles, epoch: int) -> None:
    counts = Counter(bundles.order(epoch).tolist())
    assert set(counts) <= set(range(bundles.samples))
    over = bundles.samples % bundles.replicas
    if bundles.drop_last:
        assert set(counts.values()) <= {1}
        assert len(counts) == bundles.samples - over
    else:
        assert len(counts) == bundles.samples
        assert counts.total() - len(counts) == (bundles.replicas - over if over else 0)
        assert max(counts.values(), default=0) - min(counts.values(), default=0) <= 1


@bounded
@given(bundles=SHAPES, epoch=EPOCHS)
def test_an_epoch_begins_with_what_the_last_ended_with(bundles: Bundles, epoch: int) -> None:
    if bundles.samples % bundles.replicas:
        return
    size = int(bundles.sizes()[-1 if epoch % 2 == 0 else 0])
    last, first = bundles.order(epoch)[-size:].tolist(), bundles.order(epoch + 1)[:size].tolist()
    assert set(last) == set(first)


def test_what_is_dropped_changes() -> None:
    bundles = Bundles(1007, replicas=8, drop_last=True)
    left_out = [frozenset(range(1007)) - set(bundles.order(epoch).tolist()) for epoch in range(20)]
    assert len(set(left_out)) == 20
    assert {len(dropped) for dropped in left_out} == {7}


def test_orders_differ_by_epoch_and_seed_and_can_be_had_again() -> None:
    orders = {
        tuple(Bundles(200, seed=seed).order(epoch).tolist()) for seed in (0, 1, -1, 1 << 40) for epoch in range(5)
    }
    assert len(orders) == 20
    assert Bundles(200, seed=3).order(7).tolist() == Bundles(200, seed=3).order(7).tolist()


def test_the_order_is_frozen() -> None:
    """A state that was saved with an earlier release goes on in the same order."""
    assert Bundles(12, 0.25, seed=5).order(0).tolist() == [5, 3, 9, 11, 8, 1, 2, 7, 4, 0, 10, 6]
    assert Bundles(12, 0.25, seed=5).order(1).tolist() == [6, 10, 0, 4, 2, 7, 11, 8, 1, 5, 9, 3]


def test_shuffled_inside_of_a_bundle() -> None:
    """Every order of a bundle is as likely as another: three samples, six orders, chi square at 0.1 %."""
    bundles = Bundles(9, 1 / 3)
    counts = Counter(tuple(bundles.order(epoch)[3:6].tolist()) for epoch in range(3000))
    assert len(counts) == 6
    assert sum((count - 500) ** 2 / 500 for count in counts.values()) < 20.5


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"ratio": 0.0}, "bundle_ratio 0.0"),
        ({"ratio": 1.1}, "bundle_ratio 1.1"),
        ({"ratio": float("nan")}, "bundle_ratio nan"),
        ({"samples": -1}, "-1 samples"),
        ({"replicas": 0}, "num_replicas 0"),
    ],
)
def test_values_out_of_range_are_named(values: dict[str, float], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        Bundles(**{"samples": 10, **values})


def test_an_epoch_takes_no_step_of_python_for_each_sample() -> None:
    bundles, steps = Bundles(100_000, replicas=4), 0

    def step(*_: object) -> Any:
        nonlocal steps
        steps += 1
        return step

    before = sys.gettrace()
    sys.settrace(step)
    try:
        bundles.part(0, 0)
    finally:
        sys.settrace(before)
    assert 0 < steps < 2000


def test_a_missing_torch_is_named() -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "import hpcstage.torch\n"
        "assert 'BundleRandomSampler' in dir(hpcstage.torch)\n"
        "from hpcstage.torch import BundleRandomSampler"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False, cwd=REPO, timeout=300, capture_output=True)
    assert done.returncode == 1
    last = done.stderr.decode().strip().splitlines()[-1]
    assert last.startswith("ImportError: hpcstage.torch.BundleRandomSampler needs PyTorch")
    assert "pip install torch numpy" in last


def test_unknown_names_are_unknown() -> None:
    import hpcstage.torch

    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        hpcstage.torch.Nothing  # noqa: B018
