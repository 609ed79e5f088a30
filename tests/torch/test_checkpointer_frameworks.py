"""Lightning's trainer and Accelerate save through the background saver, and a training that resumes is the same."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import REPO

pytest.importorskip("torch")
pytest.importorskip("xxhash", reason="needs the extra `checkpoint`")

pytestmark = [pytest.mark.torch, pytest.mark.slow]

LIGHTNING = """
import sys, warnings
warnings.simplefilter("ignore")
import torch, lightning
from lightning.pytorch.callbacks import ModelCheckpoint
from hpcstage.torch import LightningCheckpointIO

class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.save_hyperparameters()
        self.net = torch.nn.Linear(4, 1)
    def training_step(self, batch, _):
        loss = self.net(batch[0]).square().mean()
        self.log("loss", loss)
        return loss
    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.05)
        return [optimizer], [torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 3])]

def trained(epochs, directory, resume=None):
    lightning.seed_everything(1, verbose=False)
    kept = ModelCheckpoint(dirpath=directory, filename="{epoch}", save_last="link")
    trainer = lightning.Trainer(
        max_epochs=epochs, accelerator="cpu", devices=1, logger=False, enable_progress_bar=False,
        enable_model_summary=False, callbacks=[kept], plugins=[LightningCheckpointIO()],
    )
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(8, 4)), batch_size=4)
    model = Model()
    trainer.fit(model, data, ckpt_path=resume)
    return model.net.weight.detach()

top = sys.argv[1]
whole = trained(4, top + "/whole")
trained(2, top + "/parts")
resumed = trained(4, top + "/parts", resume=top + "/parts/epoch=1.ckpt")
assert torch.equal(whole, resumed), (whole, resumed)
"""

ACCELERATE = """
import sys, torch
from accelerate import Accelerator
from hpcstage.torch import AcceleratedState, Checkpointer

def trained(first, last, checkpointer=None):
    torch.manual_seed(1)
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    accelerated = AcceleratedState(accelerator)
    if first:
        loaded = checkpointer.load()
        assert loaded.step == first
        accelerated.load_state_dict(loaded.state)
    for step in range(first, last):
        accelerator.backward(model(torch.ones(2, 4)).square().mean())
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    if checkpointer:
        checkpointer.save(accelerated.state_dict, last)
    return [p.detach().clone() for p in model.parameters()]

whole = trained(0, 6)
with Checkpointer(sys.argv[1]) as checkpointer:
    trained(0, 3, checkpointer)
with Checkpointer(sys.argv[1]) as checkpointer:
    parts = trained(3, 6, checkpointer)
assert all(map(torch.equal, whole, parts)), (whole, parts)
"""


def run(program: str, directory: Path) -> None:
    command = [sys.executable, "-c", program, os.fspath(directory)]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(importlib.util.find_spec("lightning") is None, reason="needs Lightning")
def test_lightning_goes_on_where_it_was(tmp_path: Path) -> None:
    run(LIGHTNING, tmp_path)
    assert sorted(path.name for path in (tmp_path / "whole" / "last.ckpt").iterdir()) == ["state.json", "tensors"]
    assert len([path for path in (tmp_path / "whole").iterdir() if not path.is_symlink()]) == 1, (
        "the others were dropped"
    )


@pytest.mark.skipif(importlib.util.find_spec("accelerate") is None, reason="needs Accelerate")
def test_accelerate_goes_on_where_it_was(tmp_path: Path) -> None:
    run(ACCELERATE, tmp_path / "c")
    assert sorted(os.listdir(tmp_path / "c")) == ["step-00000003", "step-00000006"]
