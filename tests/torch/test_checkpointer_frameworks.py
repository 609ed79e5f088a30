"""Lightning's trainer and Accelerate save through the background saver, and a training that resumes is the same."""

from __future__ import annotations

import errno
import importlib.util
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
from conftest import REPO, wait_for
from savednames import names

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


@pytest.fixture
def plugin() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip("lightning.fabric")
        from hpcstage.torch import LightningCheckpointIO

        made = LightningCheckpointIO()
    yield made
    made.teardown()


def test_lightning_the_last_good_one_stays_while_saves_fail(
    plugin: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    plugin.save_checkpoint({"epoch": 0}, tmp_path / "epoch=0.ckpt")
    plugin._saver.wait()
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        plugin.save_checkpoint({"epoch": 1}, tmp_path / "epoch=1.ckpt")
        wait_for(lambda: not plugin._saver.busy, what="the end of the writing")
    plugin.remove_checkpoint(tmp_path / "epoch=0.ckpt")
    assert names(tmp_path) == ["epoch=0.ckpt"]
    with pytest.raises(Exception, match=r"epoch=1\.ckpt was not saved"):
        plugin.teardown()
    plugin.teardown()
    assert names(tmp_path) == ["epoch=0.ckpt"]
    plugin.save_checkpoint({"epoch": 2}, tmp_path / "epoch=2.ckpt")
    plugin.teardown()
    assert names(tmp_path) == ["epoch=2.ckpt"]
    assert "not saved" in capfd.readouterr().err


def test_lightning_one_that_was_dropped_and_saved_again_stays(plugin: Any, tmp_path: Path) -> None:
    plugin.save_checkpoint({"epoch": 0}, tmp_path / "last.ckpt")
    plugin._saver.wait()
    plugin._dropped.append(os.fspath(tmp_path / "last.ckpt"))
    plugin.save_checkpoint({"epoch": 1}, tmp_path / "last.ckpt")
    plugin.teardown()
    assert plugin.load_checkpoint(tmp_path / "last.ckpt") == {"epoch": 1}


@pytest.mark.parametrize("kind", ["file", "link"])
def test_lightning_takes_the_place_of_a_file(plugin: Any, tmp_path: Path, kind: str) -> None:
    other = tmp_path / "epoch=0.ckpt"
    plugin.save_checkpoint({"epoch": 0}, other)
    if kind == "file":
        (tmp_path / "last.ckpt").write_bytes(b"Lightning's own")
    else:
        (tmp_path / "last.ckpt").symlink_to(other.name)
    plugin.save_checkpoint({"epoch": 1}, tmp_path / "last.ckpt")
    plugin.teardown()
    assert names(tmp_path) == ["epoch=0.ckpt", "last.ckpt"]
    assert plugin.load_checkpoint(tmp_path / "last.ckpt") == {"epoch": 1}
    assert plugin.load_checkpoint(other) == {"epoch": 0}, "not the one that the link named"


def test_lightning_removes_what_a_killed_one_left(plugin: Any, tmp_path: Path) -> None:
    from hpcstage.torch.checkpoints.entrynames import claimed

    plugin.save_checkpoint({"epoch": 0}, tmp_path / "last.ckpt")
    plugin._saver.wait()
    left, living = (tmp_path / f".last.ckpt.{digit * 12}" for digit in "ab")
    for path in (left, living):
        path.mkdir()
        (path / "tensors").write_bytes(b"half")
    (tmp_path / ".last.ckpt.cccccccccccc").write_bytes(b"a file that was replaced")
    with claimed(living, "tensors"):
        plugin.save_checkpoint({"epoch": 1}, tmp_path / "last.ckpt")
        plugin.teardown()
    assert names(tmp_path) == [living.name, "last.ckpt"]


def test_lightning_loads_one_that_lost_its_name(plugin: Any, tmp_path: Path) -> None:
    plugin.save_checkpoint({"epoch": 0}, tmp_path / "last.ckpt")
    plugin.teardown()
    (tmp_path / "last.ckpt").rename(tmp_path / ".last.ckpt.aaaaaaaaaaaa")
    assert plugin.load_checkpoint(tmp_path / "last.ckpt") == {"epoch": 0}


def test_lightning_refuses_remote_paths(plugin: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"local paths, not to s3://bucket/last\.ckpt"):
        plugin.save_checkpoint({}, "s3://bucket/last.ckpt")
    assert names(tmp_path) == []


def run(program: str, directory: Path) -> None:
    command = [sys.executable, "-c", program, os.fspath(directory)]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, timeout=300, check=False)
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
    assert names(tmp_path / "c") == ["step-00000003", "step-00000006"]
