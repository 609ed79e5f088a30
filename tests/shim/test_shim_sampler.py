"""Running a sampler ahead: the same indices as the program then gets, nothing changed, and only where it is known."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
from conftest import shim_modules
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
numpy = pytest.importorskip("numpy")
with shim_modules():
    import _hpcstage_sampler as samplers
from torch.utils import data  # noqa: E402

from hpcstage.torch.samplers import bundles as bundle  # noqa: E402

pytestmark = pytest.mark.torch
N = 23


def states(generator: Any) -> Any:
    """Every random state, to be compared."""
    return (torch.get_rng_state().tolist(), generator.get_state().tolist(), random.getstate(),
            numpy.random.get_state()[1].tolist())  # fmt: skip


def inner(kind: str, generator: Any) -> Any:
    """A sampler of a kind."""
    made = {
        "sequential": lambda: data.SequentialSampler(range(N)),
        "random": lambda: data.RandomSampler(range(N), generator=generator),
        "replacement": lambda: data.RandomSampler(range(N), replacement=True, num_samples=70, generator=generator),
        "subset": lambda: data.SubsetRandomSampler(numpy.arange(3, 12), generator=generator),
        "weighted": lambda: data.WeightedRandomSampler(torch.rand(N), 40, generator=generator),
        "distributed": lambda: data.DistributedSampler(range(N), 3, 2, seed=4),
        "list": lambda: [5, numpy.int64(4), torch.tensor(3)],
    }
    return made[kind]()


KINDS = ["sequential", "random", "replacement", "subset", "weighted", "distributed", "list"]


@given(st.sampled_from(KINDS), st.booleans(), st.integers(0, 9), st.booleans(), st.integers(0, 2**40))
def test_ahead(kind: str, own: bool, batch: int, drop_last: bool, seed: int) -> None:
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed + 1)
    sampler = inner(kind, generator if own else None)
    whole = data.BatchSampler(sampler, batch, drop_last) if batch else sampler
    before = states(generator)
    ahead = samplers.peek(whole)
    assert states(generator) == before
    now = list(whole)
    assert ahead is not None
    assert ahead.tolist() == [int(i) for some in now for i in (some if batch else [some])]


class Interrupting(data.RandomSampler):
    """Raises in the middle."""

    @property
    def num_samples(self) -> int:
        if getattr(self, "armed", False):
            self.armed = "used"
            torch.rand(3)
            random.random()
            raise KeyboardInterrupt
        return N


def test_put_back_whatever_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(samplers, "_is_known", lambda part: True)
    monkeypatch.setattr(samplers, "_too_long", lambda found: False)
    sampler = Interrupting(range(N))
    sampler.armed = True
    before = states(torch.default_generator)
    with pytest.raises(KeyboardInterrupt):
        samplers.peek(sampler)
    assert states(torch.default_generator) == before
    assert sampler.armed is True


class OwnIter(data.RandomSampler):
    def __iter__(self) -> Iterator[int]:
        raise AssertionError("called")


class OwnLength(data.RandomSampler):
    @property
    def num_samples(self) -> int:
        return N


class OwnEpoch(data.DistributedSampler[Any]):
    def set_epoch(self, epoch: int) -> None:
        super().set_epoch(epoch)


class OwnList(list[int]):
    def __getitem__(self, index: Any) -> Any:
        raise AssertionError("called")


def one_by_one() -> Iterator[int]:
    yield from range(N)


@pytest.mark.parametrize(
    "sampler",
    [OwnIter(range(N)), OwnLength(range(N)), data.SubsetRandomSampler(OwnList(range(N))), one_by_one(), iter([1, 2]),
     data.BatchSampler(OwnIter(range(N)), 3, False), {1, 2}, {1: 2}, "text", object(), None],
    ids=lambda sampler: type(sampler).__name__,
)  # fmt: skip
def test_not_known(sampler: Any) -> None:
    assert samplers.parts(sampler) is None
    assert samplers.peek(sampler) is None


def test_a_subclass_that_changes_nothing_is_known() -> None:
    sampler = OwnEpoch(range(N), 2, 1)
    sampler.set_epoch(7)
    assert list(samplers.peek(sampler) or ()) == list(sampler)


def test_too_long() -> None:
    assert samplers.peek(range(samplers.LIMIT + 1)) is None
    assert samplers.peek(data.RandomSampler(range(N), replacement=True, num_samples=10**15)) is None
    assert samplers.peek(data.BatchSampler(data.SequentialSampler(range(10**12)), 8, False)) is None


def test_another_default_device() -> None:
    with torch.device("meta"):
        assert samplers.peek(data.RandomSampler(range(N))) is None


def test_weights_on_another_device() -> None:
    """They are drawn by the generator of their device, which is not saved."""
    sampler = data.WeightedRandomSampler(torch.ones(N, device="meta"), 5)
    assert samplers.parts(data.BatchSampler(sampler, 3, False)) is None
    assert samplers.peek(sampler) is None


def test_bundles_ahead() -> None:
    sampler = bundle.BundleRandomSampler(range(N), bundle_ratio=0.3, seed=4)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        ahead = list(samplers.peek(data.BatchSampler(sampler, 4, False)) or ())
        assert sampler.state_dict()["position"] == 0
        assert ahead == list(sampler)
        assert (sampler.epoch, sampler.state_dict()["position"]) == (epoch + 1, 0)
    begun = iter(sampler)
    for _ in range(6):
        next(begun)
    resumed = bundle.BundleRandomSampler(range(N), bundle_ratio=0.3, seed=4)
    resumed.load_state_dict(sampler.state_dict())
    assert list(samplers.peek(resumed) or ()) == list(resumed) == list(begun)


@pytest.mark.parametrize("indices", [[-1], [2**32], ["a"], [(1, 2)], [1.5]])
def test_what_is_no_index_raises(indices: list[Any]) -> None:
    with pytest.raises((TypeError, OverflowError)):
        samplers.peek(data.BatchSampler(indices, 1, False))


def test_another_bit_generator_of_numpy() -> None:
    true = numpy.random.get_bit_generator()
    numpy.random.set_bit_generator(numpy.random.PCG64(3))
    try:
        assert list(samplers.peek([1, 2]) or ()) == [1, 2]
    finally:
        numpy.random.set_bit_generator(true)
