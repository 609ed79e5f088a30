"""Sampling orders against PyTorch's own samplers."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcstage.plan.order import sampling

SEEDS = st.one_of(st.integers(0, 2**64 - 1), st.integers(0, 5000), st.integers(-(2**63), -1))


@pytest.fixture(scope="module")
def torch() -> Iterator[Any]:
    found = pytest.importorskip("torch")
    threads = found.get_num_threads()
    found.set_num_threads(1)
    yield found
    found.set_num_threads(threads)


def same_words(words: sampling.Words, generator: Any, torch: Any, bits: int = 31) -> bool:
    """Whether both go on alike: the positions in the stream are the same, too."""
    drawn = torch.empty(5, dtype=torch.int32).random_(generator=generator).tolist()
    return [word & ((1 << bits) - 1) for word in words.take(5)] == drawn


@pytest.mark.torch
@settings(deadline=None)
@given(seed=SEEDS, n=st.one_of(st.integers(0, 3), st.integers(0, 4000)))
def test_permutations_and_the_generator_behind_them(torch: Any, seed: int, n: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    words = sampling.Words(seed)
    assert sampling.randperm(n, words).tolist() == torch.randperm(n, generator=generator).tolist()
    assert same_words(words, generator, torch)


@pytest.mark.torch
def test_a_permutation_of_more_than_a_piece(torch: Any) -> None:
    expected = torch.randperm(1_281_167, generator=torch.Generator().manual_seed(7))
    assert sampling.randperm(1_281_167, sampling.Words(7)).tobytes() == expected.int().numpy().tobytes()


def test_the_first_words_are_those_of_the_reference_implementation() -> None:
    assert list(sampling.Words(5489).take(3)) == [3499211612, 581869302, 3890346734]


@pytest.mark.torch
@settings(deadline=None, max_examples=200)
@given(
    n=st.one_of(st.integers(1, 40), st.integers(1, 3000)), replicas=st.integers(1, 70), shuffle=st.booleans(),
    drop_last=st.booleans(), seed=st.integers(0, 2**63), epoch=st.integers(0, 300), data=st.data(),
)  # fmt: skip
def test_distributed(torch: Any, n: int, replicas: int, shuffle: bool, drop_last: bool, seed: int, epoch: int,
                     data: Any) -> None:  # fmt: skip
    rank = data.draw(st.integers(0, replicas - 1))
    options = {"shuffle": shuffle, "seed": seed, "drop_last": drop_last}
    theirs = torch.utils.data.DistributedSampler(range(n), num_replicas=replicas, rank=rank, **options)
    theirs.set_epoch(epoch)
    ours = sampling.Distributed(n, replicas, rank, shuffle, drop_last, seed, epoch)
    assert ours.order().tolist() == list(theirs)
    assert ours.samples == len(theirs)
    assert sampling.parse(ours.text()) == ours


@given(st.integers(0, 200), st.integers(1, 20), st.booleans(), st.integers(0, 9))
def test_all_ranks_read_every_sample(n: int, replicas: int, drop_last: bool, epoch: int) -> None:
    ranks = [sampling.Distributed(n, replicas, rank, drop_last=drop_last, epoch=epoch) for rank in range(replicas)]
    orders = sampling.orders_of(ranks)
    assert orders == [rank.order() for rank in ranks]
    assert len(set(map(len, orders))) == 1
    read = sampling.interleave(orders).tolist()
    whole = ranks[0].permutation().tolist()
    assert read[:n] == whole[: len(read)] if drop_last else read[:n] == whole
    assert len(read) == replicas * ranks[0].samples


def test_orders_of_ranks_and_epochs_together() -> None:
    one = sampling.Distributed(50, 4, 1, seed=3)
    many = [one, one.later(1), sampling.Distributed(50, 4, 2, seed=3, epoch=1), sampling.Distributed(9, 4, 2, False)]
    assert sampling.orders_of(many) == [sampler.order() for sampler in many]
    assert one.later(2).epoch == 2


@pytest.mark.parametrize(
    "text",
    [
        "", "random n=1", "distributed", "distributed n=5 replicas=2 rank=2 shuffle=1 drop_last=0 seed=0 epoch=0",
        "distributed n=5 replicas=2 rank=0 shuffle=1 drop_last=0 seed=0", "distributed n=x",
        "distributed n=5 replicas=0 rank=0 shuffle=1 drop_last=0 seed=0 epoch=0",
        "distributed n=-5 replicas=2 rank=0 shuffle=1 drop_last=0 seed=0 epoch=0",
        "distributed n=5 replicas=2 rank=0 shuffle=1 drop_last=0 seed=0 epoch=-1",
        "distributed n=5 n=5 replicas=2 rank=0 shuffle=1 drop_last=0 seed=0 epoch=0",
        "distributed n=999999999 replicas=2 rank=0 shuffle=1 drop_last=0 seed=0 epoch=0",
        "distributed n=5 replicas=2 rank=0 shuffle=1 drop_last=0 seed=99999999999999999999 epoch=0",
    ],
)  # fmt: skip
def test_formulas_that_are_none(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        sampling.parse(text)


@given(st.text(alphabet="distributed n=replicas=rank=01 \t", max_size=60))
def test_any_text_is_a_formula_or_a_value_error(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        sampling.parse(text)


def test_sequential() -> None:
    assert sampling.sequential(3).tolist() == [0, 1, 2]
    with pytest.raises(ValueError, match="samples"):
        sampling.sequential(-1)


@given(st.lists(st.lists(st.integers(0, 9), max_size=5), max_size=4))
def test_interleaved(orders: Sequence[list[int]]) -> None:
    merged = sampling.interleave([array("I", order) for order in orders]).tolist()
    longest = max(map(len, orders), default=0)
    assert merged == [order[i] for i in range(longest) for order in orders if i < len(order)]
