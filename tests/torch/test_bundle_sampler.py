"""`BundleRandomSampler` as programs use it: against PyTorch's samplers, in loaders, stopped and resumed anywhere."""

from __future__ import annotations

import doctest
import itertools
import json
import os
import pickle
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from conftest import GLOO, REPO
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
from torch.utils.data import DataLoader, DistributedSampler  # noqa: E402

from hpcstage.torch import BundleRandomSampler  # noqa: E402
from hpcstage.torch.samplers import bundles  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore:This process .* is multi-threaded")]
bounded = settings(deadline=None, max_examples=100)
of_torchdata = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
RATIOS = st.sampled_from([1.0, 0.5, 0.3, 0.1, 0.05, 0.01])


def test_examples_in_docstrings() -> None:
    assert doctest.testmod(bundles).failed == 0
    assert doctest.testmod(bundles).attempted > 5


# ---- which samples


@bounded
@given(
    samples=st.integers(1, 200),
    world=st.integers(1, 12),
    drop_last=st.booleans(),
    ratio=RATIOS,
    epoch=st.integers(0, 5),
)
def test_each_sample_as_often_as_with_pytorchs_sampler(
    samples: int, world: int, drop_last: bool, ratio: float, epoch: int
) -> None:
    dataset = range(samples)
    theirs, ours = Counter[int](), Counter[int]()
    for rank in range(world):
        distributed = DistributedSampler(dataset, world, rank, drop_last=drop_last)
        bundled = BundleRandomSampler(dataset, ratio, num_replicas=world, rank=rank, drop_last=drop_last)
        for sampler in (distributed, bundled):
            sampler.set_epoch(epoch)
        assert len(bundled) == len(distributed)
        part = list(bundled)
        assert len(part) == len(distributed)
        ours.update(part)
        theirs.update(distributed)
    assert Counter(ours.values()) == Counter(theirs.values())
    assert set(ours) <= set(dataset)


def test_nothing_of_an_empty_dataset() -> None:
    assert list(BundleRandomSampler([])) == []
    assert list(BundleRandomSampler([], num_replicas=3, rank=2)) == []


# ---- epochs


def test_without_set_epoch_each_iteration_is_the_next_epoch() -> None:
    counted, told = (BundleRandomSampler(range(100), seed=4) for _ in range(2))
    for epoch in range(4):
        told.set_epoch(epoch)
        assert list(counted) == list(told)
    told.set_epoch(1)
    first, second = list(told), list(told)
    told.set_epoch(2)
    assert first != second == list(told)


def test_an_iterator_that_is_not_read_is_no_epoch() -> None:
    sampler, other = BundleRandomSampler(range(50)), BundleRandomSampler(range(50))
    iter(sampler)
    iter(sampler)
    assert sampler.epoch == 0
    assert list(sampler) == list(other)


def test_an_iteration_that_is_left_is_one() -> None:
    sampler, other = BundleRandomSampler(range(50)), BundleRandomSampler(range(50))
    next(iter(sampler))
    assert sampler.epoch == 0
    other.set_epoch(1)
    assert list(sampler) == list(other)


# ---- resuming


@bounded
@given(
    samples=st.integers(1, 120),
    world=st.integers(1, 5),
    stop=st.integers(0, 400),
    ratio=RATIOS,
    data=st.data(),
)
def test_resumed_anywhere_it_goes_on_exactly(samples: int, world: int, stop: int, ratio: float, data: Any) -> None:
    rank, saving = data.draw(st.integers(0, world - 1)), data.draw(st.integers(0, world - 1))

    def sampler(of: int) -> BundleRandomSampler:
        return BundleRandomSampler(range(samples), ratio, seed=9, num_replicas=world, rank=of)

    whole = sampler(rank)
    reads = list(itertools.chain.from_iterable(list(whole) for _ in range(stop // len(whole) + 3)))
    stopped = sampler(saving)
    endless = itertools.chain.from_iterable(iter(stopped) for _ in itertools.count())
    for _ in range(stop):
        next(endless)
    state = json.loads(json.dumps(stopped.state_dict()))
    resumed = sampler(rank)
    resumed.load_state_dict(state)
    rest = [*resumed, *resumed]
    assert rest == reads[stop : stop + len(rest)]
    assert len(rest) >= len(whole)


@pytest.mark.parametrize("announced", [True, False])
def test_what_was_used_counts_and_not_what_was_taken(announced: bool) -> None:
    dataset = range(100)
    sampler = BundleRandomSampler(dataset, seed=1)
    with_workers = DataLoader(dataset, batch_size=5, sampler=sampler, num_workers=1, multiprocessing_context="fork")
    sampler.set_epoch(3)
    batches = iter(with_workers)
    used = [next(batches).tolist() for _ in range(6)]
    assert sampler.state_dict()["position"] == 40, "the loader asks ahead"
    state = sampler.state_dict(used=30)
    del batches
    resumed = BundleRandomSampler(dataset, seed=1)
    resumed.load_state_dict(state)
    assert resumed.epoch == 3
    if announced:
        resumed.set_epoch(3)
    loaded = DataLoader(dataset, batch_size=5, sampler=resumed)
    rest = [batch.tolist() for batch in loaded]
    whole = BundleRandomSampler(dataset, seed=1)
    whole.set_epoch(3)
    assert list(itertools.chain(*used, *rest)) == list(whole)
    assert resumed.state_dict()["epoch"] == 4


def test_all_used_makes_an_empty_rest() -> None:
    sampler = BundleRandomSampler(range(10))
    list(sampler)
    for state, lengths in ((sampler.state_dict(used=10), [0, 10]), (sampler.state_dict(), [10, 10])):
        resumed = BundleRandomSampler(range(10))
        resumed.load_state_dict(state)
        assert [len(list(resumed)) for _ in range(2)] == lengths
        assert resumed.epoch == 2 if lengths[0] == 0 else 3


def test_another_epoch_begins_at_its_start() -> None:
    sampler = BundleRandomSampler(range(10))
    sampler.load_state_dict({**sampler.state_dict(), "epoch": 2, "position": 7})
    sampler.set_epoch(3)
    assert len(list(sampler)) == 10


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"bundle_ratio": 0.2}, "bundle_ratio is 0.2 and was 0.1"),
        ({"seed": 1}, "seed is 1 and was 0"),
        ({"num_replicas": 4, "rank": 0}, "num_replicas is 4 and was 2"),
        ({"drop_last": True}, "drop_last is True and was False"),
        ({"dataset": range(9)}, "samples is 9 and was 10"),
    ],
)
def test_a_state_of_another_order_is_refused(changed: dict[str, Any], named: str) -> None:
    usual: dict[str, Any] = {"dataset": range(10), "num_replicas": 2, "rank": 1}
    state = BundleRandomSampler(**usual).state_dict()
    with pytest.raises(ValueError, match=named):
        BundleRandomSampler(**{**usual, **changed}).load_state_dict(state)


