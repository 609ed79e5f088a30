"""The rest of an epoch, divided anew among other ranks: every sample counts once."""

from __future__ import annotations

from collections import Counter

import pytest

pytest.importorskip("torch")

from hypothesis import given
from hypothesis import strategies as st

from hpcstage.torch import ElasticSampler

pytestmark = pytest.mark.torch


@given(st.integers(1, 60), st.integers(1, 5), st.lists(st.tuples(st.integers(1, 6), st.integers(1, 4)), max_size=6))
def test_each_sample_counts_once_whoever_comes_and_goes(
    samples: int, batch: int, memberships: list[tuple[int, int]]
) -> None:
    """Each membership is a number of ranks and of steps after which it changes."""
    counted: Counter[int] = Counter()
    position = 0
    for world, steps in [*memberships, (2, samples)]:
        ranks = [ElasticSampler(range(samples), batch, seed=5) for _ in range(world)]
        for rank, sampler in enumerate(ranks):
            sampler.begin(epoch=3, position=position, rank=rank, world=world)
        given = [iter(sampler) for sampler in ranks]
        for _ in range(steps):
            size = ranks[0].step_size(position)
            if not size:
                break
            shares = [sampler.share(position) for sampler in ranks]
            assert [next(each) for each in given] == [list(share.ids) for share in shares], "what is given is the share"
            assert all(share.ids for share in shares), "no rank is left without a batch"
            assert {share.whole for share in shares} == {shares[0].whole}
            for share in shares:
                counted.update(share.ids[: share.counted])
            position += size
    assert counted == Counter(range(samples))


def test_the_order_is_that_of_pytorch_s_sampler() -> None:
    from torch.utils.data import DistributedSampler

    theirs = [DistributedSampler(range(12), 2, rank, seed=7) for rank in range(2)]
    ours = [ElasticSampler(range(12), 3, seed=7) for _ in range(2)]
    for rank, (one, other) in enumerate(zip(theirs, ours, strict=True)):
        one.set_epoch(4)
        other.begin(epoch=4, position=0, rank=rank, world=2)
        assert [*one] == [index for batch in other for index in batch]
        assert len(other) == 2


def test_drop_last() -> None:
    sampler = ElasticSampler(range(10), 4, shuffle=False, drop_last=True)
    assert len(sampler) == 2
    assert [*sampler] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    with pytest.raises(ValueError, match="batch_size is 0"):
        ElasticSampler(range(10), 0)
