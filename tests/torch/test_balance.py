"""Algorithm 1 and the division of a global batch: nothing is lost, and little is moved."""

from __future__ import annotations

import doctest

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("torch")

from hpcstage.torch.samplers import balance as balancing
from hpcstage.torch.samplers.balance import NOBODY, balance, divide

pytestmark = pytest.mark.torch
quick = settings(deadline=None, max_examples=150)


@st.composite
def imbalances(draw: st.DrawFn, most: int = 40, largest: int = 60) -> list[int]:
    """Some that add up to nothing."""
    values = draw(st.lists(st.integers(-largest, largest), max_size=most))
    return [*values, -sum(values)]


def fewest_moves(values: list[int]) -> int:
    """The optimum: those that are not even, less the number of groups that are even among themselves."""
    values = [value for value in values if value]
    most = [0] * (1 << len(values))
    sums = [0] * (1 << len(values))
    for mask in range(1, 1 << len(values)):
        low = mask & -mask
        sums[mask] = sums[mask ^ low] + values[low.bit_length() - 1]
        without = max(most[mask ^ (1 << at)] for at in range(len(values)) if mask >> at & 1)
        most[mask] = without + (sums[mask] == 0)
    return len(values) - most[-1]


def test_the_optimum_of_small_cases_is_known() -> None:
    assert fewest_moves([]) == 0
    assert fewest_moves([3, -3]) == 1
    assert fewest_moves([5, -3, -2]) == 2
    assert fewest_moves([5, 4, -5, -4]) == 2
    assert fewest_moves([5, 4, -6, -3]) == 3


@quick
@given(imbalances())
def test_balance_evens_out(values: list[int]) -> None:
    left = list(values)
    for move in balance(values):
        assert move.samples > 0
        assert left[move.source] >= move.samples
        assert left[move.target] <= -move.samples
        left[move.source] -= move.samples
        left[move.target] += move.samples
    assert not any(left)


@quick
@given(imbalances(most=7, largest=9))
def test_balance_needs_less_than_twice_the_fewest_moves(values: list[int]) -> None:
    found, best = len(balance(values)), fewest_moves(values)
    assert best <= found <= max(0, 2 * best - 1)
    assert found <= max(0, sum(map(bool, values)) - 1)


@quick
@given(st.lists(st.integers(-9, 9), max_size=12))
def test_balance_of_what_does_not_add_up_ends_with_one_side(values: list[int]) -> None:
    surplus, deficit = sum(v for v in values if v > 0), -sum(v for v in values if v < 0)
    assert sum(move.samples for move in balance(values)) == min(surplus, deficit)


def test_every_pair_of_the_largest_is_evened_out_first() -> None:
    assert balance([1, 5, -4, -2]) == [(1, 2, 4), (0, 3, 1), (1, 3, 1)]


@st.composite
def steps(draw: st.DrawFn) -> tuple[list[int], list[int], list[int]]:
    """A batch, who has its samples (some nobody), and how many ranks the nodes have."""
    ranks = draw(st.lists(st.integers(1, 3), min_size=1, max_size=5))
    samples = draw(st.integers(1, 40))
    size = sum(ranks) * draw(st.integers(1, 6))
    batch = draw(st.lists(st.integers(0, samples - 1), min_size=size, max_size=size))
    owners = draw(st.lists(st.integers(NOBODY, len(ranks) - 1), min_size=samples, max_size=samples))
    return batch, owners, ranks


@quick
@given(steps())
def test_a_step_is_divided_without_loss(step: tuple[list[int], list[int], list[int]]) -> None:
    batch, owners, ranks = step
    parts = divide(batch, owners, ranks)
    assert [len(part) for part in parts] == ranks
    found = [sample for node in parts for part in node for sample in part]
    assert sorted(found) == sorted(batch)
    sizes = [len(part) for node in parts for part in node]
    assert len(set(sizes)) == 1


@quick
@given(steps())
def test_no_more_is_moved_than_must_be(step: tuple[list[int], list[int], list[int]]) -> None:
    batch, owners, ranks = step
    quota = len(batch) // sum(ranks)
    surplus = sum(
        max(0, sum(owners[sample] == node for sample in batch) - quota * count) for node, count in enumerate(ranks)
    )
    parts = divide(batch, owners, ranks)
    away = sum(
        owners[sample] not in (node, NOBODY) for node, own in enumerate(parts) for part in own for sample in part
    )
    assert away == surplus


def test_the_examples_run() -> None:
    result = doctest.testmod(balancing)
    assert result.attempted
    assert not result.failed
