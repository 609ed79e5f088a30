"""Batches, errors, seeds and random states are those of PyTorch's loader, however many threads there are."""

from __future__ import annotations

import gc
import inspect
import os
import pickle
import random
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from random import random as drawn_by_name
from typing import Any

import numpy as np
import pytest
from conftest import REPO, wait_for

torch = pytest.importorskip("torch")
from torch.utils import data  # noqa: E402

from hpcstage.torch.loader import draws  # noqa: E402
from hpcstage.torch.loader.dataloader import DataLoader  # noqa: E402

pytestmark = pytest.mark.torch
ROWS = 23
WAIT_S = 120.0


class Drawing(data.Dataset[Any]):
    """Draws from everything, by every way, more for some samples than for others."""

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> list[Any]:
        values = [index, torch.rand(2).sum().item(), np.random.rand(), random.random(), drawn_by_name()]
        if index % 3 == 0:
            values += [random.gauss(0, 1), np.random.standard_normal(), random.choice("abc")]
            values += [int(torch.randperm(5)[0]), np.random.permutation(4).tolist(), random.sample(range(9), 3)]
        if index % 5 == 0:
            values += [torch.nn.functional.dropout(torch.ones(4)).tolist(), random.getrandbits(9)]
        if index == 7:
            torch.manual_seed(random.randrange(99))
            np.random.seed(5)
            random.seed(6)
        return values


class Whole(Drawing):
    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[index] for index in reversed(indices)]


class Failing(Drawing):
    def __init__(self, error: Any) -> None:
        self.error = error

    def __getitem__(self, index: int) -> Any:
        values = super().__getitem__(index)
        if index in (9, 10):
            raise self.error(f"sample {index}")
        return values


def as_is(batch: Any) -> Any:
    return batch


def epochs(made: Any, count: int = 2) -> list[Any]:
    """All that two epochs give, with what the program draws between batches; errors in their places."""
    torch.manual_seed(1)
    np.random.seed(2)
    random.seed(3)
    if made.generator is not None:
        made.generator.manual_seed(4)
    seen: list[Any] = []
    for _ in range(count):
        batches = iter(made)
        while True:
            try:
                seen.append(next(batches))
            except StopIteration:
                break
            except Exception as error:
                seen.append((type(error), str(error).partition("\n")[0], str(error).strip().rpartition("\n")[2]))
            seen.append((torch.rand(1).item(), np.random.rand(), random.random()))
    return seen


def both(dataset: Any, threads: int = 4, **options: Any) -> None:
    options.setdefault("collate_fn", as_is)
    plain = epochs(data.DataLoader(dataset, **options))
    assert len(plain) > 2
    assert epochs(DataLoader(dataset, **options, threads_per_worker=threads)) == plain


FORMS: dict[str, dict[str, Any]] = {
    "in order": {"batch_size": 4},
    "shuffled": {"batch_size": 4, "shuffle": True},
    "generator": {"batch_size": 5, "shuffle": True, "drop_last": True, "generator": torch.Generator()},
    "no batches": {"batch_size": None},
    "tuples": {"batch_sampler": [(1, 2), (3,), (9, 8, 7)]},
    "tensors": {"batch_sampler": [torch.tensor([3, 4]), torch.tensor([5])]},
    "own sampler": {"batch_size": 3, "sampler": data.SubsetRandomSampler([4, 8, 2, 7, 1])},
}


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("form", FORMS)
def test_same_batches(form: str, num_workers: int) -> None:
    both(Drawing(), num_workers=num_workers, **FORMS[form])


@pytest.mark.parametrize("threads", [1, 2, 7])
def test_any_number_of_threads(threads: int) -> None:
    both(Drawing(), threads, batch_size=4, shuffle=True)


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize(
    "dataset",
    [data.Subset(Drawing(), range(20, 2, -1)), data.Subset(data.Subset(Drawing(), range(20)), [4, 2, 1]), Whole(),
     data.Subset(Whole(), range(9)), data.ConcatDataset([Drawing(), Drawing()]), [[n, n] for n in range(9)],
     data.StackDataset(Drawing(), Drawing()) if hasattr(data, "StackDataset") else Drawing()],
    ids=["subset", "subset of a subset", "whole", "subset of whole", "concat", "list", "stack"],
)  # fmt: skip
def test_forms_of_datasets(dataset: Any, num_workers: int) -> None:
    both(dataset, batch_size=4, num_workers=num_workers)