def test_bad_places_are_refused() -> None:
    sampler = BundleRandomSampler(range(10))
    state = sampler.state_dict()
    for bad in ({"position": 11}, {"position": -1}, {"epoch": -1}, {"order": {}}):
        with pytest.raises(ValueError, match=r"samples of an epoch|the first is 0|another order"):
            sampler.load_state_dict({**state, **bad})
    with pytest.raises(ValueError, match="11 samples"):
        sampler.state_dict(used=11)
    with pytest.raises(ValueError, match="epoch -1"):
        sampler.set_epoch(-1)


@of_torchdata
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("stop", [0, 7, 10, 13])
def test_torchdatas_loader_saves_and_resumes_it(workers: int, stop: int) -> None:
    """Ten batches per epoch: stopped before, in the middle, after the last batch, in the second epoch."""
    stateful = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader
    dataset = list(range(40))

    context = {"multiprocessing_context": "fork"} if workers else {}

    def loader() -> Any:
        return stateful(
            dataset, batch_size=4, sampler=BundleRandomSampler(dataset, 0.2), num_workers=workers, **context
        )

    whole = loader()
    batches = [[batch.tolist() for batch in whole] for _ in range(3)]
    stopped = loader()
    if stop > 10:
        assert [batch.tolist() for batch in stopped] == batches[0]
    reading = iter(stopped) if stop else None
    for _ in range(stop if stop <= 10 else stop - 10):
        next(reading)
    state = pickle.loads(pickle.dumps(stopped.state_dict()))
    del reading, stopped
    resumed = loader()
    resumed.load_state_dict(state)
    epoch = stop // 11
    assert [batch.tolist() for batch in resumed] == batches[epoch][stop - 10 * epoch :]
    assert [batch.tolist() for batch in resumed] == batches[epoch + 1]


@of_torchdata
def test_torchdatas_loader_resumes_after_an_epochs_end() -> None:
    stateful = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader
    dataset = list(range(40))
    saved, resumed = (stateful(dataset, batch_size=4, sampler=BundleRandomSampler(dataset)) for _ in range(2))
    list(saved)
    resumed.load_state_dict(saved.state_dict())
    assert [batch.tolist() for batch in resumed] == [batch.tolist() for batch in saved]


# ---- loaders and processes


def test_in_a_loader_with_workers() -> None:
    dataset = torch.arange(60)
    loader = DataLoader(
        dataset,
        batch_size=7,
        sampler=BundleRandomSampler(dataset),
        num_workers=2,
        multiprocessing_context="fork",
        persistent_workers=True,
    )
    expected = BundleRandomSampler(dataset)
    for _ in range(2):
        assert torch.cat(list(loader)).tolist() == list(expected)


def test_it_can_be_pickled_and_goes_on() -> None:
    sampler = BundleRandomSampler(range(30))
    list(sampler)
    assert list(pickle.loads(pickle.dumps(sampler))) == list(sampler)


RANK = """
import sys
import torch.distributed as dist
from hpcstage.torch import BundleRandomSampler
rank = int(sys.argv[1])
assert len(BundleRandomSampler(range(10))) == 10
dist.init_process_group("gloo", init_method="file://" + sys.argv[2], rank=rank, world_size=2)
print(*BundleRandomSampler(range(10)), flush=True)
dist.barrier()  # a rank that left now could fail the other, which may still be connecting to it
dist.destroy_process_group()
"""


def test_ranks_come_from_torch_distributed(tmp_path: Path) -> None:
    words = [[sys.executable, "-c", RANK, str(rank), str(tmp_path / "meet")] for rank in range(2)]
    env = {**os.environ, **GLOO}
    processes = [subprocess.Popen(word, cwd=REPO, env=env, stdout=subprocess.PIPE, text=True) for word in words]
    try:
        outputs = [process.communicate(timeout=300)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    parts = [list(map(int, output.split())) for output in outputs]
    assert parts == [list(BundleRandomSampler(range(10), num_replicas=2, rank=rank)) for rank in range(2)]
    assert sorted(itertools.chain(*parts)) == list(range(10))


def test_places_out_of_range_are_named() -> None:
    for replicas, rank, named in ((2, 2, "rank 2 of 2"), (2, -1, "rank -1"), (0, 0, "num_replicas 0")):
        with pytest.raises(ValueError, match=named):
            BundleRandomSampler(range(10), num_replicas=replicas, rank=rank)
    with pytest.raises(ValueError, match="belong together"):
        BundleRandomSampler(range(10), rank=1)
