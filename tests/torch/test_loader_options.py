"""The options that choose samplers, the loops of frameworks, and what Ctrl-C leaves behind."""

from __future__ import annotations

import contextlib
import doctest
import os
import signal
import subprocess
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
from conftest import REPO

torch = pytest.importorskip("torch")
from torch.utils import data  # noqa: E402

from hpcstage.torch import BundleRandomSampler, LocalityAwareSampler  # noqa: E402
from hpcstage.torch.loader import dataloader  # noqa: E402
from hpcstage.torch.loader.dataloader import DataLoader  # noqa: E402

pytestmark = pytest.mark.torch
ROWS = 40


class Numbers(data.Dataset[Any]):
    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> Any:
        return torch.tensor([float(index)])


class Stream(data.IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


def order(made: Any) -> list[int]:
    return [int(value) for batch in made for value in batch.reshape(-1)]


def test_the_example() -> None:
    assert doctest.testmod(dataloader).attempted > 0
    assert not doctest.testmod(dataloader).failed


@pytest.mark.parametrize("num_workers", [0, 1])
def test_bundles(num_workers: int) -> None:
    options: dict[str, Any] = {"num_workers": num_workers, "threads_per_worker": 2}
    made = DataLoader(Numbers(), 4, shuffle=True, bundle_ratio=0.25, seed=3, **options)
    sampler = BundleRandomSampler(Numbers(), bundle_ratio=0.25, seed=3)
    assert isinstance(made.sampler, BundleRandomSampler)
    for epoch in range(3):
        made.set_epoch(epoch)
        sampler.set_epoch(epoch)
        assert order(made) == list(sampler)


def test_locality_without_a_daemon() -> None:
    made = DataLoader(Numbers(), 6, locality=True, seed=3, drop_last=True, threads_per_worker=2)
    sampler = LocalityAwareSampler(Numbers(), 6, seed=3, drop_last_batch=True)
    assert isinstance(made.batch_sampler, LocalityAwareSampler)
    for epoch in range(2):
        made.set_epoch(epoch)
        sampler.set_epoch(epoch)
        assert [batch.reshape(-1).tolist() for batch in made] == list(sampler)


def test_set_epoch_reaches_distributed_samplers() -> None:
    sampler = data.DistributedSampler(Numbers(), 2, 0)
    for made in (
        DataLoader(Numbers(), 4, sampler=sampler),
        DataLoader(Numbers(), batch_sampler=data.BatchSampler(sampler, 4, False)),
    ):
        made.set_epoch(0)
        first = order(made)
        made.set_epoch(1)
        assert order(made) != first
    DataLoader(Numbers(), 4).set_epoch(1)


@pytest.mark.parametrize(
    ("dataset", "options", "says"),
    [
        (Numbers(), {"threads_per_worker": 0}, "at least 1"),
        (Numbers(), {"bundle_ratio": 0.1}, "shuffle=True"),
        (Numbers(), {"bundle_ratio": 0.1, "sampler": range(3)}, "mutually exclusive"),
        (Numbers(), {"bundle_ratio": 0.1, "shuffle": True, "locality": True}, "mutually exclusive"),
        (Numbers(), {"locality": True, "batch_sampler": [[1]]}, "mutually exclusive"),
        (Numbers(), {"locality": True, "shuffle": False}, "shuffles"),
        (Numbers(), {"locality": True, "batch_size": None}, "batch_size"),
        (Stream(), {"locality": True}, "IterableDataset"),
        (Numbers(), {"timeout": -1}, "timeout"),
        (Numbers(), {"num_workers": 0, "prefetch_factor": 2}, "prefetch_factor"),
    ],
)
def test_bad_options(dataset: Any, options: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        DataLoader(dataset, **options)


# ---- frameworks


def test_lightning() -> None:
    """Trainer takes the loader as it is, and tells its sampler the epoch."""
    lightning = pytest.importorskip("lightning")

    class Model(lightning.LightningModule):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)
            self.read: list[list[int]] = [[], []]

        def training_step(self, batch: Any, _: int) -> Any:
            self.read[self.current_epoch] += batch.reshape(-1).int().tolist()
            return self.layer(batch).square().mean() * 1e-6

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 1e-6)

    sampler = data.DistributedSampler(Numbers(), 2, 1)
    expected = []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        expected.append(list(sampler))
    model = Model()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = lightning.Trainer(
            max_epochs=2, accelerator="cpu", devices=1, logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False, use_distributed_sampler=False,
        )  # fmt: skip
        made = DataLoader(Numbers(), 4, sampler=sampler, threads_per_worker=2)
        trainer.fit(model, made)
    assert model.read == expected
    assert trainer.train_dataloader is made


def test_accelerate() -> None:
    """The loader is left out of `prepare`, which would build a plain one of its own."""
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True)
    model = torch.nn.Linear(1, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 1e-6))
    made = DataLoader(Numbers(), 4, threads_per_worker=2)
    read = []
    for batch in made:
        batch = accelerate.utils.send_to_device(batch, accelerator.device)
        accelerator.backward(model(batch).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        read += batch.reshape(-1).int().tolist()
    assert read == list(range(ROWS))
    assert order(accelerator.prepare(DataLoader(Numbers(), 4, threads_per_worker=2))) == read


# ---- Ctrl-C

INTERRUPTED = """
import signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
from torch.utils.data import Dataset
from hpcstage.torch.loader.dataloader import DataLoader
class Slow(Dataset):
    def __len__(self): return 20
    def __getitem__(self, index):
        if index > 5:
            sys.stdout.write("reading\\n"); sys.stdout.flush()
            time.sleep(60)
        return index
for batch in DataLoader(Slow(), 2, num_workers=int(sys.argv[1]), threads_per_worker=4): pass
"""


@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_interrupt_ends_it(num_workers: int) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED, str(num_workers)], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        start_new_session=True, env={**os.environ, "PYTHONPATH": os.fspath(REPO)},
    ) as process:  # fmt: skip
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"reading\n"
            os.killpg(process.pid, signal.SIGINT)
            _, err = process.communicate(timeout=300)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == -signal.SIGINT
    assert b"KeyboardInterrupt" in err