@pytest.mark.parametrize("options", [
    {"persistent_workers": True, "prefetch_factor": 4}, {"prefetch_factor": 1}, {"timeout": 60},
    {"multiprocessing_context": "fork", "generator": torch.Generator()},
])  # fmt: skip
def test_options_of_workers(options: dict[str, Any]) -> None:
    both(Drawing(), batch_size=3, num_workers=2, shuffle=True, **options)


@pytest.mark.filterwarnings("ignore:.*pin_memory.*")
@pytest.mark.parametrize("num_workers", [0, 2])
def test_pinned_memory_where_there_is_nothing_to_pin_for(num_workers: int) -> None:
    both(Drawing(), batch_size=3, num_workers=num_workers, pin_memory=True)


@pytest.mark.skipif("in_order" not in inspect.signature(data.DataLoader.__init__).parameters, reason="older PyTorch")
def test_batches_as_they_come() -> None:
    """Which worker loads a batch is then by chance, and what it draws too: the batches are those of the sampler."""
    made = DataLoader(
        range(ROWS), batch_size=3, num_workers=2, in_order=False, collate_fn=as_is, threads_per_worker=4
    )  # fmt: skip
    for _ in range(2):
        assert sorted(made) == [list(range(ROWS))[start : start + 3] for start in range(0, ROWS, 3)]


SPAWNED = """
from test_loader_batches import Drawing, both
if __name__ == "__main__":
    both(Drawing(), batch_size=3, num_workers=1, multiprocessing_context="spawn", persistent_workers=True)
    print("same")
"""


@pytest.mark.slow
def test_spawned_workers(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(SPAWNED)
    paths = os.pathsep.join(map(os.fspath, [REPO, REPO / "tests", Path(__file__).parent]))
    done = subprocess.run(
        [sys.executable, program], capture_output=True, text=True, timeout=280, check=False,
        env={**os.environ, "PYTHONPATH": paths},
    )  # fmt: skip
    assert (done.stdout, done.stderr) == ("same\n", "")


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("error", [ValueError, KeyError, OSError])
def test_errors_are_those_of_the_first_sample_that_has_one(error: Any, num_workers: int) -> None:
    both(Failing(error), batch_size=6, num_workers=num_workers)


def test_a_sampler_that_raises() -> None:
    def sampler() -> Iterator[int]:
        yield from [1, 2, 3]
        raise OSError("no more")

    class Sampler:
        def __iter__(self) -> Iterator[int]:
            return sampler()

    made = [epochs(kind(Drawing(), 2, sampler=Sampler(), collate_fn=as_is, **more), 1)
            for kind, more in ((data.DataLoader, {}), (DataLoader, {"threads_per_worker": 3}))]  # fmt: skip
    assert made[0] == made[1]


@pytest.mark.parametrize("dataset", [Drawing(), Whole()], ids=["samples", "whole"])
def test_whenever_threads_take_turns(dataset: Any) -> None:
    plain = epochs(data.DataLoader(dataset, 4, collate_fn=as_is))
    before = sys.getswitchinterval()
    try:
        sys.setswitchinterval(1e-5)
        for threads in (2, 3, 4, 7) * 5:
            assert epochs(DataLoader(dataset, 4, collate_fn=as_is, threads_per_worker=threads)) == plain
    finally:
        sys.setswitchinterval(before)


def test_a_worker_that_cannot_loads_as_pytorch() -> None:
    """NumPy's global generator is one that the program made: nothing is known of its draws."""
    made = DataLoader(Where(), 3, num_workers=1, collate_fn=as_is, threads_per_worker=4)
    own, state, asks = np.random.get_bit_generator(), np.random.get_state(legacy=False), draws._Asking.asks
    try:
        draws._Asking.asks = None
        np.random.set_bit_generator(np.random.PCG64(1))
        in_main = [sample[1] for batch in made for sample in batch]
    finally:
        draws._Asking.asks = asks
        np.random.set_bit_generator(own)
        np.random.set_state(state)
    assert in_main == [True] * 6


# ---- threads


class Together(data.Dataset[int]):
    """Only where so many samples are loaded side by side does any of them end."""

    def __init__(self, count: int, rows: int) -> None:
        self.barrier = threading.Barrier(count)
        self.rows = rows

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, index: int) -> int:
        self.barrier.wait(WAIT_S)
        return index

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError("forked, not pickled")


@pytest.mark.parametrize("num_workers", [0, 1])
def test_samples_are_loaded_side_by_side(num_workers: int) -> None:
    made = DataLoader(Together(4, 16), 4, num_workers=num_workers, threads_per_worker=4)
    assert torch.stack(list(made)).reshape(-1).tolist() == list(range(16))


