"""Gives Lightning's trainer the background saver: `Trainer(plugins=[LightningCheckpointIO()])`. Needs Lightning.

Lightning's callbacks decide which checkpoints there are, how they are named and how many are kept.
"""

# ruff: noqa: ANN401 - storage options and map locations are of any type, as in Lightning

from __future__ import annotations

import contextlib
import os
from collections import deque
from pathlib import Path
from typing import Any

import torch

from hpcstage.torch.checkpoints.entry import named_or_left, remove_entry
from hpcstage.torch.checkpoints.saving import OF_PROCESS, Saver

try:
    from lightning.fabric.plugins import TorchCheckpointIO
except ModuleNotFoundError:  # the package that was there before, with the same interface
    from lightning_fabric.plugins import TorchCheckpointIO  # type: ignore[assignment]


class LightningCheckpointIO(TorchCheckpointIO):
    """Writes Lightning's checkpoints in the background, each as a directory that has its name when it is whole.

    Files that Lightning wrote without this class are loaded as before. What a callback drops goes when the checkpoint
    that is being written is on the disk, and stays as long as the last one could not be written: one is always left.
    """

    def __init__(self) -> None:
        self._saver = Saver()
        self._dropped: deque[str] = deque()

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        """Copies the state and returns; waits first for the one before. `storage_options` is refused, as in the base.

        Raises a ValueError for the address of a remote file system, and CheckpointNotSaved if the save before failed;
        this one is saved nonetheless.
        """
        if storage_options is not None:
            raise TypeError("LightningCheckpointIO takes no storage_options")
        if _is_address(path):
            raise ValueError(f"LightningCheckpointIO saves to local paths, not to {path}: leave it out for that")
        target = os.path.abspath(path)
        with contextlib.suppress(ValueError):
            self._dropped.remove(target)
        Path(target).parent.mkdir(parents=True, exist_ok=True)
        with OF_PROCESS.measured():
            step = int(checkpoint.get("global_step", 0))
            before = self._saver.save(checkpoint, step, Path(target), self._drop)
        if before is not None:
            raise before

    def load_checkpoint(self, path: str | Path, map_location: Any = None, weights_only: bool | None = None) -> Any:
        """Returns the state, verified. Raises DamagedEntry if it is not as it was written."""
        found = None if _is_address(path) else named_or_left(Path(os.path.abspath(path)))
        if found is None or not found.is_dir():
            return super().load_checkpoint(path, map_location or (lambda storage, _: storage), weights_only)
        device = map_location if isinstance(map_location, str | torch.device) else "cpu"
        return self._saver.load(found, torch.device(device)).state

    def remove_checkpoint(self, path: str | Path) -> None:
        """Removes a checkpoint: at once, or when the one that is being written is on the disk."""
        self._dropped.append(os.fspath(path) if _is_address(path) else os.path.abspath(path))
        if not self._saver.busy and not self._saver.failures:
            self._drop()

    def teardown(self) -> None:
        """Waits for the last checkpoint and gives the memory back. Raises CheckpointNotSaved if it is not saved."""
        self._saver.release()
        if not self._saver.failures:
            self._drop()

    def _drop(self) -> None:
        while self._dropped:
            path = self._dropped.popleft()
            if os.path.isdir(path) and not os.path.islink(path):
                remove_entry(self._saver.files, Path(path))
            else:
                super().remove_checkpoint(path)


def _is_address(path: str | Path) -> bool:
    """Tells whether a path names a remote file system: `s3://...`."""
    return "://" in os.fspath(path)
