"""Frameworks that wrap PyTorch's loaders: what they read is announced too, and they behave as without us."""

from __future__ import annotations

import os
from typing import Any

import pytest
from epochlab import Epochs
from shimlab import Lab

pytest.importorskip("torch")
pytest_plugins = ("shimfixtures",)
pytestmark = pytest.mark.torch
FILES = 20
COMMON = """
import logging, warnings
warnings.simplefilter("ignore")
logging.disable(logging.WARNING)
import random, numpy, torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler, SequentialSampler, Subset
class Files(Dataset):
    def __init__(self, first, count): self.paths = [src("f%02d" % i) for i in range(first, first + count)]
    def __len__(self): return len(self.paths)
    def __getitem__(self, index): return int(open(self.paths[index]).read())
def states():
    import hashlib
    texts = torch.get_rng_state().tolist(), random.getstate(), numpy.random.get_state()[1].tolist()
    return hashlib.sha256(repr(texts).encode()).hexdigest()
torch.manual_seed(3); random.seed(4); numpy.random.seed(5)
"""
ACCELERATE = """
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.data_loader import BatchSamplerShard, DataLoaderShard, prepare_data_loader, skip_first_batches
def orders(loader, epochs=2): return [[i for batch in loader for i in batch.tolist()] for epoch in range(epochs)]
def prepared(seedable, **options):
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(use_seedable_sampler=seedable))
    return accelerator.prepare(DataLoader(Files(0, 20), 3, shuffle=True, **options))
def sharded(process, **options):
    loader = DataLoader(Files(0, 20), 3, shuffle=True, generator=torch.Generator())
    return prepare_data_loader(loader, torch.device("cpu"), 2, process, **options)
read = [*orders(prepared(False)), *orders(prepared(True)), *orders(prepared(True, num_workers=2))]
read += [*orders(sharded(0)), *orders(sharded(1, use_seedable_sampler=True)), *orders(sharded(1, even_batches=False))]
read += orders(skip_first_batches(prepared(True), 2))
say([read, states()])
"""
LIGHTNING = """
import lightning
from lightning.pytorch.overrides.distributed import UnrepeatedDistributedSampler, _IndexBatchSamplerWrapper
from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
read = []
class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
    def step(self, batch, kind):
        if not self.trainer.sanity_checking: read.append([kind, batch.tolist()])
        return self.layer(batch.float()[:, None]).square().mean()
    def training_step(self, batch, _): return self.step(batch, "train")
    def validation_step(self, batch, _): self.step(batch, "val")
    def predict_step(self, batch, _): self.step(batch, "predict")
    def configure_optimizers(self): return torch.optim.SGD(self.parameters(), 1e-6)
model = Model()
trainer = lightning.Trainer(max_epochs=2, accelerator="cpu", devices=1, logger=False, enable_checkpointing=False,
    enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0)
trainer.fit(model, DataLoader(Files(0, 12), 5, shuffle=True), DataLoader(Files(12, 8), 5))
trainer.predict(model, DataLoader(Files(2, 9), 4))
def orders(kind, loader):
    for epoch in range(2): read.extend([kind, batch.tolist()] for batch in loader)
def over(inner): return DistributedSamplerWrapper(inner, num_replicas=2, rank=1, shuffle=False)
data = Files(0, 20)
orders("wrapped", DataLoader(data, 3, sampler=over(RandomSampler(data))))
orders("unrepeated", DataLoader(data, 3, sampler=UnrepeatedDistributedSampler(data, 3, 2)))
def captured(): return _IndexBatchSamplerWrapper(BatchSampler(RandomSampler(data), 3, False))
orders("captured", DataLoader(data, batch_sampler=captured()))
orders("captured, kept", DataLoader(data, num_workers=1, persistent_workers=True, batch_sampler=captured()))
say([read, states(), [p.tolist() for p in model.parameters()]])
"""


def both(lab: Lab, code: str) -> tuple[Any, list[list[int]]]:
    """What the program said, the same with and without us, and what was announced."""
    for index in range(FILES):
        lab.put(f"f{index:02d}", b"%d" % index)
    lab.install()
    without = lab.run(COMMON + code, env=lab.environment(HPCSTAGE_DISABLE="1"), timeout_s=100)
    with Epochs(lab) as epochs:
        assert lab.run(COMMON + code, timeout_s=100) == without
    assert lab.counters().get("errors", 0) == 0
    return without, [[int(os.path.basename(path)[1:]) for path in one.paths()] for one in epochs.begun()]


def test_accelerate(native_lab: Lab) -> None:
    pytest.importorskip("accelerate")
    said, announced = both(native_lab, ACCELERATE)
    assert announced == said[0]


def test_lightning(native_lab: Lab) -> None:
    pytest.importorskip("lightning")
    said, announced = both(native_lab, LIGHTNING)
    orders: list[tuple[str, list[int]]] = []
    for kind, batch in said[0]:
        if not orders or orders[-1][0] != kind or len(orders[-1][1]) == len(announced[len(orders) - 1]):
            orders.append((kind, []))
        orders[-1][1].extend(batch)
    assert [order for _, order in orders] == announced