class Where(data.Dataset[Any]):
    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> Any:
        info = data.get_worker_info()
        mine = info is not None and (info.dataset is self, info.id, info.num_workers)
        gradients = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        return os.getpid(), threading.current_thread() is threading.main_thread(), mine, getattr(self, "began", []), \
            gradients, torch.get_num_threads()  # fmt: skip


def began(worker: int) -> None:
    info = data.get_worker_info()
    assert info is not None
    own = threading.current_thread() is threading.main_thread()
    info.dataset.began = [*getattr(info.dataset, "began", []), (worker, own, threading.active_count())]


def test_workers_begin_as_those_of_pytorch() -> None:
    made = DataLoader(Where(), 3, num_workers=2, worker_init_fn=began, collate_fn=as_is, threads_per_worker=2)
    for worker, batch in enumerate(made):
        for pid, in_main, mine, start, gradients, processors in batch:
            assert pid != os.getpid()
            assert not in_main
            assert mine == (True, worker, 2)
            assert start == [(worker, True, 1)]
            assert gradients == (True, False)
            assert processors == 1
    assert made.worker_init_fn is began
    assert made.multiprocessing_context is None


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_modes_of_the_calling_thread(mode: Callable[[], Any]) -> None:
    with mode():
        expected = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        batch = next(iter(DataLoader(Where(), 3, collate_fn=as_is, threads_per_worker=2)))
    assert {sample[4] for sample in batch} == {expected}


def pool_threads() -> list[threading.Thread]:
    gc.collect()
    return [thread for thread in threading.enumerate() if thread.name.startswith("hpcstage-loader")]


def test_threads_end_with_their_iterator() -> None:
    wait_for(lambda: not pool_threads(), WAIT_S, "the end of threads")
    made = DataLoader(Drawing(), 2, collate_fn=as_is, threads_per_worker=3)
    for batch in made:
        assert len(batch) == 2
        assert len(pool_threads()) == 3
        break
    wait_for(lambda: not pool_threads(), WAIT_S, "the end of threads")
    assert len(list(made)) == 12
    wait_for(lambda: not pool_threads(), WAIT_S, "the end of threads")


def test_workers_end_with_their_iterator() -> None:
    made = DataLoader(Drawing(), 2, num_workers=1, collate_fn=as_is, threads_per_worker=3)
    batches: Any = iter(made)
    next(batches)
    processes = batches._workers
    del batches
    gc.collect()
    assert [process.exitcode for process in processes] == [0]


def test_torch_compile_sees_no_mode_of_ours() -> None:
    from torch.utils import _python_dispatch

    list(DataLoader(Drawing(), 2, collate_fn=as_is, threads_per_worker=3))
    assert _python_dispatch._get_current_dispatch_mode() is None
    assert not getattr(_python_dispatch, "is_in_torch_dispatch_mode", lambda: False)()


def test_states_can_be_kept_and_pickled_as_before() -> None:
    list(DataLoader(Drawing(), 2, collate_fn=as_is, threads_per_worker=3))
    saved = random.getstate(), np.random.get_state(), torch.get_rng_state()
    first = random.random(), np.random.standard_normal(3).tolist(), torch.rand(2).tolist()
    random.setstate(saved[0])
    np.random.set_state(saved[1])
    torch.set_rng_state(saved[2])
    copied = pickle.loads(pickle.dumps(np.random.mtrand._rand))
    assert (random.random(), np.random.standard_normal(3).tolist(), torch.rand(2).tolist()) == first
    assert copied.standard_normal(3).tolist() == first[1]
    assert saved[1][0] == "MT19937"


# ---- as PyTorch's loader


class Stream(data.IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(5))


@pytest.mark.parametrize("num_workers", [0, 1])
def test_iterable_datasets_are_left_to_pytorch(num_workers: int) -> None:
    made = DataLoader(Stream(), 2, num_workers=num_workers, threads_per_worker=4)
    assert [batch.tolist() for batch in made] == [[0, 1], [2, 3], [4]]
    assert not pool_threads()


def test_it_is_one() -> None:
    dataset = Drawing()
    made = DataLoader(dataset, 2, threads_per_worker=2)
    assert isinstance(made, data.DataLoader)
    assert DataLoader[int]
    assert made.dataset is dataset
    assert len(made) == 12
    again = pickle.loads(pickle.dumps(made))
    assert again.threads_per_worker == 2
    assert epochs(again, 1)
