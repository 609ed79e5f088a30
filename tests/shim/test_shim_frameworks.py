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
STATEFUL = """
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import RandomSampler as Stateful, StatefulDistributedSampler
read = []
def orders(loader, epochs=2, take=None):
    for epoch in range(epochs):
        order = []
        for number, batch in enumerate(loader):
            order += batch.reshape(-1).tolist()
            if number + 1 == take: break
        read.append(order)
    return loader
def resumed(make, epochs=2):
    state = orders(make(), 1, take=2).state_dict()
    loader = make()
    loader.load_state_dict(state)
    orders(loader, epochs)
def loader(*arguments, **options): return StatefulDataLoader(Files(0, 20), *arguments, **options)
def collated(*arguments, **options): return loader(*arguments, collate_fn=torch.tensor, **options)
orders(loader(3, shuffle=True))
orders(loader(3, shuffle=True, num_workers=2, drop_last=True))
orders(loader(3, shuffle=True, num_workers=2, persistent_workers=True))
orders(loader(3))
orders(collated(None, shuffle=True))
orders(loader(3, sampler=Stateful(range(20), replacement=True, num_samples=95)))
seeded = torch.Generator().manual_seed(8)
orders(loader(3, sampler=Stateful(range(20), num_samples=50, generator=seeded), drop_last=True))
orders(loader(3, sampler=RandomSampler(range(20))))
orders(loader(batch_sampler=BatchSampler(RandomSampler(range(20)), 3, False)))
orders(DataLoader(Files(0, 20), 3, sampler=Stateful(range(20))))
sampler = StatefulDistributedSampler(Files(0, 20), 2, 1)
distributed = loader(3, sampler=sampler)
for epoch in range(2):
    sampler.set_epoch(epoch)
    orders(distributed, 1)
resumed(lambda: loader(3, shuffle=True))
resumed(lambda: loader(3, shuffle=True, num_workers=2))
resumed(lambda: loader(3, sampler=StatefulDistributedSampler(Files(0, 20), 2, 0)))
known = len(read)
resumed(lambda: loader(3, sampler=RandomSampler(range(20))))
resumed(lambda: loader(batch_sampler=BatchSampler(SequentialSampler(range(20)), 3, False)))
say([read, states(), known])
"""
HUGGING_FACE = """
import datasets, PIL.Image
datasets.disable_progress_bars()
paths = [src("f%02d" % i) for i in range(20)]
for path in paths: assert os.path.exists(path)
def batch_of(rows): return {"n": [int(open(path).read()) for path in rows["path"]]}
listed = datasets.Dataset.from_dict({"path": paths, "label": [0] * 20})
pictures = datasets.Dataset.from_dict(
    {"image": paths}, features=datasets.Features({"image": datasets.Image(decode=False)}))
def opened(rows): return {"n": [int(open(image["path"]).read()) for image in rows["image"]]}
read = []
def orders(data, epochs=2, **options):
    for epoch in range(epochs):
        read.append([i for batch in DataLoader(data, 3, **options) for i in batch["n"].tolist()])
orders(listed.with_transform(batch_of), shuffle=True)
orders(listed.with_transform(batch_of), shuffle=True, num_workers=2)
orders(pictures.with_transform(opened), shuffle=True)
orders(pictures.shuffle(seed=4).with_transform(opened))
orders(listed.train_test_split(0.25, seed=5)["train"].with_transform(batch_of), shuffle=True)
orders(Subset(listed.with_transform(batch_of), [5, 3, 2, 9]), shuffle=True)
orders(datasets.concatenate_datasets([listed, listed]).with_transform(batch_of), shuffle=True)
say([read, states()])
"""


def both(lab: Lab, code: str) -> tuple[Any, list[list[int]]]:
    """What the program said, the same with and without us, and what was announced."""
    for index in range(FILES):
        lab.put(f"f{index:02d}", b"%d" % index)
    lab.install()
    without = lab.run(COMMON + code, env=lab.environment(HPCSTAGE_DISABLE="1"), timeout_s=400)
    with Epochs(lab) as epochs:
        assert lab.run(COMMON + code, timeout_s=400) == without
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


def test_torchdata(native_lab: Lab) -> None:
    pytest.importorskip("torchdata.stateful_dataloader")
    (read, _, known), announced = both(native_lab, STATEFUL)
    said = [*range(known), known, known + 2, known + 3, known + 5]  # not the rest of what others than theirs began
    pairs = [(order, read[number]) for order, number in zip(announced, said, strict=True)]
    assert all(order[: len(batches)] == batches for order, batches in pairs)
    unread = [len(batches) for order, batches in pairs if order != batches]
    assert unread == [6] * 5, "those that were not read to their end"


def test_hugging_face(native_lab: Lab) -> None:
    pytest.importorskip("datasets")
    pytest.importorskip("PIL")
    (read, _), announced = both(native_lab, HUGGING_FACE)
    assert announced == read
